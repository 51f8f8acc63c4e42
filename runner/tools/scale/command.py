"""The command `python -m runner.scale`: options, the branches' jobs, their workers, and the answer."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from runner.backends.machine import threads_per_worker
from runner.config.arguments import ArgumentParser, config_dirs
from runner.config.choices import AccumulationMode, BatchMode, Goal, LedgerMode, ScalingBatch, ScalingRule, ShardingKind
from runner.config.compose import compose, settings
from runner.config.plain import to_plain
from runner.config.schema import Accumulation, Checkpoint, Config, Noise, Profile, Tracking
from runner.errors import UserError, require
from runner.folder.files import check_folder, digest_of, write_json
from runner.folder.lock import locked
from runner.folder.reading import files_below, read_json
from runner.launch.local import launch
from runner.launch.signals import handle_signals
from runner.plan import make_plan
from runner.plan.experiment import Experiment, prepare
from runner.plan.scaling import rule_for
from runner.run.preflight import reading_data, refuse_sweeper_params
from runner.run.progress import live_status
from runner.tools.scale.branches import LONGER, Branch, Findings, find, longer, planned
from runner.tools.scale.report import answer, print_findings, send, write_report
from runner.tools.scale.worker import OUTCOMES, START, read, run_launched
from runner.train.job import Job

#: Share of a run's samples in a branch.
_WINDOW = 0.25
#: The fewest optimizer steps of the largest batch in a window that make a training.
_FEWEST_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Test:
    """A branch test as it was asked for. `start`, `window`: samples. `margin`: see `Findings.limit`. `by`: `loss` or
    `metric`."""

    experiment: Experiment
    batches: tuple[int, ...]
    rules: dict[int, tuple[str, ...]]
    seeds: int
    start: int
    window: int
    margin: float
    by: str

    @property
    def reference(self) -> int:
        return self.experiment.config.scaling.reference_batch

    @property
    def branches(self) -> list[Branch]:
        return planned(self.reference, self.batches, self.rules, self.seeds)

    @property
    def digest(self) -> str:
        """Equal for tests that have the same branches with the same results."""
        # More seeds, or another margin, continue a test.
        left_out = ("experiment", "seeds", "margin", "by")
        asked = {name: value for name, value in vars(self).items() if name not in left_out}
        content = [self.experiment.job_digest, asked]
        return digest_of(content)[:10]

    def job(self, branch: Branch | None, folder: Path) -> Job:
        """The training of a branch; None: of the common weights, at the reference batch and the recipe's own length."""
        experiment = self.experiment
        config = _alone(experiment.config, experiment.plan.micro_batch)
        batch, rule, seed = (
            (branch.batch, branch.rule, branch.seed) if branch else (self.reference, "none", config.seed)
        )
        scaling = dataclasses.replace(config.scaling, rule=ScalingRule[rule], batch=ScalingBatch.global_batch)
        size = dataclasses.replace(config.batch, mode=BatchMode.fixed_global, global_batch=batch, micro_batch=None)
        config = dataclasses.replace(config, scaling=scaling, batch=size, seed=seed, max_steps=None)
        samples = experiment.facts.train_samples
        if branch is not None:
            length = branch.windows * self.window
            config = dataclasses.replace(
                config, epochs=math.ceil(length / samples), max_steps=max(round(length / batch), 1)
            )
        plan = make_plan(config, samples, 1)
        workers = experiment.placement.local_workers
        threads = threads_per_worker(workers, config.equivalence.threads)
        device = experiment.placement.device_type
        return Job(config, experiment.facts, folder, device, workers, threads, plan, time.time())


