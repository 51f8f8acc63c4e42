"""How a sync policy is called in names, plans and certificates."""

from __future__ import annotations

import pytest
from runner.plan.sync_words import sync_words, window_words

from runner.config.compose import compose, settings
from runner.plan.experiment import Experiment, prepare


def prepared(overrides: str) -> Experiment:
    return prepare(settings(compose(["device=cpu4", *overrides.split()])))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("", []),
        ("sync.k=4", ["k=4"]),
        ("sync=gradients sync.k=1", []),
        ("sync=gradients", ["gradients", "k=16"]),
        ("sync=outer sync.k=8", ["diloco", "k=8"]),
        ("sync=outer sync.k=8 sync.outer_lr=0.5", ["outer lr=0.5 momentum=0.9 nesterov", "k=8"]),
        ("sync.k=4 sync.schedule=post_local sync.synchronous_share=0.2", ["k=4", "post_local=0.2"]),
        ("sync.k=4 sync.schedule=qsr sync.qsr_alpha=0.01", ["k=4", "qsr=0.01"]),
        ("sync=slowmo sync.k=8", ["slowmo", "k=8"]),
        ("sync=accumulated sync.k=1", ["accumulated", "k=1"]),
        ("sync.compress=bf16", ["bf16 wire"]),
        ("sync.k=16 sync.overlap=true sync.compress=bf16", ["k=16", "overlap=8", "bf16 wire"]),
        ("sync.k=4 sync.schedule=qsr sync.average=weights_and_moments", ["k=4", "qsr", "moments"]),
    ],
)
def test_words(overrides: str, words: list[str]) -> None:
    """What is unusual, and nothing else; the setup's name has the same words."""
    experiment = prepared(overrides)
    assert sync_words(experiment.config.sync) == words
    assert experiment.setup_name == " · ".join(["cpu4", *words, "s0"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("sync.k=1", "synchronous: every step"),
        ("sync.k=4 max_steps=10", "samples between two averages, every k = 4 steps: 3 in all"),
        (
            "sync.k=4 max_steps=16 sync.schedule=post_local",
            "samples between two averages, every k = 4 steps, after 8 synchronous ones: 2 in all",
        ),
        (
            "sync.k=4 max_steps=100 sync.schedule=qsr schedule=constant",
            "samples between two averages, every at least k = 4 steps: 25 in all",
        ),
        # Gradients are not brought together at the end: there worker 0's weights are taken.
        ("sync=gradients sync.k=4 max_steps=10", "samples between two averages, every k = 4 steps: 2 in all"),
        ("device=cpu sync.k=4", "one worker: nothing to synchronise"),
    ],
)
def test_the_plan_says_how_often_workers_meet(overrides: str, said: str) -> None:
    """The last time, at the end of the run, is counted."""
    experiment = prepared(overrides)
    config = experiment.config
    assert window_words(experiment.plan, config.sync, config.schedule) == said


def sync_row(overrides: str) -> tuple[str, bool]:
    row = next(p for p in prepared(overrides).certificate.properties if p.name == "sync")
    return str(row.value), row.equal


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("sync.k=4", "weights every 4 steps, dealt by length"),
        ("sync.k=4 batch.length_sorted=false", "weights every 4 steps"),
        ("sync=gradients", "gradients, replicas never made equal every 16 steps, dealt by length"),
        ("sync=outer", "updates, outer SGD of lr 0.7, momentum 0.9, nesterov every 16 steps, dealt by length"),
        (
            "sync=slowmo sync.overlap=true sync.delay=3",
            "updates, outer SGD of lr 1, momentum 0.7, per learning rate every 16 steps, 3 steps late, dealt by length",
        ),
        (
            "sync.k=4 sync.schedule=post_local sync.average=weights_and_moments",
            "weights and moments every 4 steps after 50% of the samples, dealt by length",
        ),
    ],
)
def test_the_certificate_says_all_of_it(overrides: str, said: str) -> None:
    """Whatever decides what workers know of each other is named, and is no baseline's."""
    assert sync_row(overrides) == (said, False)


def test_a_compressed_wire_is_named_by_itself() -> None:
    """Nothing drifts with k = 1, but gradients are rounded."""
    different = [p.name for p in prepared("sync.compress=bf16").certificate.properties if not p.equal]
    assert "wire" in different
    assert "sync" not in different


def test_the_baseline_synchronises_every_step() -> None:
    """Plain k = 1 is equal to it."""
    assert sync_row("sync.k=1") == ("every step", True)
