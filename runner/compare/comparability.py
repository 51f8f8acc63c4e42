"""Whether two setups may be compared at all, from the certificates that their runs carry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.compare.runs import Property, Run

EQUIVALENT, COMPARABLE, NOT_COMPARABLE = "equivalent", "comparable", "not comparable"
_LEVELS = (EQUIVALENT, COMPARABLE, NOT_COMPARABLE)
#: Longer values are hashes and lists: the property's name says more.
_SHORT = 16
_SEED_IN_VALUE = re.compile(r"\bseed \d+,? ?")


@dataclass(frozen=True)
class Comparability:
    """What two setups are to each other. `level`: None if a certificate is missing; `differs`: each in a few words;
    `reasons`: why they are not comparable; `unknown`: properties that only one of two certificates has."""

    level: str | None
    differs: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def forbids(self) -> bool:
        return self.level == NOT_COMPARABLE

    @property
    def text(self) -> str:
        """Level and reasons or differences in a line."""
        if self.level is None:
            return "not known: no certificate"
        listed = self.reasons if self.forbids else self.differs
        return f"{self.level}{': ' if listed else ''}{', '.join(listed)}"


def comparability(setup: Sequence[Run], baseline: Sequence[Run]) -> Comparability:
    """The worst level over the pairs of equal seed; where fewer than two pair, over all runs, ignoring the seed."""
    pairs = _pairs(setup, baseline)
    judged = [_of_pair(run, partner, by_seed=run.seed == partner.seed) for run, partner in pairs]
    reasons = _with_seeds([(run.seed, one.reasons) for (run, _), one in zip(pairs, judged, strict=True)])
    reasons += _withdrawals(setup, "") + _withdrawals(baseline, "the baseline's ")
    levels = [one.level for one in judged if one.level is not None]
    if reasons:
        level: str | None = NOT_COMPARABLE
    else:
        level = None if len(levels) < len(judged) else max(levels, key=_level)
    unknown = dict.fromkeys(name for one in judged for name in one.unknown)
    differs = dict.fromkeys(word for one in judged for word in one.differs)
    return Comparability(level, tuple(differs), tuple(reasons), tuple(unknown))


def _pairs(setup: Sequence[Run], baseline: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Those runs whose numbers meet in the difference: pairs by seed, or everyone where it is not paired."""
    partners = {run.seed: run for run in baseline}
    pairs = [(run, partners[run.seed]) for run in setup if run.seed in partners]
    if len(pairs) >= 2:
        return pairs
    paired = {run.seed for run, _ in pairs}
    pairs += [(run, baseline[0]) for run in setup if run.seed not in paired]
    return pairs + [(setup[0], run) for run in baseline if run.seed not in paired]


def _withdrawals(runs: Sequence[Run], whose: str) -> list[str]:
    return [f"{whose}certificate of seed {run.seed} was withdrawn: {run.withdrawn}" for run in runs if run.withdrawn]


def _with_seeds(reasons: Sequence[tuple[int, tuple[str, ...]]]) -> list[str]:
    """Each reason once, with the seeds that have it where not all do."""
    seeds: dict[str, list[int]] = {}
    for seed, ones in reasons:
        for reason in ones:
            seeds.setdefault(reason, []).append(seed)
    return [
        reason if len(having) == len(reasons) else f"{reason} (seed {', '.join(map(str, dict.fromkeys(having)))})"
        for reason, having in seeds.items()
    ]


def _of_pair(run: Run, partner: Run, by_seed: bool) -> Comparability:
    if run.certificate is None or partner.certificate is None:
        return Comparability(None)
    own, other = run.certificate, partner.certificate
    unlike = [
        name
        for name in own
        if name in other
        and not (name == "seed" and not by_seed)
        and _compared(own[name], by_seed) != _compared(other[name], by_seed)
    ]
    forbidding = [name for name in unlike if own[name].allows == NOT_COMPARABLE]
    level = max((own[name].allows for name in unlike), key=_level, default=EQUIVALENT)
    differs = [_in_a_word(name, own, other) for name in unlike if own[name].allows == COMPARABLE]
    reasons = [_in_full(name, own, other) for name in forbidding]
    unknown = sorted(own.keys() ^ other.keys())
    return Comparability(level, tuple(differs), tuple(reasons), tuple(unknown))


def _level(allows: str) -> int:
    return _LEVELS.index(allows) if allows in _LEVELS else len(_LEVELS)


def _compared(item: Property, by_seed: bool) -> Any:
    """The value that decides: the data order names its seed, which is no difference where seeds do not pair."""
    return item.value if by_seed or not isinstance(item.value, str) else _SEED_IN_VALUE.sub("", item.value)


def _in_a_word(name: str, own: Mapping[str, Property], other: Mapping[str, Property]) -> str:
    value, reference = own[name].value, other[name].value
    if _is_number(value) and _is_number(reference) and reference:
        return f"{name} × {value / reference:.4g}"
    if not isinstance(value, str):
        return name
    value = _SEED_IN_VALUE.sub("", value)  # equal seeds are no difference, and every pair would be another word
    return f"{name} {value}" if len(value) <= _SHORT else name


def _in_full(name: str, own: Mapping[str, Property], other: Mapping[str, Property]) -> str:
    return f"{name} {_shown(own[name].value)}, baseline {_shown(other[name].value)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
