"""Training loops as people write them, right and wrong, for two workers: plain torch, Accelerate and Trainer.

Each runs with the audit; its name says what is wrong with it, or what is unusual and right.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, WeightedRandomSampler

from runner.audit import Audit, Finding

SAMPLES, EPOCHS, BATCH, ACCUMULATION, STEPS = 64, 2, 4, 2, 8

#: What a loop reports: its findings, and the epochs of its ledger.
Report = tuple[list[Finding], list[dict[str, int]]]


class Tiny(nn.Module):
    """A number for each of 6 tokens of 4 features. `loss` is what a dictionary of a batch has as in transformers."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(tokens)
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return self.last(self.dropout(hidden.tanh()))


def masked_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    tokens, values, mask = batch
    return ((model(tokens) - values).square().squeeze(-1) * mask).sum() / mask.sum()


def made_data(samples: int, uneven: bool = False) -> TensorDataset:
    """`uneven`: sentences have 1 to 6 tokens with a label."""
    random = torch.Generator().manual_seed(3)
    lengths = torch.arange(samples) ** 2 % 6 + 1 if uneven else torch.full((samples,), 6)
    tokens = torch.randn(samples, 6, 4, generator=random)
    values = tokens.sum(-1, keepdim=True) + torch.randn(samples, 6, 1, generator=random)
    return TensorDataset(tokens, values, torch.arange(6) < lengths[:, None])


class Picture:
    """As PIL's images: its repr has an address, in upper case."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def tobytes(self) -> bytes:
        return self.tokens.numpy().tobytes()

    def __repr__(self) -> str:
        return f"<Picture at 0x{id(self):X}>"


class Flipped(Dataset[Any]):
    """Augmented at random."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        tokens, values, mask = self._data[number]
        return (tokens.flip(0), values.flip(0), mask.flip(0)) if torch.rand(()) < 0.5 else (tokens, values, mask)


class Pictures(Dataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self._pictures, self._rest = [Picture(one) for one in data.tensors[0]], data.tensors[1:]

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, number: int) -> Any:
        return self._pictures[number], {"values": [one[number] for one in self._rest], "names": {"values", "mask"}}


def collated(samples: Sequence[Any]) -> list[Tensor]:
    pictures, rest = zip(*samples, strict=True)
    return [
        torch.stack([one.tokens for one in pictures]),
        *map(torch.stack, zip(*(one["values"] for one in rest), strict=True)),
    ]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR to 0": lambda one: lr_scheduler.LambdaLR(one, lambda step: max(0.0, 1 - step / STEPS)),
    "inverse square root": lambda one: lr_scheduler.LambdaLR(one, lambda step: (step + 1) ** -0.5),
    "linear to 30%": lambda one: lr_scheduler.LinearLR(one, 1.0, 0.3, total_iters=STEPS),
    "LinearLR as warm-up": lambda one: lr_scheduler.LinearLR(one, 0.1, total_iters=3),
    "ExponentialLR": lambda one: lr_scheduler.ExponentialLR(one, 0.95),
    "PolynomialLR": lambda one: lr_scheduler.PolynomialLR(one, STEPS, 2.0),
    "CosineAnnealingLR": lambda one: lr_scheduler.CosineAnnealingLR(one, STEPS),
    "CosineAnnealingWarmRestarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 3),
    "CyclicLR": lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.05, 2, cycle_momentum=False),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, 0.05, total_steps=STEPS),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(one, STEPS - 2)], [2]
    ),
    "ChainedScheduler": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(one, total_iters=2), lr_scheduler.ExponentialLR(one, 0.9)]
    ),
}


class Halves(torch.utils.data.Sampler[int]):
    """Each process's part of one seeded order, written by hand. `seed`, `part`: those of this process."""

    def __init__(self, seed: int, part: int) -> None:
        self._seed, self._part, self._epoch = seed, part, 0

    def __iter__(self) -> Iterator[int]:
        self._epoch += 1
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(100 * self._seed + self._epoch))
        return iter(order[self._part :: 2].tolist())

    def __len__(self) -> int:
        return SAMPLES // 2