def _alone(config: Config, micro_batch: int) -> Config:
    """The same settings for one worker that makes any batch by accumulation, and is evaluated at its end only."""
    return dataclasses.replace(
        config,
        device=dataclasses.replace(config.device, workers=1),
        accumulation=Accumulation(AccumulationMode.auto, max_micro_batch=micro_batch),
        evaluation=dataclasses.replace(config.evaluation, every_steps=sys.maxsize, patience=None, keep_best=False),
        tracking=Tracking(),
        checkpoint=Checkpoint(),
        profile=Profile(),
        noise=Noise(),
        ledger=LedgerMode.fail,
    )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m runner.scale",
        description="Train briefly at the reference batch, then branch: the same window of samples at larger batches "
        "under each scaling rule, and compare the held-out loss. Ends with the largest batch for which training is the "
        "same. The same command continues an interrupted test.",
        epilog="example: python -m runner.scale recipe=cola recipe.data.train=train.tsv recipe.data.eval=dev.tsv "
        "device=cpu2 --batches 64,128,256",
        allow_abbrev=False,
    )
    recipe, samples = "the recipe, and the device whose workers train", "share of the run's samples"
    batches = "global batches (default: 2, 4 and 8 times the reference batch)"
    rules = "scaling rules (default: linear, sqrt and, for Adam, sde)"
    window = f"{samples} in a branch (default: 0.25, or an epoch if that is less)"
    margin = "share of what the reference batch learns in a window that may be lost (default: 0.1)"
    compared = "what is compared on the evaluation data (default: loss)"
    kept = "where results are kept (default: in outputs/scale)"
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=recipe)
    parser.add_argument("--batches", metavar="LIST", help=batches)
    parser.add_argument("--rules", metavar="LIST", help=rules)
    parser.add_argument("--seeds", type=int, default=3, help="seeds for each batch and rule (default: 3)")
    parser.add_argument("--start", type=float, default=0.1, help=f"{samples} before the branches (default: 0.1)")
    parser.add_argument("--window", type=float, help=window)
    parser.add_argument("--margin", type=float, default=0.1, help=margin)
    parser.add_argument("--by", choices=("loss", "metric"), default="loss", help=compared)
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help=kept)
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with additional config choices")
    return parser


def scale(arguments: Sequence[str], console: Console) -> int:
    """Run the command with these arguments; its exit code. Raises UserError."""
    options = _parser().parse_intermixed_args(list(arguments))
    test = _test(options)
    folder = options.folder or Path("outputs/scale") / f"{test.experiment.config.recipe['name']}-{test.digest}"
    check_folder("--folder", folder.parent if not folder.exists() else folder)
    jobs = {branch: test.job(branch, folder) for branch in test.branches}  # refuses rules that do not apply
    handle_signals()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError:
            raise UserError(f"--folder={folder} is in use by another test: wait for it, or end it first") from None
        _require_same(test, folder)
        findings = _run(test, jobs, folder, console)
        write_report(findings, test.experiment, folder)
        print_findings(findings, test.experiment, console)
        console.print(f"\n[bold]answer:[/] {escape(answer(findings, test.experiment))}", soft_wrap=True)
        console.print(f"  saved to {escape(os.path.relpath(folder))}", soft_wrap=True)
        for line in send(findings, test.experiment, folder):
            console.print(escape(line), soft_wrap=True)
    return 0


def _require_same(test: Test, folder: Path) -> None:
    """Refuse a folder with the results of another test, and cut a line off that a crash has left unfinished."""
    files_below(folder)  # refuses links: results would be written through them
    path = folder / "test.json"
    if path.exists() and read_json(path).get("digest") != test.digest:
        raise UserError(f"--folder={folder} contains a different test: choose a new folder, or leave it out")
    asked = {name: value for name, value in vars(test).items() if name != "experiment"}
    config = to_plain(dataclasses.replace(test.experiment.config, tracking=Tracking()))
    write_json(path, {"digest": test.digest, **asked, "config": config})
    if (outcomes := folder / OUTCOMES).exists():
        os.truncate(outcomes, outcomes.read_bytes().rfind(b"\n") + 1)


