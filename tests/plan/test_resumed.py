"""The plan and the certificate of a run that continues on other workers."""

from __future__ import annotations

import dataclasses

import pytest

from runner.config.compose import compose, settings
from runner.config.plain import from_plain
from runner.errors import UserError
from runner.plan.checks import check_profile
from runner.plan.experiment import Experiment, prepare, prepare_resumed
from runner.plan.history import Segment
from tests.replicas import TINY


def experiment(*overrides: str) -> Experiment:
    return prepare(settings(compose([*TINY, "precision=fp32", *overrides])))


def resumed(start: Experiment, *overrides: str, changed: bool = False) -> Experiment:
    """Continued after step 3; `overrides`: of the whole configuration."""
    config = settings(compose([*TINY, "precision=fp32", *overrides]))
    return prepare_resumed(config, start.plan, changed).resumed_after(start.certificate.segments, 3)


def test_the_same_workers_have_the_same_plan() -> None:
    for overrides in (
        ["device=cpu2", "accumulation.steps=3"],
        ["device=cpu4", "batch=per_device", "batch.global_batch=null", "batch.micro_batch=6"],
        ["device=cpu2", "accumulation=auto", "accumulation.max_micro_batch=5"],
    ):
        start = experiment(*overrides)
        again = resumed(start, *overrides)
        assert again.plan == start.plan
        assert again.setup_digest == start.setup_digest
        assert again.setup_name == start.setup_name


def test_other_workers_keep_batches_learning_rate_and_steps() -> None:
    start = experiment("device=cpu4", "batch=per_device", "batch.global_batch=null", "batch.micro_batch=6")
    other = resumed(start, "device=cpu", "batch=per_device", "batch.global_batch=null", "batch.micro_batch=6")
    sizes = ("world_size", "accumulation_steps", "replica_batch", "micro_batch")
    assert [getattr(other.plan, name) for name in sizes] == [1, 4, 24, 6]
    kept = dataclasses.asdict(start.plan).keys() - set(sizes)
    assert {name: getattr(other.plan, name) for name in kept} == {name: getattr(start.plan, name) for name in kept}


@pytest.mark.parametrize(
    ("overrides", "changed", "expected"),
    [
        (["device.workers=5"], False, (1, 5)),
        (["device=cpu2", "accumulation.steps=4"], True, (4, 3)),
        (["device=cpu2", "accumulation=auto", "accumulation.max_micro_batch=5"], True, (3, 4)),
        (["device.workers=24", "accumulation.steps=4"], True, (1, 1)),
    ],
)
def test_shares_of_other_workers(overrides: list[str], changed: bool, expected: tuple[int, int]) -> None:
    """(accumulation steps, micro-batch) of a global batch of 24, which need not divide."""
    plan = resumed(experiment("device=cpu"), *overrides, changed=changed).plan
    assert (plan.accumulation_steps, plan.micro_batch) == expected


def test_more_workers_than_samples_in_a_batch_are_refused() -> None:
    with pytest.raises(UserError, match=r"device.workers=25.*24"):
        resumed(experiment("device=cpu"), "device.workers=25")


def test_a_job_is_the_same_after_smaller_micro_batches() -> None:
    """For lack of memory. Its settings are what a sweep finds it by; its setup was another from there on."""
    start = experiment("device=cpu2")
    smaller = start.with_accumulation_steps(2).resumed_after(start.certificate.segments, 3)
    assert smaller.setup_digest != start.setup_digest
    assert smaller.job_digest == start.job_digest
    others = (experiment("device=cpu2", changed) for changed in ("seed=1", "sync.k=2", "accumulation.steps=2"))
    assert all(other.job_digest != start.job_digest for other in others)


def test_profiled_steps_must_be_left() -> None:
    """Ten steps in all."""
    start = experiment("profile.steps=3", "profile.skip=2")
    check_profile(start.config, start.plan, done=5)
    with pytest.raises(UserError, match=r"profile.steps=3.*2 optimizer steps"):
        check_profile(start.config, start.plan, done=6)


def test_shards_stay_on_other_workers() -> None:
    start = experiment("device=cpu2", "equivalence=identical")
    other = resumed(start, "device.workers=3", "equivalence=identical")
    assert (other.plan.shards, other.plan.micro_batch, other.plan.accumulation_steps) == (8, 3, 3)
    assert other.certificate.level == "identical"
    for changed, level in ((("processor EPYC → Xeon",), "equivalent"), (("torch 2.12 → 2.13",), "comparable")):
        assert start.resumed_after(start.certificate.segments, 3, changed).certificate.level == level
    with pytest.raises(UserError, match="accumulation"):
        resumed(start, "device=cpu", "equivalence=identical", "accumulation.steps=2", changed=True)


def test_the_certificate_lists_the_segments() -> None:
    """Its level is the worst of all; what was trained on two setups has another digest than on one."""
    start = experiment("device=cpu2", "sync.k=2", "scaling=none")
    other = resumed(start, "device=cpu", "sync.k=2", "scaling=none")
    first, second = other.certificate.segments
    assert (first.after_step, first.until_step, first.workers, first.level) == (0, 3, 2, "comparable")
    assert {"sync", "world_size"} <= set(first.differs)
    assert (second.after_step, second.until_step, second.workers) == (3, None, 1)
    assert second.level == "equivalent"
    assert other.certificate.level == "comparable"
    assert other.setup_name.startswith("cpu2 → cpu")
    assert other.setup_digest not in (
        start.setup_digest,
        experiment("device=cpu", "sync.k=2", "scaling=none").setup_digest,
    )
    assert other.history.began_after == other.with_accumulation_steps(2).history.began_after == 3
    assert from_plain(Segment, other.certificate.as_json()["segments"][0]) == first
