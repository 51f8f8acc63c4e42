"""Racing: the setups of a grid train to a rung, those that cannot win any more stop there, the others go on.

A rung is a share of training. A run saves a checkpoint there, is evaluated and ends (`Job.pause_after`); the next rung
continues it, with the schedule of its whole length. `race.json` in the sweep's folder says how far jobs train now.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from runner.config.choices import Goal
from runner.config.schema import Evaluation
from runner.folder.metrics_log import MetricsReader
from runner.folder.reading import read_json
from runner.folder.record import FINISHED, STOPPED, RunRecord, amend
from runner.tools.sweep.rungs import RUNGS, going_on, last_rank, ranks
from runner.tools.sweep.sweep import JobState, Overrides, Rung, Sweep, job_name, setup_of
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import STOPPED_TAG, TrackingRecord


class Race:
    """The rounds of a sweep that races its setups: one for each rung, and one to the end of training.

    `jobs`: the overrides of all jobs. Setups are compared on the seeds that all of them have.
    """

    def __init__(self, sweep: Sweep, jobs: Sequence[Overrides], evaluation: Evaluation, console: Console) -> None:
        self._sweep, self._evaluation, self._console = sweep, evaluation, console
        self._jobs: dict[Overrides, list[Overrides]] = {}
        for job in jobs:
            self._jobs.setdefault(setup_of(job), []).append(job)

    def rounds(self) -> Iterator[list[Overrides]]:
        """The jobs of each round."""
        racing = list(self._jobs)
        for rung in (*range(len(RUNGS)), None):
            if not racing:
                return  # a job of each has failed
            if rung is not None and len(racing) == 1:
                continue
            Rung(1.0 if rung is None else RUNGS[rung], len(self._jobs)).write(Path(self._sweep.folder))
            yield [job for setup in racing for job in self._jobs[setup]]
            if rung is not None:
                racing = self._look(racing, rung)

    def _look(self, racing: list[Overrides], rung: int) -> list[Overrides]:
        """The setups that go on after a rung: those that may still win. Those of which a job has failed do not."""
        states = {name: state for state in self._sweep.states() for name in state.names}
        jobs = {setup: [states.get(job_name(job)) for job in self._jobs[setup]] for setup in racing}
        curves = {setup: [self._evaluations(state, rung) for state in own] for setup, own in jobs.items()}
        known = [setup for setup in racing if all(curves[setup])]
        if not known:
            return []
        sign = 1 if self._evaluation.goal is Goal.max else -1
        values = sign * np.array([curves[setup] for setup in known]).mean(axis=1)  # over seeds
        own, goes_on = ranks(values[:, -1]), going_on(values, self._constant(jobs[known[0]], sign))
        left = list(itertools.compress(known, goes_on))
        share, leader = f"{RUNGS[rung]:.4g} of training", self._shown(known[int(own.argmin())])
        self._console.print(f"after {share} {len(left)} of {len(known)} setups go on; {leader} leads", soft_wrap=True)
        for setup, rank in zip(known, own, strict=True):
            if setup not in left:
                place = f"place {rank + 1} of {len(known)} by {self._evaluation.metric}"
                moves = f"ranks still move by {last_rank(values):.1f} at most"
                why = f"stopped after {share}: {place}, and {moves}; {leader} leads"
                self._console.print(f"  {self._shown(setup)}: {why}", soft_wrap=True, markup=False)
                for state in jobs[setup]:
                    assert state is not None
                    _say_why(state, why)
        return left

    def _constant(self, states: Sequence[JobState | None], sign: int) -> float:
        """The metric of the best constant answer, negative if the metric should be low; -inf if it is not known."""
        records = [RunRecord.read(state.folder) for state in states if state is not None]
        known = [record.data.constant.get(self._evaluation.metric) for record in records if record is not None]
        return -math.inf if not known or known[0] is None else sign * known[0]

    def _shown(self, setup: Overrides) -> str:
        return ", ".join(f"{key}={value}" for key, value in self._sweep.varied_by(setup).items() if key != "seed")

    def _evaluations(self, state: JobState | None, rung: int) -> list[float]:
        """The metric of a job at each rung up to this one; empty without one of them."""
        if state is None or not (state.folder / "plan.json").exists():
            return []
        steps = int(read_json(state.folder / "plan.json")["optimizer_steps"])
        key = f"eval/{self._evaluation.metric}"
        logged = [metric for metric in MetricsReader(state.folder).read() if metric.key == key]
        rungs = [math.ceil(share * steps) for share in RUNGS[: rung + 1]]
        # One that has finished may have done so earlier, by evaluation.patience.
        last = logged[-1].value if logged and state.status == FINISHED else math.nan
        found = [next((one.value for one in logged if one.step >= step), last) for step in rungs]
        return found if np.isfinite(found).all() else []


def _say_why(state: JobState, why: str) -> None:
    """Note in a stopped run's folder, and for its tracking store, why it does not go on."""
    if state.status != STOPPED:
        return
    amend(state.folder, error=why)
    if (state.folder / CARD_FILE).exists():
        card = TrackingRecord.read(state.folder)
        card.update(state.folder, last_tags={**card.last_tags, STOPPED_TAG: why}, delivered=False)
