"""Diagnoses: which causes are reported, from which share on, in which order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runner.folder.record import Compilations, Diagnosis, RunResult, Tokens
from runner.plan import Plan
from runner.speed.diagnosis import diagnose
from runner.speed.run_numbers import Baseline, Restarts, RunNumbers, SamplesRead


def step(**seconds: float) -> dict[str, float]:
    """A step in which nothing stands out except what is given."""
    usual = {"data": 0.01, "forward": 0.3, "backward": 0.6, "optimizer": 0.05, "communication": 0.03, "other": 0.01}
    return {**usual, **seconds}


PLAN = dataclasses.replace(
    Plan(*range(1, 17), False), world_size=4, samples_per_epoch=8551, micro_batch=32, replica_batch=32, k=1
)
#: Four workers, each with its own device; 150 of 200 s are steps, of which 90% are forward and backward.
USUAL = RunNumbers(
    plan=PLAN,
    device="gpu4",
    rehearsed=False,
    local_workers=4,
    cores=None,
    jobs_at_once=1,
    unit="samples",
    largest_k=1000,
    length_sorted=True,
    few_lengths=False,
    can_unpad=True,
    pads_to=None,
    compiled=False,
    wall_s=200.0,
    training_s=150.0,
    result=RunResult(
        first_step_s=20.0, evaluation_s=10.0, samples_per_s=400.0, step_s=step(), tokens=Tokens(90, uneven=10)
    ),
    restarts=Restarts(),
    reading=SamplesRead(8551, 8551, 8551),
)


def found(**changes: Any) -> list[Diagnosis]:
    """`changes`: of `USUAL`, its result or its plan."""
    for name, part in (("result", USUAL.result), ("plan", PLAN)):
        own = {one.name: changes.pop(one.name) for one in dataclasses.fields(part) if one.name in changes}
        changes[name] = dataclasses.replace(part, **own)
    return diagnose(dataclasses.replace(USUAL, **changes))


#: A peak of which a sample's 1e12 operations are 40% at 400 samples/s.
USE: dict[str, Any] = {"peak_flops_per_s": 1e15}
COMPILE, GLOBAL_BATCH = "compile=true", "batch.global_batch"

#: Micro-batches of uneven lengths; of which 0.58 × 90% of 75% of the run's time are lost.
UNEVEN, PADDED = Tokens(42, uneven=58), (0.58, 0.58 * 0.9 * 0.75)
#: Changes; then the kind, the share that was measured, the lost share of the run's time, and the settings that help.
CASES: list[tuple[dict[str, Any], str, float | None, float, tuple[str, ...]]] = [
    ({}, "nothing", 0.95, 0.0, ()),
    ({"baseline": Baseline("one", 200.0, 32, None)}, "nothing", 0.95, 0.0, ()),
    ({**USE, "flops_per_sample": 1e12}, "nothing", 0.95, 0.0, ()),
    # 8% of the peak, 8% ÷ 0.9 of it while forward and backward pass compute, and a tenth of that is padding.
    ({**USE, "flops_per_sample": 0.2e12}, "utilization", 0.08 / 0.81, (1 - 0.2 * 0.8 / 0.81) * 0.675, (COMPILE,)),
    ({**USE, "flops_per_sample": 0.2e12, "rehearsed": True}, "rehearsed", None, 0.0, ()),
    ({"step_s": None}, "nothing", None, 0.0, ()),
    ({"reading": SamplesRead(8551, 4 * 8551, 8551)}, "not dealt out", 0.75, 0.75 * 0.75, ()),
    ({"reading": SamplesRead(96, 384, 96)}, "not dealt out", 0.75, 0.75 * 0.75, ()),
    ({"reading": SamplesRead(1000, 1000, 750)}, "repeats", 0.25, 0.25 * 0.75, ()),
    ({"reading": SamplesRead(100, 100, 50), "world_size": 2}, "repeats", 0.5, 0.5 * 0.75, ()),
    (
        {"step_s": step(forward=0.1, backward=0.24, optimizer=0.02, data=0.02, communication=0.61, other=0.01)},
        *("communication", 0.61, 0.61 * 0.75, ("sync.k=8",)),
    ),
    ({"rehearsed": True}, "rehearsed", None, 0.0, ()),
    ({"step_s": step(data=0.49, forward=0.1, backward=0.3)}, "data", 0.5, 0.5 * 0.75, ("cache_dir",)),
    ({"step_s": step(optimizer=0.65, forward=0.1, backward=0.2)}, "optimizer", 0.65, 0.65 * 0.75, (GLOBAL_BATCH,)),
    ({"step_s": step(other=0.41, forward=0.2, backward=0.3)}, "overhead", 0.41, 0.41 * 0.75, ("log_every",)),
    ({"first_step_s": 140.0, "training_s": 50.0}, "start-up", 0.7, 0.7, ()),
    ({"first_step_s": 140.0, "training_s": 50.0, "first_step_compile_s": 9.0}, "start-up", 0.7, 0.7, ()),
    ({"training_s": 50.0}, "ending", 0.6, 0.6, ()),
    ({"restarts": Restarts((), 0.0, 60.0)}, "restarted", 0.3, 0.3, ()),
    ({"compilations": Compilations(9, 80.0, 0)}, "compiling", 0.4, 0.4, ("device.length_buckets",)),
    ({"compilations": Compilations(9, 80.0, 0), "compiled": True}, "compiling", 0.4, 0.4, ()),
    ({"evaluation_s": 50.0}, "evaluation", 0.25, 0.25, ("evaluation.every_steps", "evaluation.micro_batch")),
    ({"cores": 2}, "cores", 0.75, 0.75 * 0.9 * 0.75, ()),
    ({"waited_share": 0.4}, "busy", 0.4, 0.4 * 0.75, ()),
    ({"waited_share": 0.4, **USE, "flops_per_sample": 0.2e12}, "busy", 0.4, 0.4 * 0.75, ()),
    ({"waited_share": 0.4, "cores": 2}, "cores", 0.75, 0.75 * 0.9 * 0.75, ()),
    ({"jobs_at_once": 2}, "side by side", 0.5, 0.5 * 0.9 * 0.75, ()),
    ({"baseline": Baseline("one", 100.0, 128, 0.9 / 64)}, "micro-batch", 0.5, 0.5 * 0.9 * 0.75, ()),
    ({"tokens": UNEVEN}, "padding", *PADDED, ("accumulation.steps",)),
    ({"tokens": UNEVEN, "pads_to": "longest"}, "padding", *PADDED, ("recipe.padding=none",)),
    ({"tokens": UNEVEN, "pads_to": "longest", "can_unpad": False}, "padding", *PADDED, ("accumulation.steps",)),
    (
        {"tokens": UNEVEN, "length_sorted": False},
        "padding",
        *PADDED,
        ("batch.length_sorted=true", "accumulation.steps"),
    ),
    (
        {"tokens": Tokens(42, uneven=8, beyond=50), "pads_to": "max_length"},
        *("padding", *PADDED, ("recipe.padding=none",)),
    ),
    (
        {"tokens": Tokens(42, uneven=8, beyond=50), "pads_to": "max_length", "can_unpad": False},
        *("padding", *PADDED, ("recipe.padding=longest",)),
    ),
    ({"tokens": Tokens(42, beyond=58), "few_lengths": True}, "padding", *PADDED, ("device.length_buckets",)),
    ({"tokens": Tokens(42, beyond=58)}, "padding", *PADDED, ()),
    ({"tokens": Tokens(42, uneven=20, fillers=38)}, "padding", *PADDED, (GLOBAL_BATCH,)),
]


@pytest.mark.parametrize(("changes", "kind", "share", "lost", "settings"), CASES)
def test_each_cause_alone(
    changes: dict[str, Any], kind: str, share: float | None, lost: float, settings: tuple[str, ...]
) -> None:
    (one,) = found(**changes)
    expected = (share if share is None else pytest.approx(share), pytest.approx(lost))
    assert (one.kind, one.settings) == (kind, settings)
    assert (one.share, one.lost_share) == expected
    assert all(setting in one.sentence for setting in settings if setting != GLOBAL_BATCH)  # which it calls by name


COMPILED = {"compilations": Compilations(9, 39.0, 0)}


@pytest.mark.parametrize(
    "changes",
    [
        {"reading": SamplesRead(8551, 8551 + 100, 8551)},  # shards that were padded to equal length
        {"step_s": step(communication=0.24), "evaluation_s": 39.0, "first_step_s": 59.0, **COMPILED},
        {"training_s": 111.0},  # 59 of 200 s are left for the end
        {"step_s": step(communication=0.9), "world_size": 1},
        {"step_s": step(data=0.24)},
        {"tokens": Tokens(81, uneven=19)},
        {"cores": 5},
        {"waited_share": 0.19},
        {"cores": 1, "local_workers": 1},
        {"baseline": Baseline("x", 100.0, 128, 0.9 / 32 * 0.9)},
        {"baseline": Baseline("x", 100.0, 32, 0.9 / 32 / 2)},  # its micro-batches are not larger
        {"baseline": Baseline("x", 110.0, 32, None)},  # a scaling efficiency of 91%
    ],
)
def test_below_the_threshold_nothing_is_reported(changes: dict[str, Any]) -> None:
    assert [one.kind for one in found(**changes)] == ["nothing"]


def test_the_costliest_comes_first() -> None:
    """After wrong data and a rehearsal. Of 200 s: 70; 3/4 of 90% of 80 = 54; 45; half of 90% of 80 = 36."""
    everything = found(
        reading=SamplesRead(8551, 4 * 8551, 8551),
        rehearsed=True,
        cores=2,
        first_step_s=70.0,
        training_s=80.0,
        evaluation_s=45.0,
        tokens=Tokens(1, uneven=1),
    )
    kinds = ["not dealt out", "rehearsed", "start-up", "cores", "evaluation", "padding"]
    assert [one.kind for one in everything] == kinds


def test_a_failed_run_has_its_ledger_only() -> None:
    unknown = dict.fromkeys(("training_s", "first_step_s", "evaluation_s", "samples_per_s", "step_s", "tokens"))
    assert found(**unknown, rehearsed=True, cores=1, reading=None) == []
    assert [one.kind for one in found(**unknown, reading=SamplesRead(8551, 4 * 8551, 8551))] == ["not dealt out"]


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, ("sync.k=4",)),
        ({"largest_k": None}, ()),
        ({"largest_k": 3}, ()),
        ({"k": 2}, ("sync.k=8",)),  # 1 s per step is 2 s per synchronisation
        # The backward pass hides 1 of 2 s; local phases would not.
        ({"synchronisations": 10, "comm_bytes": 10**10, "comm_s": 20.0}, ("sync.k=8",)),
        # 64 s in flight per synchronisation are hidden at any k; 16 s are waited for.
        ({"k": 16, "synchronisations": 10, "comm_bytes": 80 * 10**9, "comm_s": 640.0}, ("sync.k=64",)),
    ],
)
def test_advice_on_k(changes: dict[str, Any], settings: tuple[str, ...]) -> None:
    """1 s of communication to 1.01 s of everything else in each step."""
    spent = step(forward=0.3, backward=0.6, optimizer=0.09, data=0.01, other=0.01, communication=1.0)
    (one,) = found(step_s=spent, **changes)
    assert one.settings == settings


def test_the_speed_of_the_link_in_words() -> None:
    """1 GB in 2 s is 4 Gbit/s, times 1.5 in a ring of 4."""
    (one,) = found(step_s=step(communication=1.0), synchronisations=10, comm_bytes=10**10, comm_s=20.0)
    assert " (6 Gbit/s)" in one.sentence
