"""Runs whose workers have too little memory for their micro-batches: smaller ones, and otherwise the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runner import cli
from tests.faulty_recipes import SAMPLE_MIB, faulty
from tests.runs import read, run

#: For micro-batches of 6 samples and the rest of a worker, not for micro-batches of 12.
FREE_MIB = 9 * SAMPLE_MIB
EXACT = [*faulty("NeedsMemory"), "precision=fp64", "equivalence=exact", "log_every=4"]


def weights(folder: str) -> dict[str, torch.Tensor]:
    (path,) = Path(folder, "model").glob("*.safetensors")
    return load_file(path)


def without_accumulation(ledger: dict) -> list[str]:
    return [epoch["digest"] for epoch in ledger["epochs"]]


@pytest.mark.parametrize("setup", [["device=cpu"], ["device=cpu2"], ["device=cpu2", "sync.k=4"]], ids=" ".join)
def test_too_little_memory_changes_only_the_micro_batches(here: Path, setup: list[str]) -> None:
    """A failed allocation: the step is repeated with smaller micro-batches, and the run ends as one with more memory."""
    assert run(*EXACT, *setup, "hydra.run.dir=enough") == 0
    assert run(*EXACT, *setup, f"+recipe.free_mib={FREE_MIB}", "hydra.run.dir=little") == 0
    expected, found = weights("enough"), weights("little")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)
    assert read(Path("little"), "ledger.json") == read(Path("enough"), "ledger.json")
    steps = 24 // 6 if setup == ["device=cpu"] else 12 // 6
    assert read(Path("little"), "plan.json")["accumulation_steps"] == steps
    summary = read(Path("little"), "summary.json")
    assert summary["smaller_micro_batches"] == [{"after_step": 0, "accumulation_steps": steps}]
    assert [(s["after_step"], s["accumulation_steps"]) for s in read(Path("little"), "certificate.json")["segments"]] == [(0, 1), (0, steps)]
    assert any("for lack of memory" in note for note in summary["notes"])
