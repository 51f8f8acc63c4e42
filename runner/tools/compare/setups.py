"""Group runs that differ only in the seed into setups, and give the setups distinct names."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runner.tools.compare.runs import ACCUMULATION, SINGLE, BlockKey, K, Run, grouped
from runner.tools.compare.statistics import mean

_METHODS = (SINGLE, ACCUMULATION, K)
_ABSENT = "–"
#: Settings and groups that say how an experiment is executed. A sweep of any other one is of several experiments.
_NOT_THE_EXPERIMENT = (
    *("device", "accumulation", "precision", "sync", "sharding", "equivalence"),
    *("compile", "gradient_checkpointing"),
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
        """The metric by seed."""
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
    def uncertain_time(self) -> bool:
        """Return whether the time of one of the runs is unreliable."""
        return any(run.uncertain_time for run in self.runs)

    @property
    def family(self) -> tuple[int, str]:
        return (self.first.workers, self.first.method)


def setups_by_block(runs: Sequence[Run], baseline: str | None = None) -> dict[BlockKey, list[SetupRuns]]:
    """The setups of each block: by number of workers, then by how they save communication.

    What a sweep varied of the experiment divides a block into parts in which only the setup differs. It stays whole if
    no part has two setups, as in a sweep of learning rates on one device, or if only one has the setup called
    `baseline`: the others are to be compared with it.
    """
    blocks = {}
    for key, members in grouped(runs, lambda run: run.block).items():
        whole, parts = _setups(members), {words: _setups(part) for words, part in _parts(members).items()}
        of_one_part = _has(whole, baseline) and sum(_has(setups, baseline) for setups in parts.values()) < 2
        if of_one_part or len(parts) == 1 or all(len(setups) == 1 for setups in parts.values()):
            blocks[key] = whole
        else:
            for words, setups in parts.items():
                blocks[dataclasses.replace(key, conditions=(*key.conditions, words))] = setups
    return blocks


def _has(setups: Sequence[SetupRuns], name: str | None) -> bool:
    return any(setup.name == name for setup in setups)


def _setups(members: Sequence[Run]) -> list[SetupRuns]:
    """Those of one block."""
    groups = [sorted(group, key=lambda run: run.seed) for group in grouped(members, _setup_key).values()]
    names = _distinct_names([group[0] for group in groups])
    return sorted((SetupRuns(name, tuple(group)) for name, group in zip(names, groups, strict=True)), key=_order)


def _parts(members: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by the values of the swept settings, whoever set them: a sweep, a command, or the defaults."""
    swept = sorted({name for run in members for name in run.varied if _is_of_the_experiment(name, run)})
    parts = list(grouped(members, lambda run: frozenset(_settings(swept, run).items())).values())
    return dict(zip(_part_names(parts, swept), parts, strict=True))


def _is_of_the_experiment(name: str, run: Run) -> bool:
    return re.split("[./@]", name)[0] not in _NOT_THE_EXPERIMENT and bool(_settings([name], run))


def _settings(names: Sequence[str], run: Run) -> dict[str, str]:
    """The run's settings with these names or below them: for `scaling`, `scaling.rule` and others.

    None for a group that only chooses others, such as `experiment`, and for settings that do not belong to a setup.
    """
    return {key: value for key, value in run.values.items() if any(f"{key}.".startswith(f"{name}.") for name in names)}


def _part_names(parts: Sequence[Sequence[Run]], swept: Sequence[str]) -> list[str]:
    """Names by what the sweep chose (`scaling=linear`) if that was chosen for all parts; else by their settings."""
    choices = [
        next(({name: run.varied[name] for name in swept} for run in part if run.varied.keys() >= set(swept)), {})
        for part in parts
    ]
    words = _words(choices) if all(choices) else []
    return words if any(words) else _words([_settings(swept, part[0]) for part in parts])


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
    """Words for what the sweep varied if that distinguishes the runs, else for any setting."""
    rehearsed = [{"rehearsed": "yes" if run.rehearsed else "no"} for run in runs]
    for source in ([run.varied for run in runs], [run.values for run in runs], rehearsed):
        words = _words([{key: _cut(value) for key, value in values.items()} for values in source])
        if all(words):
            return words
    return [run.digest[:6] for run in runs]


def _words(source: Sequence[Mapping[str, str]]) -> list[str]:
    """Words that distinguish each mapping from the others; empty strings if nothing does."""
    keys = _distinguishing_keys(source)
    return [", ".join(f"{_last(key, keys)}={values.get(key, _ABSENT)}" for key in keys) for values in source]


def _distinguishing_keys(source: Sequence[Mapping[str, str]]) -> list[str]:
    """A small set of keys, found greedily, in which no two of the mappings agree; empty if there is none."""

    def classes(keys: Sequence[str]) -> int:
        return len({tuple(values.get(key, _ABSENT) for key in keys) for values in source})

    def cost(key: str) -> tuple[bool, int]:
        # Prefer short text, and a setting to what the plan derives from it.
        return key.startswith("plan."), len(key.rpartition(".")[2]) + max(len(one.get(key, _ABSENT)) for one in source)

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


def _cut(value: str) -> str:
    return value if len(value) <= 24 else f"{value[:23]}…"