def made_loader(case: str, data: Dataset[Any], rank: int) -> DataLoader[Any]:
    batch: dict[str, Any] = {"batch_size": BATCH, "drop_last": "drop_last" in case}
    if case.startswith("pictures"):
        batch["collate_fn"] = collated
    if case == "loader not sharded":
        return DataLoader(data, shuffle=True, **batch)
    if case == "data set sharded by hand":
        return DataLoader(data, shuffle=True, **batch)
    if case.startswith("weighted sampler"):
        drawn = torch.Generator().manual_seed(rank if "by rank" in case else 0)
        return DataLoader(data, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES // 2, generator=drawn), **batch)
    if case == "sampler by hand, seeded by rank":
        return DataLoader(data, sampler=Halves(rank, rank), **batch)
    if case == "sampler by hand, one part for all":
        return DataLoader(data, sampler=Halves(0, 0), **batch)
    if case == "sampler by hand":
        return DataLoader(data, sampler=Halves(0, rank), **batch)
    given = {
        "all ranks read rank 0's shard": {"rank": 0, "num_replicas": 2},
        "sampler seeded by rank": {"seed": rank},
        "drop_last without shuffling": {"shuffle": False},
        "no shuffling": {"shuffle": False},
        "num_replicas too large": {"rank": rank, "num_replicas": 4},
    }.get(case, {})
    sampler = DistributedSampler(data, drop_last="DistributedSampler(drop_last)" in case, **given)  # type: ignore[arg-type]
    return DataLoader(data, sampler=sampler, **batch)


def plain(case: str, rank: int, folder: Path) -> Report:
    """A loop of plain torch. Right as it stands; `case` changes it in one place."""
    by_rank = case == "different initial weights, averaged by hand" or case.endswith(", seeded by rank")
    torch.manual_seed(rank if by_rank and "sampler" not in case else 0)
    sizes = {"padding": 63, "drop_last with shuffling": 70, "drop_last without shuffling": 70, "discarded tail": 72}
    sizes |= {"DistributedSampler(drop_last)": 65, "tail is stepped": 72, "one epoch with drop_last": 70}
    accumulation = 1 if "accumulation 1" in case else ACCUMULATION
    uneven = "mean of means" in case or "divided by the global count" in case
    data: Any = made_data(sizes.get(case.split(",")[0], SAMPLES), uneven)
    if case == "data set sharded by hand":
        data = TensorDataset(*(one[rank::2] for one in data.tensors))
    if case == "data set shuffled by rank":
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(rank))
        data = TensorDataset(*(one[order] for one in data.tensors))
    if case == "augmented, seeded by rank":
        data = Flipped(data)
    if case.startswith("pictures"):
        data = Pictures(data)
    model: nn.Module = Tiny("BatchNorm" in case or "buffers" in case, 0.3 if "dropout" in case else 0.0)
    inner = model
    by_hand = case == "gradients of one layer not averaged" or (
        "by hand" in case and not any(one in case for one in ("sampler", "local", "rate", "data set"))
    )
    if case not in ("no DDP", "local SGD by hand") and not by_hand:
        model = DistributedDataParallel(model, forward_sync_buffers=case != "different buffers")
    if case == "weights changed on one rank":
        with torch.no_grad():
            inner.last.bias += rank
    trained = list(model.parameters())
    groups = [
        {"params": trained[:2]},
        {"params": trained[2:], "lr": 0.02 * (1 + (rank if "lr by rank" in case else 0))},
    ]
    if case == "parameters missing in the optimizer":
        groups = groups[1:]
    decay = 0.1 * rank if case == "weight decay by rank" else 0.0
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=decay)
    usual = "ExponentialLR" if "accumulation 1" in case or "tail" in case else "LambdaLR to 0"
    scheduler = SCHEDULES[case if case in SCHEDULES else usual](optimizer)
    if case in ("schedule too long", "schedule too short"):
        scheduler = lr_scheduler.PolynomialLR(optimizer, 2 * STEPS if "long" in case else STEPS // 2)
    if case == "T_max in epochs, stepped by batch":
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    if case in ("scheduler never stepped", "length in steps, stepped by epoch", "scheduler replaced"):
        schedulers = [lr_scheduler.CosineAnnealingLR(optimizer, STEPS) for _ in range(2 if "replaced" in case else 1)]
        scheduler = schedulers[-1]
    if case == "T_max in epochs, stepped by epoch":
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    loader = made_loader(case, data, rank)
    if case == "learning rate set by hand":
        scheduler = None
    checked = None if "augmented" in case else 3 if accumulation == 1 else 2
    audit = Audit(model, optimizer, loader, folder, checked, masked_loss)
    taken = 0
    for epoch in range(1 if case == "one epoch with drop_last" else EPOCHS):
        if case == "evaluation mode left on" and epoch:
            model.eval()
        else:
            model.train()
        if isinstance(loader.sampler, DistributedSampler) and case != "set_epoch forgotten":
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, start=1):
            first = case.startswith("steps at i % n == 0")
            tail = case == "tail is stepped" and number == len(loader)
            last = number % accumulation == (1 if first else 0) or tail
            quiet = not last or case == "no_sync always"
            with model.no_sync() if quiet and hasattr(model, "no_sync") else contextlib.nullcontext():
                loss = masked_loss(inner if case == "model.module is called" else model, batch)
                if case == "class weights":  # a mean weighted by something that the audit does not see
                    loss = loss * (1 + (batch[1].sum() > 0))
                if case == "another loss":
                    loss = loss + inner.first.weight.square().sum()
                if case == "accumulation 1, divided by the global count":
                    count, everywhere = batch[2].sum(), batch[2].sum()
                    dist.all_reduce(everywhere)
                    loss = loss * count * 2 / everywhere
                divided = 1 if case == "loss not divided" or tail else accumulation
                divided *= ACCUMULATION if case == "loss divided twice" else 1
                (loss / divided).backward()
            if case == "clipping per micro-batch":
                nn.utils.clip_grad_norm_(trained, 0.01)
            if case == "clipping by value per micro-batch":
                nn.utils.clip_grad_value_(trained, 0.01)
            if case == "scheduler per micro-batch" and not last:
                scheduler.step()
            if case == "zero_grad per micro-batch" and not last:
                optimizer.zero_grad()
            if not last:
                continue
            if by_hand:
                for one in trained[:2] if case.startswith("gradients of one layer") else trained:
                    dist.all_reduce(one.grad)
                    one.grad /= 1 if case.startswith("summed over processes") else 2
            if "clip" in case and "per micro-batch" not in case:
                clip = nn.utils.clip_grad_value_ if "value" in case else nn.utils.clip_grad_norm_
                clip(trained, 0.01)
            if case == "zero_grad before the step":
                optimizer.zero_grad()
            optimizer.step()
            if case == "local SGD by hand":
                for one in trained:
                    dist.all_reduce(one.data)
                    one.data /= 2
            if case != "scheduler never stepped" and "stepped by epoch" not in case:
                given = [0.1] if case == "ReduceLROnPlateau" else []
                for _ in range(2 if case == "scheduler per process" else 1):
                    if scheduler is not None:
                        scheduler.step(*given)
                if case == "learning rate set by hand":
                    taken += 1
                    for group in optimizer.param_groups:
                        group["lr"] = max(0.0, 0.05 * (1 - taken / 4))
            if case != "zero_grad forgotten":
                optimizer.zero_grad(set_to_none="zeros" not in case)
        if case in ("discarded tail", "discarded tail, zeros") or "discards" in case:
            optimizer.zero_grad(set_to_none="zeros" not in case)
        if "stepped by epoch" in case:
            scheduler.step()
        if case == "evaluates on the training loader":
            with torch.no_grad():
                model.eval()
                for batch in loader:
                    masked_loss(inner, batch)
    return reported(audit, folder)


