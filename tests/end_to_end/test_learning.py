"""Training learns: the default recipe, the rehearsal of eight TPU workers, and compiled training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import QUICK, only_folder, read, run, summary_of


def test_default_run_learns(here: Path) -> None:
    """A third of the default run: 68% of 1,000 held-out sentences, where chance is 50 ± 1.6%."""
    assert run("device=cpu", "epochs=2", "tracking=none", base=[]) == 0
    assert read(only_folder(here), "summary.json")["eval"]["accuracy"] >= 62


@pytest.mark.long
def test_whole_default_run(here: Path) -> None:
    """`python -m runner`, exactly as a user types it, but for the device."""
    assert run("device=cpu", base=[]) == 0
    summary = read(only_folder(here), "summary.json")
    assert summary["samples_seen"] == 48_000
    assert summary["eval"]["accuracy"] >= 90


@pytest.mark.long
def test_eight_rehearsed_workers_learn(here: Path) -> None:
    """`device=tpu8 sync.k=4`, exactly as a user types it, ends far above chance (averaging costs some accuracy)."""
    assert run("device=tpu8", "sync.k=4", base=[]) == 0
    summary = read(only_folder(here), "summary.json")
    assert (summary["status"], summary["rehearsed"]) == ("FINISHED", True)
    assert summary["eval"]["accuracy"] >= 70


@pytest.mark.long
def test_compiled_training_is_the_same_training(here: Path) -> None:
    """`compile=true` compiles, and changes losses by rounding only."""
    losses = [summary_of(f"compile={flag}", "device=cpu2", base=QUICK)["train_loss"] for flag in ("true", "false")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
