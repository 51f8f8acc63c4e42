"""Group runs that differ only in the seed into setups, and give the setups distinct names."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from runner.compare.runs import ACCUMULATION, SINGLE, BlockKey, K, Run, grouped
from runner.compare.statistics import mean
from runner.config.schema import NOT_THE_SETUP

_METHODS = (SINGLE, ACCUMULATION, K)
_ABSENT = "–"
#: Settings and groups that say how an experiment is executed. A sweep of any other one is of several experiments.
_NOT_THE_EXPERIMENT = (
    *("setup", "device", "accumulation", "precision", "sync", "sharding", "equivalence"),
    *("compile", "gradient_checkpointing", *NOT_THE_SETUP),
)


@dataclass(frozen=True)
class SetupRuns:
    """The runs of one setup in one block, sorted by seed: at least one, and one per seed."""

    name: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """A run to read off what all runs of the setup have in common."""
        return self.runs[0]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def metrics(self) -> dict[int, float]:
        """By seed."""
        return {run.seed: run.metric for run in self.runs}

    @property
    def seconds(self) -> dict[int, float]:
        """Training time by seed, without rehearsed runs: their time says nothing about the named device."""
        return {run.seed: run.seconds for run in self.runs if run.seconds is not None and not run.rehearsed}

    def mean_of(self, figure: str) -> float | None:
        """The mean of a figure of `Run` over the runs that have it; None if none has."""
        known = [getattr(run, figure) for run in self.runs if getattr(run, figure) is not None]
        return mean(known) if known else None

    @property
    def diverged(self) -> tuple[Run, ...]:
        """The runs without a finite metric."""
        return tuple(run for run in self.runs if run.diverged is not None or not math.isfinite(run.metric))

    @property
    def rehearsed(self) -> bool:
        return any(run.rehearsed for run in self.runs)

    @property
    def shared_machine(self) -> bool:
        """Whether another job ran at the same time as one of the runs, which makes its time unreliable."""
        return any((run.jobs_at_once or 1) > 1 for run in self.runs)

    @property
    def family(self) -> tuple[int, str]:
        return (self.first.workers, self.first.method)


def setups_by_block(runs: Sequence[Run]) -> dict[BlockKey, list[SetupRuns]]:
    """The setups of each block: by number of workers, then by how they save communication."""
    blocks = {}
    for key, members in _blocks(runs):
        groups = [sorted(group, key=lambda run: run.seed) for group in grouped(members, _setup_key).values()]
        names = _distinct_names([group[0] for group in groups])
        setups = [SetupRuns(name, tuple(group)) for name, group in zip(names, groups, strict=True)]
        blocks[key] = sorted(setups, key=_order)
    return blocks


def _blocks(runs: Sequence[Run]) -> Iterator[tuple[BlockKey, list[Run]]]:
    """Blocks in which only the setup differs, and nothing else that a sweep varied.

    If none of them has two setups, as in a sweep of learning rates on one device, they are one block.
    """
    for key, members in grouped(runs, lambda run: run.block).items():
        parts = grouped(members, _swept_experiment)
        if any(len(set(map(_setup_key, part))) > 1 for part in parts.values()):
            for swept, part in parts.items():
                words = tuple(f"{_last(name, dict(swept))}={value}" for name, value in swept)
                yield dataclasses.replace(key, conditions=(*key.conditions, *words)), part
        else:
            yield key, members


def _swept_experiment(run: Run) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, value) for name, value in run.varied.items() if re.split("[./@]", name)[0] not in _NOT_THE_EXPERIMENT
    )


def _setup_key(run: Run) -> tuple[str, bool]:
    return run.setup_key


def _order(setup: SetupRuns) -> tuple[object, ...]:
    run = setup.first
    return (run.workers, _METHODS.index(run.method), run.k, run.accumulation, setup.name)


def _distinct_names(runs: Sequence[Run]) -> list[str]:
    """One name per run, each run from another setup. Equal names get the settings that distinguish them appended."""
    additions: dict[tuple[str, bool], str] = {}
    for same_name in grouped(runs, lambda run: run.setup).values():
        if len(same_name) > 1:
            additions |= {
                run.setup_key: f" · {words}" for run, words in zip(same_name, _additions(same_name), strict=True)
            }
    return [run.setup + additions.get(run.setup_key, "") for run in runs]


def _additions(runs: Sequence[Run]) -> list[str]:
    """What the sweep varied if that distinguishes the runs, else any setting."""
    rehearsed = [{"rehearsed": "yes" if run.rehearsed else "no"} for run in runs]
    for source in ([run.varied for run in runs], [run.values for run in runs], rehearsed):
        if keys := _distinguishing_keys(source):
            return [", ".join(f"{_last(key, keys)}={_cut(values.get(key))}" for key in keys) for values in source]
    return [run.digest[:6] for run in runs]


def _distinguishing_keys(source: Sequence[Mapping[str, str]]) -> list[str]:
    """A small set of keys, found greedily, in which no two of the mappings agree; empty if there is none."""

    def classes(keys: Sequence[str]) -> int:
        return len({tuple(_cut(values.get(key)) for key in keys) for values in source})

    def cost(key: str) -> tuple[bool, int]:
        # Prefer short text, and a setting to what the plan derives from it.
        return key.startswith("plan."), len(key.rpartition(".")[2]) + max(len(_cut(one.get(key))) for one in source)

    candidates = sorted(dict.fromkeys(key for values in source for key in values), key=cost)
    keys: list[str] = []
    while classes(keys) < len(source):
        best = max(candidates, key=lambda key: classes([*keys, key]), default=None)  # the cheapest of equally good ones
        if best is None or classes([*keys, best]) == classes(keys):
            return []
        keys.append(best)
    return keys


def _last(key: str, keys: Iterable[str]) -> str:
    """The last part of a dotted key where that is unambiguous."""
    last = key.rpartition(".")[2]
    return last if sum(one.rpartition(".")[2] == last for one in keys) == 1 else key


def _cut(value: str | None) -> str:
    value = _ABSENT if value is None else value
    return value if len(value) <= 24 else f"{value[:23]}…"