def _test(options: argparse.Namespace) -> Test:
    with reading_data() as progress:
        cfg = compose(options.overrides, config_dirs(options.config_dir))
        refuse_sweeper_params(cfg, "test one of its jobs")
        config = settings(cfg)
        alone = "each branch runs on one worker, in synchronous steps: use"
        mode = config.accumulation.mode
        whole = "shares of a run are of whole epochs: use fewer epochs or recipe.data.max_train_samples"
        for name, value, ok, rule in (
            ("sync.k", config.sync.k, config.sync.k == 1, f"{alone} sync.k=1"),
            ("sharding", config.sharding.kind, config.sharding.kind is ShardingKind.none, f"{alone} sharding=none"),
            ("equivalence.shards", config.equivalence.shards, config.equivalence.shards is None, f"{alone} standard"),
            ("max_steps", config.max_steps, config.max_steps is None, whole),
            ("accumulation", mode, mode is not AccumulationMode.fit, "a branch measures no memory: use fixed or auto"),
        ):
            require(ok, name, value, rule)
        experiment = prepare(config, progress)
    device = experiment.placement.device_type
    require(device != "xla", "device", config.device.kind, "not supported on torch_xla: use CPUs or GPUs")
    require(2 <= options.seeds <= 1000, "--seeds", options.seeds, "use at least 2: one has no interval")
    for name in ("start", "window", "margin"):
        value, least = getattr(options, name), name == "start"
        ok = value is None or ((0 <= value < 1) if least else (0 < value < 1))
        require(ok, f"--{name}", value, f"use a share {'of at least' if least else 'above'} 0 and below 1")
    return _of_sizes(options, experiment)


def _of_sizes(options: argparse.Namespace, experiment: Experiment) -> Test:
    config, samples = experiment.config, experiment.facts.train_samples
    reference = config.scaling.reference_batch
    batches = _numbers(options.batches) if options.batches else tuple(reference * factor for factor in (2, 4, 8))
    rule = f"use batches above scaling.reference_batch={reference}, such as {reference * 2},{reference * 4}"
    require(bool(batches) and min(batches) > reference, "--batches", options.batches, rule)
    share = options.window if options.window is not None else min(_WINDOW, 1 / config.epochs)
    asked = share * config.epochs * samples
    window = int(asked / batches[-1]) * batches[-1]
    most = min(samples, asked) / _FEWEST_STEPS
    rule = (
        f"a window of {share:.3g} of {config.epochs} × {samples:,} samples has fewer than {_FEWEST_STEPS} such "
        f"steps: use at most {math.floor(most)}, or a larger --window"
    )
    require(batches[-1] * _FEWEST_STEPS <= window, "--batches", ",".join(map(str, batches)), rule)
    rule = f"a window is at most one epoch, {1 / config.epochs:.3g} of the run"
    require(window <= samples, "--window", options.window, rule)
    start = int(options.start * config.epochs * samples)
    rules = {batch: _rules(options.rules, config, batch) for batch in batches}
    return Test(experiment, batches, rules, options.seeds, start, window, options.margin, options.by)


def _numbers(given: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(one) for one in given.split(",")}))
    except ValueError:
        raise UserError(f"--batches={given} is invalid: use numbers of samples, such as 64,128,256") from None


def _rules(given: str | None, config: Config, batch: int) -> tuple[str, ...]:
    """The rules for a batch; without those that are not defined there, if they were not asked for."""
    if given is None:
        auto = dataclasses.replace(config.scaling, rule=ScalingRule.auto)
        best = rule_for(auto, config.optimizer, False, batch / config.scaling.reference_batch)
        return tuple(dict.fromkeys(("linear", "sqrt", best.name)))
    names = tuple(dict.fromkeys(given.split(",")))
    known = [rule.name for rule in ScalingRule if rule is not ScalingRule.auto]
    for name in names:
        require(name in known, "--rules", given, f"choose from {','.join(known)}")
    return names


