"""Training learns: the default recipe, the rehearsal of eight TPU workers, and compiled training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import QUICK, only_folder, read, run, summary_of


def test_default_run_learns(here: Path) -> None:
    """`python -m runner` classifies held-out sentences correctly after a third of its epochs."""
    assert run("device=cpu", "epochs=2", "tracking=none", base=[]) == 0
    summary = read(only_folder(here), "summary.json")
    assert summary["samples_seen"] == 16_000
    assert summary["eval"]["accuracy"] >= 85


@pytest.mark.long
def test_eight_rehearsed_workers_learn(here: Path) -> None:
    """`device=tpu8 sync.k=4`, exactly as a user types it, ends far above chance (averaging costs some accuracy)."""
    assert run("device=tpu8", "sync.k=4", base=[]) == 0
    summary = read(only_folder(here), "summary.json")
    assert (summary["status"], summary["rehearsed"]) == ("FINISHED", True)
    assert summary["eval"]["accuracy"] >= 70


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "cpu2"])
def test_compiled_training_is_the_same_training(here: Path, device: str) -> None:
    """`compile=true` compiles, and changes losses by rounding only."""
    losses = [summary_of(f"compile={flag}", f"device={device}", base=QUICK)["train_loss"] for flag in ("true", "false")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
