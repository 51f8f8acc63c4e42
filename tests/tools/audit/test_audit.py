"""Planted mistakes are named, causes that are not shown are listed, and right loops give no finding."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from runner.audit import Audit
from runner.errors import UserError
from tests.pool import WorkerPool
from tests.tools.audit.loops import SCHEDULES, Report, run_all

#: Kind and name of the one finding of a loop with one mistake.
NAMED = {
    "loader not sharded": ("coverage", "not sharded"),
    "Accelerate, loader not prepared": ("coverage", "not sharded"),
    "all ranks read rank 0's shard": ("coverage", "one rank for all"),
    "sampler seeded by rank": ("coverage", "different seeds"),
    "weighted sampler": ("coverage", "the same random state"),
    "padding": ("coverage", "padded"),
    "Trainer, padding": ("coverage", "padded"),
    "drop_last without shuffling": ("coverage", "the same tail dropped"),
    "no shuffling": ("order", "not shuffled"),
    "set_epoch forgotten": ("order", "epoch not set"),
    "zero_grad forgotten": ("gradient", "not cleared"),
    "zero_grad before the step": ("gradient", "cleared too early"),
    "zero_grad per micro-batch": ("discarded", "cleared per batch"),
    "clipping per micro-batch": ("gradient", "clipped per batch"),
    "mean of means": ("gradient", "mean of means"),
    "accumulation 1, mean of means": ("gradient", "mean of means"),
    "Accelerate, mean of means": ("gradient", "mean of means"),
    "loss not divided": ("gradient", "not divided"),
    "Accelerate, not divided": ("gradient", "not divided"),
    "summed over processes by hand": ("gradient", "summed over processes"),
    "no DDP": ("gradient", "not averaged"),
    "Accelerate, model not prepared": ("gradient", "not averaged"),
    "discarded tail": ("discarded", "incomplete step"),
    "discarded tail, zeros": ("discarded", "incomplete step"),
    "steps at i % n == 0": ("discarded", "stepped one batch early"),
    "steps at i % n == 0, discards the rest": ("discarded", "stepped one batch early"),
    "parameters missing in the optimizer": ("parameters", "outside the optimizer"),
    "lr by rank": ("schedule", "differs by process"),
    "different initial weights, averaged by hand": ("weights", "different at the start"),
    "weights changed on one rank": ("weights", "different at the start"),
    "different buffers": ("buffers", "different"),
    "scheduler per process": ("schedule", "stepped too often"),
    "scheduler per micro-batch": ("schedule", "stepped per batch"),
    "Accelerate, schedule for one process": ("schedule", "stepped by Accelerate"),
    "schedule too short": ("schedule", "too short"),
    "scheduler never stepped": ("schedule", "never stepped"),
    "evaluation mode left on": ("mode", "evaluation mode"),
}

#: The same, where the records do not show the cause: there are several that would fit.
SEEN = {
    "sampler by hand, seeded by rank": ("coverage", "shared"),
    "sampler by hand, one part for all": ("coverage", "shared"),
    "data set shuffled by rank": ("coverage", "different data"),
    "Accelerate, data by rank": ("coverage", "different data"),
    "num_replicas too large": ("coverage", "a part only"),
    "learning rate set by hand": ("schedule", "0 early"),
    "clipping by value per micro-batch": ("gradient", "changed between batches"),
    "weight decay by rank": ("weights", "different at the end"),
    "no_sync always": ("gradient", "not averaged by DDP"),
    "model.module is called": ("gradient", "not averaged by DDP"),
    "schedule too long": ("schedule", "too long"),
    "T_max in epochs, stepped by batch": ("schedule", "rises again"),
    "length in steps, stepped by epoch": ("schedule", "too long"),
    "loss divided twice": ("gradient", "too small"),
    "class weights": ("gradient", "other weights"),
    "another loss": ("gradient", "another loss"),
    "gradients of one layer not averaged": ("gradient", "not what was accumulated"),
    "Trainer, loss that is not divided": ("gradient", "too large"),
}

#: Numbers and names in the evidence for some of them.
EVIDENCE = {
    "drop_last without shuffling": "6 of 70 samples are left out at the end of each epoch (ids 64, 65",
    "sampler by hand, one part for all": "the same 32 of 64 samples",
    "mean of means": "with 19, 9, 16, 9 unmasked elements",
    "discarded tail": "2 batches at the end of epoch 0, 1 that no optimizer step used",
    "steps at i % n == 0": "after batches 1, 3, 5, …: step 1 has 1 batch where others have 2",
    "parameters missing in the optimizer": "first.weight, first.bias",
    "lr by rank": "of parameter group 1 (0.02, 0.04)",
    "schedule too short": "is 4 steps long, and was stepped 8 times",
    "evaluation mode left on": "4 of 8 steps, from step 5",
}

RIGHT = [
    *("right", "averaged by hand", "sampler by hand", "accumulation 1", "zeros", "local SGD by hand"),
    *("clip by norm", "clip by value", "dropout", "dropout, seeded by rank", "BatchNorm", "BatchNorm and dropout"),
    *("drop_last with shuffling", "one epoch with drop_last", "DistributedSampler(drop_last)", "tail is stepped"),
    *("accumulation 1, divided by the global count", "evaluates on the training loader", "stepped by epoch"),
    *("data set sharded by hand", "weighted sampler, by rank", "pictures", "augmented, seeded by rank"),
    *("T_max in epochs, stepped by epoch", "scheduler replaced"),
    *(
        "Accelerate",
        "Accelerate, dropout",
        "Trainer",
        "Trainer, tail is stepped",
        "Trainer, cosine",
        "Trainer, different numbers of labels",
    ),
    *SCHEDULES,
]


@pytest.fixture(scope="module")
def reports(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """All loops, one after the other in the same two workers."""
    folder = tmp_path_factory.mktemp("audits")
    first, second = pool.run(2, run_all, [*NAMED, *SEEN, *RIGHT], str(folder))
    assert first == second
    return first


@pytest.mark.parametrize("case", [*NAMED, *SEEN])
def test_a_mistake_is_named_or_what_was_seen_is_said(reports: dict[str, Report], case: str) -> None:
    (found,) = reports[case][0]
    assert (found.kind, found.name) == {**NAMED, **SEEN}[case]
    assert bool(found.fits) == (case in SEEN), found
    assert EVIDENCE.get(case, "") in found.seen


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_loop_gives_no_finding(reports: dict[str, Report], case: str) -> None:
    assert reports[case][0] == []


def test_the_ledger_counts_what_was_trained_on(reports: dict[str, Report]) -> None:
    first, _ = reports["right"][1]
    assert first == {"epoch": 0, "samples_seen": 64, "unique": 64, "missing": 0, "repeated": 0, "discarded": 0}
    for case in ("discarded tail", "discarded tail, zeros"):
        for epoch in reports[case][1]:  # the last batch of each process, of 4 samples
            assert (epoch["samples_seen"], epoch["missing"], epoch["discarded"]) == (64, 8, 8)


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


@pytest.mark.parametrize(
    "case",
    [
        "GradScaler skips steps",
        "closure",
        "loader processes",
        "with replacement",
        "two optimizers",
        "GAN",
        "GAN, accumulated",
        "one batch",
        "max_steps",
    ],
)
def test_right_loops_of_one_process(tmp_path: Path, case: str) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    first, last = model[0].parameters(), model[2].parameters()
    optimizer: Any = torch.optim.SGD(first if case == "two optimizers" else model.parameters(), lr=0.01)
    generator = nn.Linear(3, 4)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
    others = [torch.optim.SGD(last, lr=0.01)] if case == "two optimizers" else []
    if case == "closure":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    # Loader processes are not forked: forking a process with gloo's threads can hang.
    extra: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "forkserver"} if "processes" in case else {}
    sampler = WeightedRandomSampler(torch.rand(40).tolist(), 40) if case == "with replacement" else RandomSampler(data)
    size = 40 if case == "one batch" else 4
    loader: Any = DataLoader(data, size, sampler=None if case == "one batch" else sampler, **extra)
    held_out = DataLoader(data, size)
    scaler = torch.amp.GradScaler("cpu", enabled="Scaler" in case, init_scale=2.0**127.9)  # overflows
    audit = Audit(model, optimizer, loader, tmp_path, None if "GAN" in case else 2, loss=square_error)
    for epoch in range(6 if case == "one batch" else 2):
        for number, batch in enumerate(loader):
            if case == "max_steps" and (epoch, number) == (1, 6):
                break

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = square_error(model, batch)
                scaler.scale(loss).backward()
                return loss

            if case == "closure":
                optimizer.step(closure)
                continue
            if case.startswith("GAN"):  # the model is the discriminator, and the generator's loss reaches it too
                if case == "GAN" or number % 2 == 0:
                    optimizer.zero_grad()
                square_error(model, batch).backward()
                made = generator(torch.randn(4, 3))
                model(made.detach()).mean().backward()
                if case == "GAN" or number % 2 == 1:
                    optimizer.step()
                    of_generator.zero_grad()
                    (-model(made).mean()).backward()
                    of_generator.step()
                continue
            closure()
            for one in (optimizer, *others):
                scaler.step(one)
            scaler.update()
            for other in others:
                other.zero_grad()
            if case == "loader processes" and number == 3:
                model.eval()
                with torch.no_grad():
                    for one in held_out:
                        square_error(model, one)
                model.train()
    assert audit.finish() == []
    skipped = json.loads((tmp_path / "ledger.json").read_text())["epochs"][0]["discarded"]
    assert (skipped > 0) == (case == "GradScaler skips steps")


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


def test_a_loss_that_is_not_divided_is_named_with_a_grad_scaler_and_clipping(tmp_path: Path) -> None:
    for scale, clip in ((1.0, 1e-3), (2.0**16, 1e9)):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        audit = Audit(model, optimizer, loader, tmp_path, gradient_step=2, loss=square_error)
        for number, batch in enumerate(loader, start=1):
            scaler.scale(square_error(model, batch)).backward()
            if number % 2 == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        (finding,) = audit.finish()
        assert finding.name == "not divided"
        assert "is 2 times" in finding.seen


def test_a_loss_that_is_a_sum(tmp_path: Path) -> None:
    """Causes that fit are those of one process that accumulates nothing."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), batch_size=4, shuffle=True)
    audit = Audit(model, optimizer, loader, tmp_path, gradient_step=2, loss=square_error)
    for batch in loader:
        nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    (finding,) = audit.finish()
    assert (finding.name, len(finding.fits)) == ("too large", 2)
    assert "sums over samples" in finding.fits[0]


