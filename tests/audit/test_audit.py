"""Each known mistake is found in a real script with Accelerate on two processes, and none in the right one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from runner.audit import Audit
from runner.errors import UserError

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, processes: int = 2) -> None:
    """Run a script as torchrun does."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command, str(ROOT / "tests" / "audit" / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def found(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "findings.json").read_text())


@pytest.mark.parametrize(
    ("mistake", "kinds", "words"),
    [
        ("none", [], ""),
        ("loader not prepared", ["coverage"], "each 2 times"),
        ("mean of means", ["gradient"], "divide sums by the global number"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("model not prepared", ["weights", "gradient"], "different weights"),
                ("same order", ["order"], "set_epoch"),
                (
                    "stepped by every process",
                    ["schedule"],
                    "2 times for each optimizer step, as by each of 2 processes",
                ),
                ("stepped in every batch", ["schedule"], "2 times for each optimizer step"),
                ("schedule too long", ["schedule"], "of its peak at the end"),
                ("not divided", ["gradient"], "is 2 times that of its samples in one batch"),
            )
        ),
    ],
)
def test_mistakes_are_found(tmp_path: Path, mistake: str, kinds: list[str], words: str) -> None:
    run("script.py", mistake, str(tmp_path / "audit"))
    findings = found(tmp_path / "audit")
    assert [one["kind"] for one in findings] == kinds, findings
    assert words in " ".join(one["sentence"] for one in findings)
    (epoch, _) = json.loads((tmp_path / "audit" / "ledger.json").read_text())["epochs"]
    assert epoch["unique"] == 64
    steps = [json.loads(line) for line in (tmp_path / "audit" / "steps.jsonl").read_text().splitlines()]
    assert {step["process"] for step in steps} == {0, 1}


@pytest.mark.long
def test_trainer(tmp_path: Path) -> None:
    """64 samples in batches of 5 on two processes: Accelerate repeats some, to give both as many."""
    run("trainer_script.py", str(tmp_path / "audit"))
    findings = found(tmp_path / "audit")
    assert [one["kind"] for one in findings] == ["coverage"]
    assert "even_batches" in findings[0]["sentence"]


def test_one_process_and_plain_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loop is left as it was: same order of samples, no hooks, the loader's own sampler."""
    data = TensorDataset(torch.arange(20.0)[:, None], torch.arange(20.0)[:, None])
    losses = []
    for audited in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loader = DataLoader(data, batch_size=6, shuffle=True)
        sampler = loader.batch_sampler
        if audited:
            audit = Audit(model, optimizer, loader, tmp_path, gradient_step=3, loss=square_error)
        losses.append(trained(model, optimizer, loader))
        if audited:
            assert audit.finish() == []
            assert loader.batch_sampler is sampler
    assert losses[0] == losses[1]
    assert "nothing wrong in 8 steps" in capsys.readouterr().out
    epochs = json.loads((tmp_path / "ledger.json").read_text())["epochs"]
    assert [epoch["samples_seen"] for epoch in epochs] == [20, 20]


def test_a_loader_that_was_not_iterated(tmp_path: Path) -> None:
    """Nothing can be said then, and least of all that nothing is wrong."""
    data = TensorDataset(torch.arange(8.0)[:, None], torch.arange(8.0)[:, None])
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    audit = Audit(model, optimizer, DataLoader(data, batch_size=4), tmp_path, gradient_step=1, loss=square_error)
    trained(model, optimizer, DataLoader(data, batch_size=4))
    assert [one.kind for one in audit.finish()] == ["nothing"]
    audit = Audit(model, optimizer, DataLoader(data, batch_size=4), tmp_path)
    assert [one.kind for one in audit.finish()] == ["nothing"]


def test_what_is_no_mistake(tmp_path: Path) -> None:
    """Clipping, dropout, steps across the end of an epoch, and a loader of a part of the data.

    The check of a gradient leaves random streams and running statistics as they were.
    """
    ends = []
    for gradient_step in (None, 2):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(22, 4), torch.randn(22, 1))
        model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=5, sampler=SubsetRandomSampler(range(15)))
        audit = Audit(model, optimizer, loader, tmp_path, gradient_step, loss=square_error)
        for number, batch in enumerate(itertools.chain(loader, loader), start=1):
            (square_error(model, batch) / 2).backward()
            if number % 2 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()
                optimizer.zero_grad()
        assert audit.finish() == []
        ends.append([tensor.tolist() for tensor in model.state_dict().values()])
    assert ends[0] == ends[1]


def square_error(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> list[float]:
    losses = []
    for _ in range(2):
        for batch in loader:
            loss = square_error(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_loaders_that_cannot_be_followed() -> None:
    class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(())

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for loader in ([1, 2], DataLoader(Endless()), DataLoader(TensorDataset(torch.ones(2)), batch_size=None)):
        with pytest.raises(UserError, match="Audit"):
            Audit(model, optimizer, loader)