def _run(test: Test, jobs: dict[Branch, Job], folder: Path, console: Console) -> Findings:
    """Train what is missing, and find what it shows."""
    _announce(test, len(jobs.keys() - read(folder).keys()), console)
    _train(test, jobs, folder, console)
    findings = _findings(test, jobs, folder)
    if not findings.learns:
        raise UserError(
            f"--window={test.window / _samples(test):.3g} is too short: the reference batch ({test.reference}) did "
            f"not clearly improve the {test.by} ({abs(findings.start):.4g} at the start); use more --seeds, another "
            "--start, a larger --window or another optimizer.lr"
        )
    further = longer(findings, test.seeds)
    _train(test, {branch: test.job(branch, folder) for branch in further}, folder, console)
    return _findings(test, [*jobs, *further], folder)


def _samples(test: Test) -> int:
    return test.experiment.config.epochs * test.experiment.facts.train_samples


def _announce(test: Test, missing: int, console: Console) -> None:
    """Say what the test costs before it starts."""
    runs = (missing * test.window + test.start) / _samples(test)
    sizes = f"batches of {', '.join(map(str, test.batches))} against {test.reference}, {test.seeds} seeds"
    console.print(f"[bold]Branch test[/] · {escape(test.experiment.config.recipe['name'])} · {sizes}")
    console.print(
        f"  {missing} branches of {test.window:,} samples after {test.start:,}: as much as {runs:.1f} runs of this "
        f"recipe, on {test.experiment.placement.workers} worker(s) in parallel; up to "
        f"{test.seeds * sum(LONGER) * test.window / _samples(test):.1f} more if a batch needs more samples",
        soft_wrap=True,
    )


def _findings(test: Test, branches: Iterable[Branch], folder: Path) -> Findings:
    found, start = read(folder), torch.load(folder / START, weights_only=True, map_location="cpu")
    if test.by == "loss":
        losses = {branch: found[branch].loss for branch in branches}
        return find(losses, test.reference, start["loss"], test.margin, test.by)
    sign = 1 if test.experiment.config.evaluation.goal is Goal.min else -1
    metrics = {branch: found[branch].metric for branch in branches}
    values = {branch: sign * metric if math.isfinite(metric) else math.inf for branch, metric in metrics.items()}
    return find(values, test.reference, sign * start["metric"], test.margin, test.by)


def _train(test: Test, jobs: dict[Branch, Job], folder: Path, console: Console) -> None:
    done = read(folder)
    missing = [(branch, job) for branch, job in jobs.items() if branch not in done]
    if not missing:
        return
    start = test.job(None, folder)
    payload = {
        "start": start.as_json(),
        "start_until": start.plan.steps_for(test.start),
        "branches": [(dataclasses.asdict(branch), job.as_json()) for branch, job in missing],
    }
    with _progress(folder, len(done), [branch for branch, _ in missing], console):
        launch(run_launched, payload, min(test.experiment.placement.workers, len(missing)))


@contextlib.contextmanager
def _progress(folder: Path, before: int, missing: Sequence[Branch], console: Console) -> Iterator[None]:
    """Show on a terminal how many branches have ended, and about how long the others will take."""
    started, first = time.monotonic(), 0.0

    def text() -> str | None:
        nonlocal first
        if not (folder / START).exists():
            return None
        first = first or time.monotonic()
        done = len(read(folder)) - before
        status = f"branch {min(done + 1, len(missing))} of {len(missing)}"
        if not done:
            return status
        spent = time.monotonic() - first
        left = max(sum(branch.windows for branch in missing) / done - 1, 0) * spent
        return f"{status}, about {left / 60:.0f} min left"

    with live_status(console, "training the common weights", text):
        yield
    if not console.is_terminal:
        console.print(f"  {len(missing)} branches in {(time.monotonic() - started) / 60:.1f} min")
