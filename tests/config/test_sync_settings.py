"""What in the group `sync` is refused, and in which words."""

from __future__ import annotations

import pytest

from runner.config.compose import compose, settings
from runner.config.schema import Config
from runner.errors import UserError
from runner.plan.experiment import prepare


def config(overrides: str) -> Config:
    return settings(compose(["device=cpu2", *overrides.split()]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("sync.k=0", "sync.k=0 cannot be: it must be at least 1"),
        ("sync.overlap=true", "sync.overlap=true cannot be: with sync.k=1 there is no step"),
        ("sync=accumulated sync.k=1 sync.overlap=true", "sync.overlap=true cannot be: with sync.k=1"),
        ("sync=gradients sync.overlap=true", "sync.overlap=true cannot be: sync.policy=gradients averages gradients"),
        ("sync.k=4 sync.delay=2", "sync.delay=2 cannot be: only with sync.overlap=true"),
        ("sync.k=4 sync.overlap=true sync.delay=5", "sync.delay=5 cannot be: .* 1 to sync.k=4 optimizer steps"),
        ("sync.k=4 sync.overlap=true sync.delay=0", "sync.delay=0 cannot be"),
        ("sync.schedule=post_local", "sync.schedule=post_local cannot be: with sync.k=1 every step is synchronous"),
        ("sync=gradients sync.k=1 sync.schedule=qsr precision=fp16", "workers' loss scales move apart"),
        ("sync=gradients sync.k=1 sync.schedule=post_local", "sync.schedule=post_local cannot be: with sync.k=1"),
        ("sync.k=4 sync.synchronous_share=0.5", "sync.synchronous_share=0.5 cannot be: only sync.schedule=post_local"),
        (
            "sync.k=4 sync.schedule=post_local sync.synchronous_share=0",
            "sync.synchronous_share=0.0 cannot be: .* above",
        ),
        ("sync.k=4 sync.schedule=post_local sync.synchronous_share=1", "sync.synchronous_share=1.0 cannot be"),
        ("sync.k=4 sync.qsr_alpha=1", "sync.qsr_alpha=1.0 cannot be: only sync.schedule=qsr"),
        ("sync.k=4 sync.schedule=qsr sync.qsr_alpha=0", "sync.qsr_alpha=0.0 cannot be"),
        ("sync.k=4 sync.schedule=qsr sync.qsr_alpha=inf", "sync.qsr_alpha=inf cannot be"),
        ("sync.k=4 sync.outer_lr=1", "sync.outer_lr=1.0 cannot be: sync.policy=periodic has no outer optimizer"),
        ("sync.policy=outer", "sync.outer_lr=null cannot be: .* choose sync=outer"),
        ("sync=outer sync.outer_lr=0", "sync.outer_lr=0.0 cannot be: it must be above 0"),
        ("sync=outer sync.outer_momentum=1", "sync.outer_momentum=1.0 cannot be"),
        ("sync=outer sync.outer_momentum=0", "sync.outer_nesterov=true cannot be: it needs a momentum above 0"),
        ("sync.average=weights_and_moments", "sync.average=weights_and_moments cannot be: with sync.k=1"),
        ("sync=outer sync.average=weights_and_moments", "cannot be: sync.policy=outer leaves moments"),
        ("sync.k=4 sync.average=weights_and_moments sync.overlap=true", "cannot be: moments have moved on"),
        ("sync.k=4 sync.average=weights_and_moments sync.compress=fp16", "cannot be: second moments are too small"),
        (
            "sync.k=4 sync.average=weights_and_moments optimizer=sgd optimizer.momentum=0",
            "sync.average=weights_and_moments cannot be: optimizer=sgd with optimizer.momentum=0 has no moments",
        ),
        ("sync=gradients precision=fp16", "sync.policy=gradients cannot be: workers' loss scales"),
        ("sync.compress=int8", "sync.compress is wrong: 'int8' is not one of none, bf16, fp16"),
        ("sync=local", "sync=local is not a choice of the group 'sync'"),
    ],
)
def test_refused(overrides: str, message: str) -> None:
    """One sentence that names the setting, its value and the mend."""
    with pytest.raises(UserError, match=message) as caught:
        config(overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "sync.k=4 sync.overlap=true sync.delay=4",
        "sync=outer sync.overlap=true sync.compress=fp16 sync.schedule=qsr",
        "sync=accumulated sync.k=1 sync.compress=bf16",
        "sync=slowmo sync.schedule=post_local sync.synchronous_share=0.1",
        "sync=gradients sync.k=1 precision=fp16",
        "sync.k=4 sync.average=weights_and_moments sync.compress=bf16",
        "sync.compress=fp16",
    ],
)
def test_what_goes_together(overrides: str) -> None:
    """The rules refuse no more than they have to."""
    assert config(overrides).sync.k >= 1


def test_workers_have_to_meet_before_the_end() -> None:
    """A k beyond the run's last step is refused with that step, unless there is one worker."""
    with pytest.raises(UserError, match=r"^sync\.k=31 is more than the 30 optimizer steps .* set sync\.k=30 or less$"):
        prepare(config("max_steps=30 sync.k=31"))
    assert prepare(config("max_steps=30 sync.k=30")).plan.k == 30
    with pytest.raises(
        UserError, match=r"^sync\.k=16 is more than the 15 optimizer steps that sync\.schedule=post_local"
    ):
        prepare(config("max_steps=30 sync.k=16 sync.schedule=post_local"))
    assert prepare(config("device=cpu max_steps=30 sync.k=31")).plan.k == 31


@pytest.mark.parametrize(("given", "steps"), [("", 0), ("sync.overlap=true", 4), ("sync.overlap=true sync.delay=2", 2)])
def test_how_long_an_average_travels(given: str, steps: int) -> None:
    """By default half of the local phase, rounded up."""
    assert config(f"sync.k=7 {given}").sync.steps_travelled == steps