def test_a_loop_that_skips_a_batch(tmp_path: Path) -> None:
    """This may be on purpose: what was seen is said, with causes that fit."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(42, 4), torch.randn(42, 1)), batch_size=4, shuffle=True)
    audit = Audit(model, optimizer, loader, tmp_path)
    for batch in itertools.chain(loader, loader):
        if len(batch[0]) == 4:
            square_error(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = audit.finish()
    assert finding.name == "left early"
    assert "1 batch of epoch 0" in finding.seen


def test_samples_that_are_no_indices(tmp_path: Path) -> None:
    """As of a sampler that yields an index and a size."""

    class Sized(torch.utils.data.Sampler[tuple[int, int]]):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            return iter([(one, 4) for one in torch.randperm(40).tolist()])

        def __len__(self) -> int:
            return 40

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, key: tuple[int, int]) -> Any:
            number, size = key
            return torch.full((size,), number / 40), torch.ones(1)

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Data(), batch_size=4, sampler=Sized())
    audit = Audit(model, optimizer, loader, tmp_path, gradient_step=2, loss=square_error)
    trained(model, optimizer, loader)
    assert audit.finish() == []


def test_set_epoch_after_each_epoch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    for late in (False, True):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        audit = Audit(model, optimizer, loader, tmp_path)
        for epoch in range(3):
            if not late:
                sampler.set_epoch(epoch)
            for batch in loader:
                square_error(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            if late:
                sampler.set_epoch(epoch)
        assert [one.name for one in audit.finish()] == ["epoch set late"] * late


def test_a_model_is_copied_and_saved_without_the_audit(tmp_path: Path) -> None:
    """As for best weights, and averages: the copy has no part of the loader, and its forward passes do not count."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    loader.no_copy = (one for one in ())  # type: ignore[attr-defined]  # as an iterator of persistent workers
    audit = Audit(model, optimizer, loader, tmp_path, gradient_step=2, loss=square_error)
    for batch in loader:
        square_error(model, batch).backward()
        best = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        for one in (best, torch.load(tmp_path / "model.pt", weights_only=False)):
            square_error(one, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert audit.finish() == []
    assert (tmp_path / "model.pt").stat().st_size < 20_000


def test_loaders_that_cannot_be_followed() -> None:
    class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(())

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for loader in ([1, 2], DataLoader(Endless()), DataLoader(TensorDataset(torch.ones(2)), batch_size=None)):
        with pytest.raises(UserError, match="Audit"):
            Audit(model, optimizer, loader)
