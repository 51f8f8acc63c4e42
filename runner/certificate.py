"""The certificate: what a setup holds equal to its baseline, and what it does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runner.plan import Plan

#: What a difference costs a run: nothing, the word "equivalent", or comparability itself.
_FREE, _COMPARABLE, NOT_COMPARABLE = _LEVELS = ("equivalent", "comparable", "not comparable")


@dataclass(frozen=True)
class Setup:
    """What the certificate compares, besides the plan."""

    plan: Plan
    precision: str
    rehearsed: bool
    dropout_streams: str
    compile: bool


@dataclass(frozen=True)
class Property:
    """One compared property. `effect`: what a difference is known to do; empty when equal."""

    name: str
    value: Any
    baseline: Any
    equal: bool
    allows: str
    effect: str

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Certificate:
    """`level`: equivalent, comparable or not comparable. Whether the ledger is sound is known only after the run."""

    level: str
    properties: tuple[Property, ...]

    def as_json(self) -> dict[str, Any]:
        """The content of `certificate.json`."""
        return {
            "level": self.level,
            "equal": [p.as_json() for p in self.properties if p.equal],
            "different": [p.as_json() for p in self.properties if not p.equal],
        }


#: name, how to read it off a setup, the best level that a difference leaves, and what it is known to do.
_PROPERTIES: tuple[tuple[str, Callable[[Setup], Any], str, str], ...] = (
    (
        "global_batch",
        lambda s: s.plan.global_batch,
        _COMPARABLE,
        "another number of samples behind each step",
    ),
    ("total_samples", lambda s: s.plan.total_samples, NOT_COMPARABLE, "more or less training"),
    ("lr", lambda s: s.plan.lr, _COMPARABLE, "another step size at the same sample"),
    ("warmup_steps", lambda s: s.plan.warmup_steps, _COMPARABLE, "the peak comes at another step"),
    (
        "k",
        lambda s: s.plan.k if s.plan.world_size > 1 else 1,  # one worker has nobody to drift from
        _COMPARABLE,
        "replicas drift apart between synchronisations; clipping is local",
    ),
    ("compile", lambda s: s.compile, _COMPARABLE, "fused kernels round differently"),
    ("precision", lambda s: s.precision, _COMPARABLE, "rounding of forward and backward"),
    (
        "dropout_streams",
        lambda s: s.dropout_streams,
        _COMPARABLE,
        "other units are dropped for the same sample",
    ),
    ("world_size", lambda s: s.plan.world_size, _FREE, "sums in another order: last bits"),
    ("accumulation_steps", lambda s: s.plan.accumulation_steps, _FREE, "sums in another order: last bits"),
    ("rehearsed", lambda s: s.rehearsed, _FREE, "kernels and speed are not the named device's"),
)


def dropout_streams(plan: Plan) -> str:
    """Which random stream a sample's dropout comes from, in standard equivalence: the worker's, in order of forward."""
    if plan.world_size == 1 and plan.accumulation_steps == 1:
        return "one stream"
    return f"{plan.world_size} worker streams × {plan.accumulation_steps} micro-batches"


def certify(setup: Setup, baseline: Setup) -> Certificate:
    """Compare a setup with its baseline property by property."""
    properties = []
    for name, read, allows, effect in _PROPERTIES:
        value, reference = read(setup), read(baseline)
        equal = value == reference
        properties.append(Property(name, value, reference, equal, allows, "" if equal else effect))
    level = max((p.allows for p in properties if not p.equal), key=_LEVELS.index, default=_FREE)
    return Certificate(level, tuple(properties))
