"""Follow a training loop by hooks: which samples each optimizer step saw, at which learning rate, on every process."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from runner.audit.findings import Finding, GradientCheck, ProcessRecord, StepRecord, find
from runner.errors import UserError, printable
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
        it takes two more forward and backward passes in every process. `loss`: the mean loss of a collated batch; by
        default `model(**batch).loss`.
        """
        if gradient_step is not None and _is_sharded(model):
            raise UserError("Audit cannot compare the gradients of a model that is sharded: leave out gradient_step")
        self._model, self._folder = model, Path(folder)
        self._loader, self._gradient_step = _data_loader(loader), gradient_step
        self._loss = loss or _own_loss
        self._sampler = _RecordingSampler(self._loader.batch_sampler)
        # DataLoader forbids to assign it; its iterators read it from here.
        self._loader.__dict__["batch_sampler"] = self._sampler
        self._optimizer: Optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wraps it
        self._batches: list[tuple[int, tuple[int, ...]]] = []
        self._steps: list[StepRecord] = []
        self._gradient: GradientCheck | None = None
        self._checking = False
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            self._optimizer.register_step_pre_hook(self._before_step),
        ]

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if module.training and not self._checking and self._sampler.given:
            self._batches.append(self._sampler.given.popleft())

    def _before_step(self, optimizer: Optimizer, arguments: Any, settings: Any) -> None:
        number = len(self._steps) + 1
        if number == self._gradient_step:
            self._gradient = self._check_gradient([one for _, ids in self._batches for one in ids])
        self._steps.append(StepRecord(number, float(optimizer.param_groups[0]["lr"]), tuple(self._batches)))
        self._batches = []

    def _check_gradient(self, ids: list[int]) -> GradientCheck | None:
        """Compare the gradient that the optimizer is about to use with that of all processes' samples in one batch."""
        everyone = sorted(one for part in _gathered(ids) for one in part)
        if not everyone:
            return None
        module = getattr(self._model, "module", self._model)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # Of a GradScaler, which lets a fused optimizer divide by it.
        scale = getattr(self._optimizer, "grad_scale", None)
        used = [None if one.grad is None else one.grad.detach() / (1.0 if scale is None else scale) for one in trained]
        collate: Any = self._loader.collate_fn
        batch = _on(trained[0].device, collate([self._loader.dataset[one] for one in everyone]))
        buffers = {name: one.detach().clone() for name, one in module.named_buffers()}
        self._checking = True
        try:
            with torch.random.fork_rng(), torch.enable_grad():
                pair = []
                for seed in (1, 2):  # equal without dropout
                    torch.manual_seed(seed)
                    pair.append(torch.autograd.grad(self._loss(module, batch), trained, allow_unused=True))
        finally:
            self._checking = False
            for name, one in module.named_buffers():
                one.data.copy_(buffers[name])
        scale, difference = _compared(used, pair[0])
        return GradientCheck(len(self._steps) + 1, scale, difference, _compared(pair[1], pair[0])[1])

    def finish(self) -> list[Finding]:
        """What is wrong, the worst first; writes the folder and prints it on the first process. A collective."""
        for hook in self._hooks:
            hook.remove()
        self._loader.__dict__["batch_sampler"] = self._sampler.followed
        weights = None if _is_sharded(self._model) else _checksum(self._model)
        records = _gathered(ProcessRecord(tuple(self._steps), weights, self._gradient, tuple(self._sampler.untrained)))
        samples = len(self._loader.dataset)  # type: ignore[arg-type]  # it was checked to have a size
        del self._model, self._optimizer, self._loader  # a DDP wrapper must not outlive its process group
        found = find(records, samples)
        if not (dist.is_initialized() and dist.get_rank()):
            self._write(records, found)
            sentences = [one.sentence for one in found.findings] or [f"nothing wrong in {len(self._steps):,} steps"]
            sys.stdout.write(printable("".join(f"audit: {one}\n" for one in sentences)))
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
    """Passes on what a batch sampler yields, and remembers it.

    `given`: epoch and ids of batches that are not trained on yet; `untrained`: epoch and number of those that never
    were.
    """

    followed: Any

    def __post_init__(self) -> None:
        self.epoch = -1
        self.given: deque[tuple[int, tuple[int, ...]]] = deque()
        self.untrained: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        if self.given:
            self.untrained.append((self.epoch, len(self.given)))
            self.given.clear()
        self.epoch += 1
        epoch = self.epoch
        for ids in self.followed:
            self.given.append((epoch, tuple(int(one) for one in ids)))
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


def _compared(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> tuple[float, float]:
    """How long a gradient is in the direction of another, and the rest of it, both relative to the other's length."""
    pairs = [(a.double(), b.double()) for a, b in zip(some, others, strict=True) if a is not None and b is not None]
    length = sum(float((b * b).sum()) for _, b in pairs)
    scale = sum(float((a * b).sum()) for a, b in pairs) / length
    rest = sum(float(((a - scale * b) ** 2).sum()) for a, b in pairs)
    return scale, (rest / length) ** 0.5 / abs(scale)


def _is_sharded(model: nn.Module) -> bool:
    """Whether each process has only a part of the weights: FSDP."""
    kinds = (type(one).__name__ for one in model.modules())
    return "FullyShardedDataParallel" in kinds or any(hasattr(one, "device_mesh") for one in model.parameters())


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