def reported(audit: Audit, folder: Path) -> Report:
    found = audit.finish()
    dist.barrier()  # the first process has written
    return found, json.loads((folder / "ledger.json").read_text())["epochs"]


class Sentences(Dataset[dict[str, Tensor]]):
    """8 labelled tokens, or 1 to 8, as transformers' models take them."""

    def __init__(self, uneven: bool = False, seed: int = 0, samples: int = SAMPLES) -> None:
        self._uneven, self._seed, self._samples = uneven, seed, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = torch.randint(5, 50, (8,), generator=torch.Generator().manual_seed(1000 * self._seed + number))
        mask = (torch.arange(8) <= (number**2 % 7 if self._uneven else 8)).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask == 1, tokens % 3, -100)}


def bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForTokenClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForTokenClassification(BertConfig(vocab_size=50, num_labels=3, **sizes, **drop))


def accelerate(case: str, rank: int, folder: Path) -> Report:
    """A loop with Accelerate. Right as it stands; `case` changes it in one place."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from transformers import get_linear_schedule_with_warmup

    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, dataloader_config=config)
    torch.manual_seed(0)
    model = bert(0.1 if case == "Accelerate, dropout" else 0.0)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Sentences(case == "Accelerate, mean of means", rank if case == "Accelerate, data by rank" else 0)
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
    if case == "Accelerate, sharded twice":
        loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    # As on one process: Accelerate steps the schedule once per process.
    steps = STEPS if case == "Accelerate, schedule for one process" else STEPS * 2
    scheduler: Any = get_linear_schedule_with_warmup(optimizer, 1, steps)
    prepared, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    model = model if case == "Accelerate, model not prepared" else prepared
    loader = loader if case == "Accelerate, loader not prepared" else accelerator.prepare(loader)
    audit = Audit(model, optimizer, loader, folder, gradient_step=2)
    for _ in range(EPOCHS):
        model.train()
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(model(**batch).loss * (ACCUMULATION if case == "Accelerate, not divided" else 1))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return reported(audit, folder)


def trainer(case: str, rank: int, folder: Path) -> Report:
    """A loop by transformers' Trainer. `Trainer, padding`: 64 samples in batches of 5.

    Trainer leaves the division to models with `**kwargs`, and BERT's classifiers have them and do not divide.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    reports: list[Report] = []

    class AuditCallback(TrainerCallback):
        def on_train_begin(self, *given: Any, model: Any, optimizer: Any, train_dataloader: Any, **others: Any) -> None:
            self.audit = Audit(model, optimizer, train_dataloader, folder, gradient_step=2)

        def on_train_end(self, *given: Any, **others: Any) -> None:
            reports.append(reported(self.audit, folder))

    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=f"{folder}/trainer",
        per_device_train_batch_size=5 if case == "Trainer, padding" else BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        num_train_epochs=EPOCHS,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        lr_scheduler_type="cosine" if case == "Trainer, cosine" else "linear",
    )
    samples = 72 if "tail is stepped" in case else SAMPLES
    data = Sentences(uneven=case == "Trainer, different numbers of labels", samples=samples)
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"}
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, **drop, **ends)
    model = bert(0.0) if case == "Trainer, loss that is not divided" else GPT2LMHeadModel(config)
    Trainer(model, arguments, train_dataset=data, callbacks=[AuditCallback()]).train()
    return reports[0]


def run_all(backend: Any, cases: list[str], folder: str) -> dict[str, Report]:
    """The reports of all cases, in one process of several. What torchrun sets is set meanwhile."""
    rank, workers = str(backend.rank), str(backend.world_size)
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # the group exists; Accelerate wants them set
    os.environ.update(launched)
    reports = {}
    try:
        for number, case in enumerate(cases):
            loop = accelerate if case.startswith("Accelerate") else trainer if case.startswith("Trainer") else plain
            reports[case] = loop(case, backend.rank, Path(folder) / str(number))
    finally:
        for name in launched:
            del os.environ[name]
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return reports
