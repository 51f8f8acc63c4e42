"""Runs whose workers have too little memory for their micro-batches: smaller ones, and otherwise the same run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runner import cli
from runner.launch import local
from tests.faulty_recipes import SAMPLE_MIB, faulty
from tests.runs import read, run

#: For micro-batches of 6 samples and the rest of a worker, not for micro-batches of 12.
FREE_MIB = 9 * SAMPLE_MIB
LITTLE = [*faulty("NeedsMemory"), "precision=fp64", "equivalence=exact", "log_every=4"]


def outcome(folder: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Weights and ledger of a run."""
    (path,) = Path(folder, "model").glob("*.safetensors")
    return load_file(path), read(Path(folder), "ledger.json")


def require_same(one: str, other: str) -> None:
    (weights, ledger), (expected, expected_ledger) = outcome(one), outcome(other)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
    assert ledger == expected_ledger
    assert ledger["sound"]


def segments(folder: str) -> list[tuple[int, int]]:
    """The first step, counted from 0, of each segment of a run, and its micro-batches."""
    found = read(Path(folder), "certificate.json")["segments"]
    return [(segment["after_step"], segment["accumulation_steps"]) for segment in found]


@pytest.mark.parametrize(
    ("setup", "steps"), [("device=cpu", 4), ("device=cpu2", 2), ("device=cpu2 sync.k=4", 2)], ids=str
)
def test_a_step_is_repeated_with_smaller_micro_batches(here: Path, setup: str, steps: int) -> None:
    """After a failed allocation. The run ends as one with enough memory, and its records say what happened."""
    assert run(*LITTLE, *setup.split(), "hydra.run.dir=enough") == 0
    assert run(*LITTLE, *setup.split(), f"+recipe.free_mib={FREE_MIB}", "hydra.run.dir=little") == 0
    require_same("little", "enough")
    assert segments("little") == [(0, 1), (0, steps)]
    assert read(Path("little"), "plan.json")["accumulation_steps"] == steps
    summary = read(Path("little"), "summary.json")
    assert summary["smaller_micro_batches"] == [{"after_step": 0, "accumulation_steps": steps}]
    assert any("lack of memory" in note for note in summary["notes"])


def test_all_workers_start_again_if_one_cannot_repeat_a_step(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a backward pass that averages gradients: the others wait for it. It is no restart of a lost worker."""
    given = [*LITTLE, "device=cpu2", "+recipe.in_backward=true", "launch.max_restarts=0"]
    assert run(*given, "hydra.run.dir=enough") == 0
    assert run(*given, f"+recipe.free_mib={FREE_MIB}", "hydra.run.dir=little") == 0
    require_same("little", "enough")
    assert "starting again with micro-batches of 6" in capfd.readouterr().out.replace("\n", " ")
    assert segments("little") == [(0, 1), (0, 2)]


def test_a_worker_that_is_killed_for_memory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run continues from its newest checkpoint with smaller micro-batches, which it keeps."""
    monkeypatch.setattr(local, "_killed_for_memory", itertools.count().__next__)
    given = [*LITTLE, "device=cpu2", "launch.max_restarts=0", "checkpoint.every_steps=1", "launch.timeout_s=60"]
    assert run(*given, "hydra.run.dir=enough") == 0
    assert run(*given, "+recipe.killed_above=6", "hydra.run.dir=little") == 0
    require_same("little", "enough")
    (first, once), (after, twice) = segments("little")
    assert (first, once, twice) == (0, 1, 2)
    assert after >= 1
    assert any(f"started again from step {after}" in note for note in read(Path("little"), "summary.json")["notes"])


def test_nothing_is_smaller_than_one_sample(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = [*LITTLE, "equivalence=standard", "device=cpu", f"+recipe.free_mib={SAMPLE_MIB - 50}"]
    assert run(*given) == cli.EXIT_FAILED
    error = capfd.readouterr().err.splitlines()[-1]
    assert "micro-batches of 1 " in error
    assert "gradient_checkpointing=true" in error
