"""`python -m benchmarks.faults EXPERIMENT …`: inject faults into small runs, and count what is not as it should be.

Trials go to `trials.jsonl` in `--out` as they are made. Those that are there are not made again, so that a campaign can
be stopped at any time and run in pieces. The tables are made from all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.faults import records
from benchmarks.faults.hosts import CASES, hosts
from benchmarks.faults.kills import kills
from benchmarks.faults.lost_time import TARGETS, WORKERS, lost_time
from benchmarks.faults.records import Trial
from benchmarks.faults.runs import Place
from benchmarks.faults.saves import points, saves
from benchmarks.faults.signals import signals
from benchmarks.long_runs import commit, terminated_as_interrupted
from benchmarks.slow_link.network import NoNetwork, check_machine

#: A trial that can be made: its name, and how.
Planned = tuple[str, Callable[[], Trial]]
_EXPERIMENTS = ("saves", "kills", "signals", "hosts", "time")


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("experiments", nargs="+", choices=_EXPERIMENTS, metavar="|".join(_EXPERIMENTS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/faults"), help="trials and tables")
    parser.add_argument("--work", type=Path, default=Path("outputs/faults"), help="folder for the runs")
    parser.add_argument("--minutes", type=float, help="start no trial after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="kill a save at every n-th system call only")
    parser.add_argument("--faults", type=int, default=1000, help="kills that are enough (default: %(default)d)")
    parser.add_argument("--moments", type=int, default=300, help="signals (default: %(default)d)")
    parser.add_argument("--repetitions", type=int, default=3, help="of hosts and time (default: %(default)d)")
    parser.add_argument("--train", type=Path, help="for time: a file with CoLA's columns")
    parser.add_argument("--dev", type=Path, help="the same")
    options = parser.parse_args(arguments)
    if "saves" in options.experiments and shutil.which("strace") is None:
        parser.error("saves needs strace: install it")
    if "time" in options.experiments and not (options.train and options.dev):
        parser.error("time needs --train and --dev, files with CoLA's columns")
    if "hosts" in options.experiments:
        try:
            check_machine()
        except NoNetwork as error:
            parser.error(str(error))
    return options


def _planned(options: argparse.Namespace, experiment: str, done: list[Trial], place: Place) -> Iterator[Planned]:
    """The trials of an experiment, in order."""
    seed, repetitions = options.seed, range(options.repetitions)
    if experiment == "saves":
        for point in points(place)[:: options.every]:
            yield point.name, partial(saves, point, place)
    elif experiment == "kills":
        for number in itertools.count():
            if sum(len(trial.faults) for trial in done if trial.experiment == "kills") >= options.faults:
                return
            yield f"{seed}-{number}", partial(kills, number, seed, options.faults, place)
    elif experiment == "signals":
        for number in range(options.moments):
            yield f"{seed}-{number}", partial(signals, number, seed, place)
    elif experiment == "hosts":
        for number, case in itertools.product(repetitions, CASES):
            yield f"{case} {number}", partial(hosts, case, number, seed, place)
    else:
        for number, workers, target in itertools.product(repetitions, WORKERS, TARGETS):
            make = partial(lost_time, workers, target, number, options.train, options.dev, place)
            yield f"{target}-{workers}-{number}", make


def _run(options: argparse.Namespace, path: Path) -> None:
    started, place, code = time.monotonic(), Place(options.work.resolve()), commit()
    done = records.read(path)
    for experiment in options.experiments:
        names = {trial.name for trial in done if trial.experiment == experiment}
        for name, make in _planned(options, experiment, done, place):
            if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
                print(f"{options.minutes:g} minutes are over: repeat the command to continue")
                return
            if name in names:
                continue
            before = time.monotonic()
            trial = dataclasses.replace(make(), seconds=time.monotonic() - before, commit=code)
            assert trial.name == name
            records.append(path, trial)
            done.append(trial)
            found = "; ".join(trial.problems) or "as required"
            print(
                f"{experiment} {name} ({trial.case}): {len(trial.faults)} faults, {trial.seconds:.1f} s: {found}",
                flush=True,
            )


def main(arguments: list[str] | None = None) -> int:
    options = _arguments(arguments)
    path, interrupted = options.out / "trials.jsonl", False
    try:
        with terminated_as_interrupted():
            _run(options, path)
    except KeyboardInterrupt:
        print("interrupted: repeat the command to continue", file=sys.stderr)
        interrupted = True
    trials = records.read(path)
    if not trials:
        return 130 if interrupted else 0
    for name, table in records.tables(trials).items():
        table.to_csv(options.out / f"{name}.csv", index=False)
        shown = Table(*table.columns, title=name)
        for row in table.itertuples(index=False):
            shown.add_row(*map(str, row))
        Console().print(shown)
    return 130 if interrupted else int(any(trial.problems for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
