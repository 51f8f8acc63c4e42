"""How a sync policy is described in names, plans and certificates."""

from __future__ import annotations

import pytest

from runner.plan.describe_sync import describe_sync_window, sync_labels
from tests.configured import prepared


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        ("", []),
        ("sync.k=4", ["k=4"]),
        ("sync=gradients sync.k=1", []),
        ("sync=gradients", ["gradients", "k=16"]),
        ("sync=outer sync.k=8", ["diloco", "k=8"]),
        ("sync=outer sync.k=8 sync.outer_lr=0.5", ["outer lr=0.5 momentum=0.9 nesterov", "k=8"]),
        ("sync.k=4 sync.schedule=post_local sync.synchronous_share=0.2", ["k=4", "post_local=0.2"]),
        ("sync=slowmo sync.k=8", ["slowmo", "k=8"]),
        ("sync=accumulated sync.k=1", ["accumulated", "k=1"]),
        ("sync.k=16 sync.overlap=true sync.compress=bf16", ["k=16", "overlap=8", "bf16 wire"]),
        ("sync.k=4 sync.schedule=qsr", ["k=4", "qsr"]),
        ("sync.k=4 sync.fragments=4 sync.overlap=true", ["k=4", "fragments=4", "overlap=1"]),
    ],
)
def test_labels(overrides: str, labels: list[str]) -> None:
    """Only settings that differ from plain synchronous training; the setup's name has the same labels."""
    experiment = prepared(f"device=cpu4 {overrides}")
    assert sync_labels(experiment.config.sync) == labels
    assert experiment.setup_name == " · ".join(["cpu4", *labels, "s0"])


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ("device=cpu4", ["every step"]),
        ("device=cpu4 sync.k=4 max_steps=10", ["k = 4 steps", "3 in total"]),  # the last one at the end of the run
        ("device=cpu4 sync.k=4 max_steps=16 sync.schedule=post_local", ["after 8 synchronous steps", "2 in total"]),
        ("device=cpu4 sync.k=4 max_steps=100 sync.schedule=qsr schedule=constant", ["at least k = 4", "25 in total"]),
        ("device=cpu4 sync=gradients sync.k=4 max_steps=10", ["k = 4 steps", "2 in total"]),  # none at the end
        ("device=cpu sync.k=4", ["one worker"]),
    ],
)
def test_the_window_in_the_plan(overrides: str, parts: list[str]) -> None:
    experiment = prepared(overrides)
    text = describe_sync_window(experiment.plan, experiment.config.sync, experiment.config.schedule)
    assert all(part in text for part in parts), text


def test_the_certificate_tells_policies_apart() -> None:
    """Every setting that changes what workers average, or when, is part of the property `sync`."""
    overrides = (
        *("sync.k=1", "sync.k=4", "sync.k=4 batch.length_sorted=false", "sync=gradients", "sync=outer"),
        *("sync=slowmo", "sync=slowmo sync.overlap=true", "sync=slowmo sync.overlap=true sync.delay=3"),
        *("sync=accumulated", "sync.k=4 sync.schedule=post_local", "sync.k=4 sync.schedule=qsr"),
        *(
            "sync.k=4 sync.schedule=qsr sync.qsr_alpha=0.01",
            "sync.k=4 sync.fragments=2",
            "sync.k=4 sync.fragments=auto",
        ),
    )
    rows = []
    for one in overrides:
        certificate = prepared(f"device=cpu2 {one}").certificate
        rows.append(next(p for p in certificate.properties if p.name == "sync"))
    assert [row.equal for row in rows] == [True] + [False] * (len(rows) - 1)
    assert len({row.value for row in rows}) == len(rows)
