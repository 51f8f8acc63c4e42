"""The default recipe learns, in one process and compiled."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from runner import cli
from tests.replicas import TINY


def test_the_default_run_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m runner`, as it comes, classifies at least 90% of held-out sentences rightly."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["device=cpu"], time.time()) == 0
    (folder,) = (tmp_path / "outputs" / "acceptability").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["eval"]["accuracy"] >= 90
    assert summary["samples_seen"] == 48_000


@pytest.mark.long
def test_eight_rehearsed_workers_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`device=tpu8 sync.k=4`, as one types it, ends well and far above chance (averaging costs some of it)."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["device=tpu8", "sync.k=4"], time.time()) == 0
    (folder,) = (tmp_path / "outputs" / "acceptability").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "FINISHED"
    assert summary["rehearsed"] is True
    assert summary["eval"]["accuracy"] >= 70


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "cpu2"])
def test_compiled_training_is_the_same_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """`compile=true` compiles, and changes losses by rounding only."""
    monkeypatch.chdir(tmp_path)
    tiny = [override for override in TINY if override != "precision=fp64"]
    losses = {}
    for flag in ("true", "false"):
        assert cli.main([*tiny, f"compile={flag}", f"device={device}", f"hydra.run.dir=run-{flag}"], time.time()) == 0
        losses[flag] = json.loads((tmp_path / f"run-{flag}" / "summary.json").read_text())["train_loss"]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-4)
