"""Read runs from the folders that the runner leaves. The folder is the source of truth, also for runs in MLflow."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.compare.runs import ACCUMULATION, SINGLE, BlockKey, Found, K, Phases, Property, Refused, Run
from runner.errors import UserError, did_you_mean
from runner.folder.age import started_ms

#: What is read of a run; all else in its folder is not needed.
FILES = ("config.yaml", "plan.json", "certificate.json", "summary.json", "metrics.jsonl")
_SEED_SUFFIX = re.compile(r" · s\d+$")
#: Settings that say nothing about the experiment.
_APART = ("seed", "log_every", "tracking", "cache_dir")
#: Metrics of which less is better, where no run says so itself.
_LOWER_IS_BETTER = re.compile(r"(^|_)(loss|perplexity|error|wer|cer|mse|mae|rmse)$")


class NotComparable(Exception):
    """Why a folder holds no run that can be compared, in a few words."""


def run_folders(path: Path) -> list[Path]:
    """`path` itself if it is a run's folder, else the runs' folders in it, in order. Raises UserError."""
    if not path.is_dir():
        raise UserError(f"{path} is a file: give a run's folder, a sweep's folder, an MLflow run id, or --csv={path}")
    if _is_run(path):
        return [path]
    inside = sorted((folder for folder in _below(path) if folder.is_dir() and _is_run(folder)), key=_natural)
    if not inside:
        raise UserError(f"{path} holds no run: neither it nor the folders in it have a config.yaml or a summary.json")
    return inside


def _below(path: Path) -> list[Path]:
    """The folders in a folder; of a sweep those of its jobs, which may lie deeper."""
    if (path / "sweep.json").is_file():
        return [note.parent for note in path.rglob("job.json")]
    return list(path.iterdir())


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "summary.json").is_file()


def _natural(folder: Path) -> tuple[int, str]:
    """Job 10 of a sweep comes after job 9."""
    return (int(folder.name), "") if folder.name.isdecimal() else (-1, folder.name)


def read_folders(folders: Sequence[tuple[str, Path]], metric: str | None) -> Found:
    """The runs in folders, each with the name it is shown by. `metric`: another than their own. Raises UserError."""
    raw: list[_Folder] = []
    refused: list[Refused] = []
    for source, path in folders:
        try:
            raw.append(_Folder(source, path))
        except NotComparable as reason:
            refused.append(Refused(source, str(reason)))
    if metric is not None:
        known = sorted({name for folder in raw for name in folder.metrics})
        if raw and metric not in known:
            raise UserError(f"--metric={metric} was measured in none of the runs{did_you_mean(metric, known)}")
    # A digest that the runner wrote and one made here are never the same: use one kind for all.
    own_digests = all("setup_digest" in folder.summary for folder in raw)
    runs: list[Run] = []
    for folder in raw:
        try:
            runs.append(folder.run(metric, own_digests))
        except NotComparable as reason:
            refused.append(Refused(folder.source, str(reason)))
    return Found(runs, refused)


class _Folder:
    """One run's files. Raises NotComparable for a run that did not finish, or one of another tool."""

    def __init__(self, source: str, path: Path) -> None:
        self.source, self.path = source, path
        self.summary = self._json("summary.json")
        status = self.summary.get("status")
        if status != "FINISHED":
            raise NotComparable(str(status or "no status in summary.json"))
        self.plan = self._json("plan.json")
        self.config = self._config()
        self.certificate = self._json("certificate.json") if (path / "certificate.json").exists() else {}
        found = self.summary.get("eval")
        self.metrics: Mapping[str, float] = found if isinstance(found, dict) else {}

    def _text(self, name: str) -> str:
        path = self.path / name
        if not path.is_file():
            why = "still running, or ended without closing its books" if name == "summary.json" else "not a whole run"
            raise NotComparable(f"no {name}: {why}")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NotComparable(f"{name} cannot be read ({error})") from error

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads(self._text(name))
        except json.JSONDecodeError as error:
            raise NotComparable(f"{name} is no JSON (line {error.lineno})") from error
        if not isinstance(content, dict):
            raise NotComparable(f"{name} holds no table")
        return content

    def _config(self) -> dict[str, Any]:
        import yaml

        try:
            content = yaml.safe_load(self._text("config.yaml"))
        except yaml.YAMLError as error:
            raise NotComparable("config.yaml is no YAML") from error
        if not isinstance(content, dict):
            raise NotComparable("config.yaml holds no settings")
        return content

    def run(self, metric: str | None, own_digests: bool) -> Run:
        """The run. Raises NotComparable where its files lack what every finished run has."""
        name, goal = self._objective(metric)
        if not isinstance(self.metrics.get(name), (int, float)):
            raise NotComparable(f"has no metric {name}")
        try:
            return self._assembled(name, goal, own_digests)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise NotComparable(f"its files are not those of a run of this runner ({what})") from error

    def _objective(self, metric: str | None) -> tuple[str, str]:
        evaluation = self.config.get("evaluation") or {}
        own = self.summary.get("metric") or evaluation.get("metric")
        goal = self.summary.get("goal") or evaluation.get("goal") or "max"
        if metric is None or metric == own:
            return str(own), str(goal)
        return metric, "min" if _LOWER_IS_BETTER.search(metric) else "max"

    def _assembled(self, metric: str, goal: str, own_digests: bool) -> Run:
        summary, plan = self.summary, self.plan
        settings = {name: value for name, value in self.config.items() if name not in _APART}
        facts = [settings, _properties(self.certificate).get("recipe")]
        seconds = _training_seconds(summary)
        workers, k = int(plan["world_size"]), int(plan["k"])
        jobs_at_once = summary.get("jobs_at_once")
        return Run(
            source=self.source,
            block=self._block(metric, goal),
            setup=_SEED_SUFFIX.sub("", str(summary["setup"])),
            digest=str(summary["setup_digest"]) if own_digests else _digest(facts),
            seed=int(summary["seed"] if "seed" in summary else self.config["seed"]),
            workers=workers,
            accumulation=int(plan["accumulation_steps"]),
            k=k,
            precision=str(self.config["precision"]["name"]),
            method=SINGLE if workers == 1 else K if k > 1 else ACCUMULATION,
            metric=float(self.metrics[metric]),
            seconds=seconds,
            rehearsed=bool(summary.get("rehearsed")),
            machine=str(summary["machine"]) if summary.get("machine") else None,
            jobs_at_once=int(jobs_at_once) if jobs_at_once else None,
            varied={str(key): str(value) for key, value in (summary.get("varied") or {}).items() if key != "seed"},
            values=_flat({**settings, "plan": {key: value for key, value in plan.items() if key != "digest"}}),
            certificate=_properties(self.certificate) or None,
            withdrawn=self.certificate.get("withdrawn"),
            phases=_phases(summary, seconds),
            curve=_curve(self.path / "metrics.jsonl"),
            mlflow_run_id=summary.get("mlflow_run_id"),
            order=f"{started_ms(self.path):020d}",
        )

    def _block(self, metric: str, goal: str) -> BlockKey:
        recipe = self.config["recipe"]
        samples, epochs = int(self.plan["samples_per_epoch"]), int(self.plan["epochs"])
        total = int(self.plan["total_samples"])
        if total != samples * epochs:  # max_steps ends it before, or drop_last leaves tails out
            samples, epochs = total, 1
        data = recipe.get("data") if isinstance(recipe.get("data"), dict) else None
        conditions = (f"{epochs} epochs" if epochs > 1 else "", metric)
        return BlockKey(str(recipe["name"]), conditions, samples, epochs, metric, goal, _digest(data) if data else "")


