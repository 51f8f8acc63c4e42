"""`seed=auto`: a sweep adds seeds to its setups until each of them is decided."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich.console import Console

from runner.config.hydra_main import hydra_main
from runner.config.schema import Decide
from runner.folder.record import FAILED
from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.design import Design
from runner.tools.compare.from_folders import read_folders, run_folders
from runner.tools.compare.results import SetupResult
from runner.tools.compare.runs import newest_of_each_seed
from runner.tools.compare.verdict import UNDECIDED
from runner.tools.sweep.sweep import Overrides, Sweep, job_name

#: Hydra instantiates sweepers from its plugins' package only.
_TARGET = "hydra_plugins.runner.Rounds"


def run_rounds(rounds: Iterator[list[Overrides]], arguments: Sequence[str], job: Callable[[Any], float | None]) -> None:
    """Run the jobs of each round with the launcher that Hydra's `arguments` choose."""
    Rounds.jobs = rounds
    Plugins.instance().class_name_to_class[_TARGET] = Rounds
    hydra_main([*arguments, f"hydra.sweeper._target_={_TARGET}"], job)


class SeedsUntilDecided:
    """The rounds of a sweep: every setup with the first seeds, then further seeds for those that are not decided.

    `setups`: their overrides. `sweep.design` says how many seeds, and how certain a verdict has to be.
    """

    def __init__(self, sweep: Sweep, setups: Sequence[Overrides], settings: Decide, console: Console) -> None:
        self._sweep, self._setups, self._settings, self._console = sweep, setups, settings, console
        self._setup_of: dict[str, Overrides] = {}  # by name of a job
        self._started = time.monotonic()

    def rounds(self) -> Iterator[list[Overrides]]:
        """The jobs of each round."""
        design = self._sweep.design
        assert design is not None
        wanted, first, end = self._setups, 0, design.min_seeds
        while wanted:
            jobs = [(*setup, f"seed={seed}") for seed in range(first, end) for setup in wanted]
            self._setup_of |= {job_name(job): job[:-1] for job in jobs}
            yield jobs
            wanted = self._undecided(end)
            more = max(1, self._sweep.at_once // max(1, len(wanted)))  # as many jobs as run in parallel
            first, end = end, min(end + more, design.max_seeds)
            if first == end:
                return

    def _undecided(self, seeds: int) -> list[Overrides]:
        """The setups that further seeds may decide, and their baselines, after a look at the first `seeds` seeds."""
        folders = run_folders(Path(self._sweep.folder))
        found = read_folders([(str(folder), folder) for folder in folders], None)
        if not found.runs:
            return []
        comparison = compare_runs(newest_of_each_seed(found), self._settings.baseline, self._settings.margin)
        compared = [(row, block) for block in comparison.blocks for row in block.rows[1:]]
        self._console.print(f"after {seeds} seeds:")
        for row, _ in compared:
            self._console.print(f"  {look(row)}", soft_wrap=True, markup=False)
        minutes, most = (time.monotonic() - self._started) / 60, self._settings.max_minutes
        if most is not None and minutes > most:
            self._console.print(f"{minutes:.1f} of decide.max_minutes={most:g} are over: no further seeds")
            return []
        design = self._sweep.design
        assert design is not None
        setups_of, failed = self._jobs()
        wanted: set[Overrides] = set()
        for row, block in compared:
            runs = (*row.setup.runs, *block.baseline.runs)
            own = {setup for run in runs for setup in setups_of.get(Path(run.source).resolve(), ())}
            if _more_seeds_may_decide(row, block.margin.value, design) and not own & failed:
                wanted |= own
        return [setup for setup in self._setups if setup in wanted]

    def _jobs(self) -> tuple[dict[Path, set[Overrides]], set[Overrides]]:
        """The setups of each job's folder, and those of which a job has failed."""
        setups_of: dict[Path, set[Overrides]] = {}
        failed: set[Overrides] = set()
        for state in self._sweep.states():
            own = {self._setup_of[name] for name in state.names if name in self._setup_of}
            setups_of.setdefault(state.folder.resolve(), set()).update(own)
            if state.status == FAILED:
                failed |= own
        return setups_of, failed


class Rounds(Sweeper):
    """Hydra's sweeper with rounds of jobs in place of a grid."""

    #: On the class, since Hydra makes the instance.
    jobs: ClassVar[Iterator[list[Overrides]]]

    def __init__(self, **settings: object) -> None:
        """`settings`: of Hydra's own sweeper, which has a grid."""
        self._launcher: Launcher | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> list[Any]:
        assert self._launcher is not None
        results: list[Any] = []
        for jobs in self.jobs:
            results += self._launcher.launch([list(job) for job in jobs], initial_job_idx=len(results))
        for one in results:
            _ = one.return_value  # raises the error of a job that failed, as Hydra's own sweeper does
        return results


def look(row: SetupResult) -> str:
    """A setup's difference with the interval that decides, and its verdict."""
    assert row.verdict is not None
    if row.difference is None:
        return f"{row.setup.name}: {row.verdict.text}"
    interval = row.difference.interval(row.levels.equivalence)
    bounds = f" [{interval.low:+.3g}, {interval.high:+.3g}]" if interval.known else ""
    return f"{row.setup.name}: {row.difference.value:+.3g}{bounds} {row.verdict.text}"


def _more_seeds_may_decide(row: SetupResult, margin: float | None, design: Design) -> bool:
    if row.verdict is None or row.verdict.kind != UNDECIDED or row.verdict.constant:
        return False
    return row.difference is None or margin is None or not design.rows_leave_open(row.difference, margin)
