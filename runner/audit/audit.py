"""Follow a training loop by hooks: which samples each optimizer step saw, at which learning rate, on every process."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from runner.audit.findings import Finding, GradientCheck, ProcessRecord, StepRecord, find
from runner.errors import UserError
from runner.folder.files import strict_json

#: The loss of one batch as the model's own, of transformers' models.
Loss = Callable[[nn.Module, Any], Tensor]


class Audit:
    """Follows one training loop, in each of its processes.

    A forward pass in training mode takes one batch; an optimizer step ends with the batches since the one before. So it
    fits loops that call the model once for each batch: plain torch, Accelerate, and Trainer, whose `TrainerCallback`
    gets model, optimizer and loader in `on_train_begin`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        loader: Any,
        folder: str | Path = "audit",
        gradient_step: int | None = None,
        loss: Loss | None = None,
    ) -> None:
        """Start to follow. Raises UserError for a loader that does not know its samples.

        `folder`: for `ledger.json`, `steps.jsonl` and `findings.json`, written by the first process. `gradient_step`:
        the number of an optimizer step, from 1, whose gradient is compared with that of all its samples in one batch;
        it takes another forward and backward pass of every process. `loss`: the mean loss of a collated batch; by
        default `model(**batch).loss`.
        """
        self._model, self._folder = model, Path(folder)
        self._loader, self._gradient_step = _data_loader(loader), gradient_step
        self._loss = loss or _own_loss
        self._sampler = _RecordingSampler(self._loader.batch_sampler)
        # DataLoader forbids to assign it; its iterators read it from here.
        self._loader.__dict__["batch_sampler"] = self._sampler
        self._optimizer: Optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wraps it
        self._ids: list[tuple[int, list[int]]] = []
        self._steps: list[StepRecord] = []
        self._gradient: GradientCheck | None = None
        self._checking = False
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            self._optimizer.register_step_pre_hook(self._before_step),
        ]

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module.training and not self._checking and self._sampler.given:
            self._ids.append(self._sampler.given.popleft())

    def _before_step(self, optimizer: Optimizer, arguments: Any, settings: Any) -> None:
        number = len(self._steps) + 1
        epoch = self._ids[0][0] if self._ids else self._sampler.epoch
        ids = [one for _, batch in self._ids for one in batch]
        if number == self._gradient_step:
            self._gradient = self._check_gradient(ids)
        lr = float(optimizer.param_groups[0]["lr"])
        self._steps.append(StepRecord(number, epoch, lr, len(self._ids), tuple(ids)))
        self._ids = []

    def _check_gradient(self, ids: list[int]) -> GradientCheck:
        """Compare the gradient that the optimizer is about to use with that of all processes' samples in one batch."""
        everyone = sorted(one for part in _gathered(ids) for one in part)
        module = getattr(self._model, "module", self._model)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        used = [None if one.grad is None else one.grad.detach().clone() for one in trained]
        collate: Any = self._loader.collate_fn
        device = trained[0].device
        batch = _on(device, collate([self._loader.dataset[one] for one in everyone]))
        self._checking = True
        try:
            with torch.enable_grad():
                gradients = torch.autograd.grad(self._loss(module, batch), trained, allow_unused=True)
        finally:
            self._checking = False
        pairs = [(a, b) for a, b in zip(used, gradients, strict=True) if a is not None and b is not None]
        dot, whole, rest = (
            sum(float(term) for term in terms)
            for terms in zip(
                *(((a * b).sum(), (b * b).sum(), ((a - b) ** 2).sum()) for a, b in pairs),
                strict=True,
            )
        )
        drops = any(isinstance(one, nn.Dropout) and one.p > 0 for one in module.modules())
        return GradientCheck(len(self._steps) + 1, dot / whole, (rest / whole) ** 0.5, drops)

    def finish(self) -> list[Finding]:
        """What is wrong, the worst first; writes the folder and prints it on the first process. A collective."""
        for hook in self._hooks:
            hook.remove()
        self._loader.__dict__["batch_sampler"] = self._sampler.followed
        own = ProcessRecord(tuple(self._steps), _checksum(self._model), self._gradient)
        records = _gathered(own)
        found = find(records, len(self._loader.dataset))  # type: ignore[arg-type]  # it was checked to have a size
        if not (dist.is_initialized() and dist.get_rank()):
            self._write(records, found)
            for one in found.findings:
                print(f"audit: {one.sentence}")
            if not found.findings:
                print(f"audit: nothing wrong in {len(self._steps):,} steps")
        return list(found.findings)

    def _write(self, records: list[ProcessRecord], found: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "steps.jsonl").open("w", encoding="utf-8") as file:
            for rank, record in enumerate(records):
                for step in record.steps:
                    file.write(json.dumps({"process": rank, **dataclasses.asdict(step)}) + "\n")
        content: Mapping[str, Any] = {
            "ledger.json": {"epochs": [dataclasses.asdict(one) for one in found.epochs]},
            "findings.json": [dataclasses.asdict(one) for one in found.findings],
        }
        for name, one in content.items():
            (self._folder / name).write_text(strict_json(one, indent=1), encoding="utf-8")


@dataclass
class _RecordingSampler:
    """Passes on what a batch sampler yields, and remembers it. `given`: epoch and ids of batches not yet trained on."""

    followed: Any

    def __post_init__(self) -> None:
        self.epoch = -1
        self.given: deque[tuple[int, list[int]]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        epoch = self.epoch
        self.given = deque(one for one in self.given if one[0] == epoch)  # batches of an epoch that was left early
        for ids in self.followed:
            self.given.append((epoch, [int(one) for one in ids]))
            yield ids

    def __len__(self) -> int:
        return len(self.followed)

    def __getattr__(self, name: str) -> Any:
        if name == "followed":  # while it is copied
            raise AttributeError(name)
        return getattr(self.followed, name)


def _data_loader(loader: Any) -> DataLoader[Any]:
    """The DataLoader that batches come from; Accelerate's has one inside."""
    inner = getattr(loader, "base_dataloader", loader)
    kind = type(loader).__name__
    if not isinstance(inner, DataLoader):
        raise UserError(f"Audit needs a torch DataLoader, and {kind} is none")
    if kind == "DataLoaderDispatcher" or isinstance(inner.dataset, IterableDataset):
        raise UserError(f"Audit cannot follow {kind}: its process does not know which samples it gets")
    if not isinstance(inner.batch_sampler, BatchSampler) and not hasattr(inner.batch_sampler, "__iter__"):
        raise UserError("Audit needs a DataLoader that makes batches (batch_size or batch_sampler)")
    return inner


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _on(device: torch.device, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: _on(device, one) for name, one in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_on(device, one) for one in batch)
    return batch.to(device) if isinstance(batch, Tensor) else copy.copy(batch)


def _gathered(value: Any) -> list[Any]:
    """The values of all processes, in the order of their ranks. A collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _checksum(model: nn.Module) -> str:
    """Equal for equal weights."""
    module = getattr(model, "module", model)
    sums = [one.detach().double().sum().item() for one in module.parameters()]
    return json.dumps([float(one).hex() for one in sums])
