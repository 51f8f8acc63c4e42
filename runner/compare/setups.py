"""Setups: runs that differ in their seed only, under names that tell them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.compare.runs import ACCUMULATION, SINGLE, BlockKey, K, Run, grouped

_METHODS = (SINGLE, ACCUMULATION, K)


@dataclass(frozen=True)
class Setup:
    """One setup of a block; `runs` by seed, at least one, one per seed."""

    name: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """What holds for all its runs alike can be read off this one."""
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
        """Of training, by seed; without rehearsed runs, whose time is not that of the named device."""
        return {run.seed: run.seconds for run in self.runs if run.seconds is not None and not run.rehearsed}

    @property
    def rehearsed(self) -> bool:
        return any(run.rehearsed for run in self.runs)

    @property
    def side_by_side(self) -> bool:
        """Whether other jobs ran beside one of the runs, so that its time is no measurement of the setup."""
        return any((run.jobs_at_once or 1) > 1 for run in self.runs)

    @property
    def family(self) -> tuple[int, str]:
        return (self.first.workers, self.first.method)


def setups_by_block(runs: Sequence[Run]) -> dict[BlockKey, list[Setup]]:
    """Each block's setups: few workers first, then by how they save communication."""
    blocks = {}
    for key, members in grouped(runs, lambda run: run.block).items():
        groups = [
            sorted(group, key=lambda run: run.seed) for group in grouped(members, lambda run: run.setup_key).values()
        ]
        names = _distinct_names([group[0] for group in groups])
        found = [Setup(name, tuple(group)) for name, group in zip(names, groups, strict=True)]
        blocks[key] = sorted(found, key=_order)
    return blocks


def _order(setup: Setup) -> tuple[object, ...]:
    run = setup.first
    return (run.workers, _METHODS.index(run.method), run.k, run.accumulation, setup.name)


def _distinct_names(runs: Sequence[Run]) -> list[str]:
    """A name for each setup, given one run of each; equal names get what differs, in as few words as will do."""
    names = [run.setup for run in runs]
    for same in grouped(runs, lambda run: run.setup).values():
        if len(same) > 1:
            additions = _additions(same)
            for run, words in zip(same, additions, strict=True):
                names[next(i for i, one in enumerate(runs) if one is run)] += f" · {words}"
    return names


def _additions(runs: Sequence[Run]) -> list[str]:
    """What tells runs of one name apart: what their sweep varied, else any setting, the shortest first."""
    for source in ([run.varied for run in runs], [run.values for run in runs], [_other(run) for run in runs]):
        keys = _telling(source)
        if keys:
            return [", ".join(f"{_short(key, keys)}={_cut(values.get(key, '–'))}" for key in keys) for values in source]
    return [run.digest[:6] for run in runs]


def _other(run: Run) -> Mapping[str, str]:
    return {"rehearsed": "yes" if run.rehearsed else "no", "setup": run.digest[:6]}


def _telling(source: Sequence[Mapping[str, str]]) -> list[str]:
    """The fewest keys, found greedily, with which no two of the mappings are alike; none if that cannot be."""
    every = dict.fromkeys(key for values in source for key in values)
    differing = [key for key in every if len({values.get(key) for values in source}) > 1]
    keys: list[str] = []
    told_apart = 1
    while told_apart < len(source):
        scored = [(_classes(source, [*keys, key]), -_length(source, key), key) for key in differing if key not in keys]
        best = max(scored, default=(told_apart, 0, ""), key=lambda one: one[:2])
        if best[0] <= told_apart:
            return []
        told_apart = best[0]
        keys.append(best[2])
    return keys


def _classes(source: Sequence[Mapping[str, str]], keys: Sequence[str]) -> int:
    return len({tuple(_cut(values.get(key, "–")) for key in keys) for values in source})


def _length(source: Sequence[Mapping[str, str]], key: str) -> int:
    # What follows from the settings (the plan) is only named where no setting says it.
    derived = 100 if key.startswith("plan.") else 0
    return derived + len(key.rpartition(".")[2]) + max(len(values.get(key, "–")) for values in source)


def _short(key: str, keys: Sequence[str]) -> str:
    last = key.rpartition(".")[2]
    return last if sum(one.rpartition(".")[2] == last for one in keys) == 1 else key


def _cut(value: str) -> str:
    return value if len(value) <= 24 else f"{value[:23]}…"