def _training_seconds(summary: Mapping[str, Any]) -> float | None:
    rate, samples = summary.get("samples_per_s"), summary["samples_seen"]
    if not rate or not math.isfinite(rate) or not samples:
        return None
    return float(samples) / float(rate)


def _phases(summary: Mapping[str, Any], training: float | None) -> Phases | None:
    names = ("first_step_s", "wall_s", "comm_stall_s", "step_s", "evaluation_s")
    first, wall, stalled, step, evaluation = (summary.get(name) for name in names)
    if training is None or not first or not wall:
        return None
    return Phases(first, training, wall, stalled, step, evaluation)


def _properties(certificate: Mapping[str, Any]) -> dict[str, Property]:
    rows = [*certificate.get("equal", []), *certificate.get("different", [])]
    return {str(row["name"]): Property(row["value"], str(row["allows"])) for row in rows}


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`{"optimizer": {"lr": 1}}` as `{"optimizer.lr": "1"}`."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def _curve(path: Path) -> tuple[tuple[float, float], ...]:
    """(samples seen, training loss) of each logged step; the last line may be half written."""
    if not path.is_file():
        return ()
    from runner.folder.metrics_log import MetricsReader

    series: dict[str, dict[int, float]] = {"train/samples_seen": {}, "train/loss": {}}
    for metric in MetricsReader(path.parent).read():
        if metric.key in series:
            series[metric.key][metric.step] = float(metric.value)
    seen, losses = series["train/samples_seen"], series["train/loss"]
    return tuple((seen[step], losses[step]) for step in sorted(seen.keys() & losses.keys()))
