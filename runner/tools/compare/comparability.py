"""Comparability: may two setups be compared at all, by the certificates of their runs?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.plan.levels import COMPARABLE, EQUIVALENT, IDENTICAL, NOT_COMPARABLE, worst
from runner.tools.compare.runs import CertificateProperty, Run

#: Longer values are hashes and lists: the name of the property says more.
_SHORT = 16
_SEED_IN_VALUE = re.compile(r"\bseed \d+,? ?")


@dataclass(frozen=True)
class Comparability:
    """`level`: None if a certificate is missing; `differs`: each difference in a few words; `reasons`: why the setups
    are not comparable; `unknown`: properties that only one of the two certificates has."""

    level: str | None
    differs: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def forbids(self) -> bool:
        return self.level == NOT_COMPARABLE

    @property
    def text(self) -> str:
        """Level with its reasons or differences."""
        if self.level is None:
            return "unknown: no certificate"
        listed = self.reasons if self.forbids else self.differs
        return f"{self.level}{': ' if listed else ''}{', '.join(listed)}"


def comparability(setup: Sequence[Run], baseline: Sequence[Run]) -> Comparability:
    """The worst level over the pairs with equal seeds; with fewer than two, over all runs, ignoring the seed."""
    pairs = _pairs(setup, baseline)
    results = [_of_pair(run, partner, by_seed=run.seed == partner.seed) for run, partner in pairs]
    reasons = _with_seeds([(run.seed, one.reasons) for (run, _), one in zip(pairs, results, strict=True)])
    for runs, whose in ((setup, ""), (baseline, "the baseline's ")):
        reasons += [
            f"{whose}certificate of seed {run.seed} was withdrawn: {run.withdrawn}" for run in runs if run.withdrawn
        ]
    levels = [one.level for one in results if one.level is not None]
    level: str | None = None
    if reasons:
        level = NOT_COMPARABLE
    elif len(levels) == len(results):
        level = worst(levels, IDENTICAL)
    unknown = dict.fromkeys(name for one in results for name in one.unknown)
    differs = dict.fromkeys(words for one in results for words in one.differs)
    return Comparability(level, tuple(differs), tuple(reasons), tuple(unknown))


def _pairs(setup: Sequence[Run], baseline: Sequence[Run]) -> list[tuple[Run, Run]]:
    """The runs that enter the difference: pairs by seed, or all runs if the difference is not paired."""
    partners = {run.seed: run for run in baseline}
    pairs = [(run, partners[run.seed]) for run in setup if run.seed in partners]
    if len(pairs) >= 2:
        return pairs
    paired = {run.seed for run, _ in pairs}
    pairs += [(run, baseline[0]) for run in setup if run.seed not in paired]
    return pairs + [(setup[0], run) for run in baseline if run.seed not in paired]


def _with_seeds(reasons: Sequence[tuple[int, tuple[str, ...]]]) -> list[str]:
    """Each reason once, with the seeds it applies to unless it applies to all."""
    seeds: dict[str, list[int]] = {}
    for seed, of_pair in reasons:
        for reason in of_pair:
            seeds.setdefault(reason, []).append(seed)
    return [
        reason if len(having) == len(reasons) else f"{reason} (seed {', '.join(map(str, dict.fromkeys(having)))})"
        for reason, having in seeds.items()
    ]


def _of_pair(run: Run, partner: Run, by_seed: bool) -> Comparability:
    own, other = run.certificate, partner.certificate
    if own is None or other is None:
        return Comparability(None)
    differing = [
        name
        for name in own
        if name in other
        and (by_seed or name != "seed")
        and _without_seed(own[name].value, by_seed) != _without_seed(other[name].value, by_seed)
    ]
    return Comparability(
        level=worst((own[name].allows for name in differing), _best(own)),
        differs=tuple(_in_a_word(name, own, other) for name in differing if own[name].allows == COMPARABLE),
        reasons=tuple(
            f"{name} {_formatted(own[name].value)}, baseline {_formatted(other[name].value)}"
            for name in differing
            if own[name].allows == NOT_COMPARABLE
        ),
        unknown=tuple(sorted(own.keys() ^ other.keys())),
    )


def _best(certificate: Mapping[str, CertificateProperty]) -> str:
    """The level of two runs with this certificate: the same bits, if not even other workers change them."""
    workers = certificate.get("world_size")
    return IDENTICAL if workers is not None and workers.allows == IDENTICAL else EQUIVALENT


def _without_seed(value: Any, by_seed: bool = False) -> Any:
    """The data order names its seed, which is not a difference between runs that are not paired by seed."""
    return value if by_seed or not isinstance(value, str) else _SEED_IN_VALUE.sub("", value)


def _in_a_word(name: str, own: Mapping[str, CertificateProperty], other: Mapping[str, CertificateProperty]) -> str:
    value, reference = own[name].value, other[name].value
    if _is_number(value) and _is_number(reference) and reference:
        return f"{name} × {value / reference:.4g}"
    value = _without_seed(value)  # or every pair of seeds would be listed separately
    return f"{name} {value}" if isinstance(value, str) and len(value) <= _SHORT else name


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _formatted(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
