"""The certificate: which properties of a run equal its baseline's, which differ, and how alike the two are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.plan.baseline import RunSetup
from runner.plan.history import Segment
from runner.plan.levels import EQUIVALENT, IDENTICAL, worst
from runner.plan.properties import BY_WORKER, CertifiedProperty, compare


@dataclass(frozen=True)
class Certificate:
    """`level`: identical, equivalent, comparable or not comparable. The ledger is checked separately, after the run.

    `properties`: of the last segment; the level is the worst of all segments. `withdrawn`: why it no longer holds.
    """

    level: str
    properties: tuple[CertifiedProperty, ...]
    segments: tuple[Segment, ...] = ()
    withdrawn: str | None = None

    @property
    def differs(self) -> tuple[str, ...]:
        """The names of the properties that differ."""
        return tuple(item.name for item in self.properties if not item.equal)

    def as_json(self) -> dict[str, Any]:
        """The content of `certificate.json`."""
        return {
            "level": self.level,
            "segments": [dataclasses.asdict(segment) for segment in self.segments],
            "equal": [dataclasses.asdict(item) for item in self.properties if item.equal],
            "different": [dataclasses.asdict(item) for item in self.properties if not item.equal],
            **({"withdrawn": self.withdrawn} if self.withdrawn else {}),
        }


def certify(setup: RunSetup, baseline: RunSetup, segments: tuple[Segment, ...] = ()) -> Certificate:
    """Compare a setup with its baseline property by property. `segments`: of the run, the last of which it executes."""
    properties = compare(setup, baseline)
    levels = (*(item.allows for item in properties if not item.equal), *(segment.level for segment in segments))
    return Certificate(worst_level(levels, properties), properties, segments)


def worst_level(levels: Sequence[str], properties: Sequence[CertifiedProperty]) -> str:
    """The level of a certificate with these `properties`, given what its differences and its segments allow."""
    by_shards = any(item.name == "summation" and item.value == item.baseline != BY_WORKER for item in properties)
    return worst(levels, IDENTICAL if by_shards else EQUIVALENT)
