"""Follow a training loop by hooks: which samples each optimizer step saw, at which learning rate, on every process."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from runner.errors import UserError, printable
from runner.folder.files import strict_json
from runner.tools.audit.findings import find
from runner.tools.audit.gradients import GradientRecorder, Loss
from runner.tools.audit.loader import RecordingSampler, data_loader, fingerprint
from runner.tools.audit.records import Batch, Finding, GradientCheck, ProcessRecord, StepRecord
from runner.tools.audit.sample_findings import EpochCoverage
from runner.tools.audit.schedulers import Schedulers


@dataclasses.dataclass(frozen=True)
class _Forward:
    """A forward pass with gradients. `scheduled`: how often the scheduler had been stepped."""

    batch: Batch
    evaluating: bool
    scheduled: int


class _Hook:
    """Follows a module. Its copy, in a copied or saved model, follows nothing: it would take loader and data along."""

    def __init__(self, follow: Callable[[nn.Module, Any], None] | None = None) -> None:
        self._follow = follow

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._follow is not None:
            self._follow(module, inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class Audit:
    """Follows one training loop, in each of its processes.

    A forward pass with gradients takes one batch; an optimizer step ends with the batches since the one before. So it
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
        it takes three more forward and backward passes in every process. `loss`: the mean loss of a collated batch; by
        default `model(**batch).loss`.
        """
        self._sharded = _is_sharded(model)
        if gradient_step is not None and self._sharded:
            raise UserError("Audit cannot compare the gradients of a model that is sharded: leave out gradient_step")
        # Also called without its wrapper, and after DDP has broadcast the buffers.
        self._wrapped = isinstance(model, DistributedDataParallel)
        self._model: nn.Module = model.module if self._wrapped else model  # type: ignore[assignment]
        self._folder, self._gradient_step, self._loss = Path(folder), gradient_step, loss or _own_loss
        self._loader = data_loader(loader)
        self._sampler = RecordingSampler(self._loader.batch_sampler)
        # DataLoader forbids to assign it; its iterators read it from here.
        self._loader.__dict__["batch_sampler"] = self._sampler
        self._optimizer: Optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wraps it
        self._schedulers: Schedulers | None = None
        self._steps: list[StepRecord] = []
        self._forwards: list[_Forward] = []
        self._discarded: list[Batch] = []
        self._backward_of: int | None = None  # how many forward passes of the step the latest backward pass follows
        self._evaluating = self._checking = False
        self._buffers: dict[str, Tensor] = {}
        self._used: Tensor | None = None
        self._check: GradientCheck | None = None
        self._started: dict[str, str] = {}
        self._hooks = [
            self._model.register_forward_pre_hook(_Hook(self._before_forward)),
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        self._follow_gradients()

    def _follow_gradients(self) -> None:
        """Look at each gradient before and after it is accumulated."""
        trained = [] if self._sharded else [pair for pair in self._model.named_parameters() if pair[1].requires_grad]
        own = _identities(self._optimizer)
        inside = [one for _, one in trained if id(one) in own]
        self._gradients = GradientRecorder(inside, self._gradient_step)
        self._reached: set[str] = set()
        places = {id(one): number for number, one in enumerate(inside)}
        for name, one in trained:
            self._hooks.append(one.register_hook(self._before_gradient))
            self._hooks.append(one.register_post_accumulate_grad_hook(self._gradient_hook(name, places.get(id(one)))))

    def _before_gradient(self, gradient: Tensor) -> None:
        if not self._checking:
            self._begin_backward()

    def _gradient_hook(self, name: str, number: int | None) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if number is None:
                self._reached.add(name)
            else:
                self._gradients.accumulated(number)

        return hook

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._checking:
            return
        self._sampler.evaluated += not module.training
        if not torch.is_grad_enabled():
            return
        if not self._forwards:
            self._buffers = _sums((name, one) for name, one in module.named_buffers() if one.is_floating_point())
        self._evaluating = not module.training  # a batch is trained on all the same if a backward pass follows
        if module.training:
            self._take()

    def _take(self) -> None:
        """Note that the next batch of the loader is trained on."""
        if self._schedulers is None:  # now all is there, and DDP has broadcast the weights
            self._schedulers = Schedulers(self._optimizer)
            self._started = {} if self._sharded else _hex(_sums(self._model.named_parameters()))
        if self._sampler.yielded:
            self._forwards.append(_Forward(self._sampler.take(), self._evaluating, self._schedulers.stepped()))
        self._evaluating = False

    def _begin_backward(self) -> None:
        """Note a backward pass when its first gradient comes, and which batches were discarded before it."""
        if self._evaluating:
            self._take()
        before, batches = self._backward_of, len(self._forwards)
        if batches in (0, before):  # 0: of something else than a batch, as the generator's loss
            return
        if before:
            old, new = self._forwards[before - 1].batch[0], self._forwards[-1].batch[0]
            if self._gradients.cleared(exactly=old != new):
                self._discarded += [one.batch for one in self._forwards[:before]]
                self._forwards = self._forwards[before:]
                self._gradients.forget()
                batches -= before
        self._backward_of = batches
        self._gradients.begin_pass()

    def _before_step(self, optimizer: Optimizer, arguments: Any, settings: Any) -> None:
        closure = any(arguments[1:]) or bool(settings.get("closure"))  # its gradients come later
        if closure or not self._gradients.follows:
            return
        # Of a GradScaler, which lets a fused optimizer divide by it.
        scale = getattr(optimizer, "grad_scale", None)
        self._used = self._gradients.held() / (1.0 if scale is None else float(scale))
        if len(self._steps) + 1 == self._gradient_step:
            own = [one.batch for one in self._forwards]
            everyone = sorted(one for part in _gathered([ids for _, ids in own]) for ids in part for one in ids)
            if own:
                self._checking = True  # forward and backward passes are the audit's own
                try:
                    self._check = self._gradients.check(self._model, self._loss, own, everyone, self._batch_of)
                finally:
                    self._checking = False

    def _batch_of(self, ids: Sequence[int]) -> Any:
        collate: Any = self._loader.collate_fn
        return collate([self._loader.dataset[one] for one in ids])

    def _after_step(self, optimizer: Optimizer, arguments: Any, settings: Any) -> None:
        self._gradients.end_step(self._used)
        self._steps.append(
            StepRecord(
                len(self._steps) + 1,
                tuple(float(group["lr"]) for group in optimizer.param_groups),
                tuple(one.batch for one in self._forwards),
                tuple(self._discarded),
                sum(one.evaluating for one in self._forwards),
                (*(one.scheduled for one in self._forwards), self._schedulers.stepped() if self._schedulers else 0),
            )
        )
        self._forwards, self._discarded, self._backward_of, self._used = [], [], None, None

    def _record(self) -> ProcessRecord:
        parameters = () if self._sharded else tuple(self._model.named_parameters())
        ended, own, names = _hex(_sums(parameters)), _identities(self._optimizer), {id(one) for _, one in parameters}
        first = [ids for step in self._steps[:1] for _, ids in step.batches]
        # Else it is not known how to read the data set.
        indexed = all(isinstance(one, int) for ids in first for one in ids)
        return ProcessRecord(
            steps=tuple(self._steps),
            sampler=self._sampler.facts(),
            samples=len(self._loader.dataset),  # type: ignore[arg-type]  # it was checked to have a size
            data=fingerprint(self._loader.dataset) if dist.is_initialized() and indexed else None,
            left_over=(*self._discarded, *(one.batch for one in self._forwards)),
            schedules=() if self._schedulers is None else self._schedulers.facts(),
            started=self._started,
            ended=ended,
            buffers=_hex(self._buffers),
            outside=tuple(
                name
                for name, one in parameters
                if name in self._reached and id(one) not in own and ended[name] == self._started.get(name)
            ),
            foreign=0 if self._sharded else len(own - names),
            gradients=tuple(self._gradients.recorded),
            check=self._check,
            wrapped=self._wrapped,
        )

    def finish(self) -> list[Finding]:
        """Return what is wrong, the worst first; writes the folder and prints it on the first process. A collective."""
        for hook in self._hooks:
            hook.remove()
        self._loader.__dict__["batch_sampler"] = self._sampler.followed
        records = _gathered(self._record())
        # A DDP wrapper must not outlive its process group.
        del self._model, self._optimizer, self._loader, self._gradients, self._schedulers
        findings, epochs = find(records)
        if not (dist.is_initialized() and dist.get_rank()):
            self._write(records, findings, epochs)
            sentences = [one.sentence for one in findings] or [f"nothing wrong in {len(self._steps):,} steps"]
            sys.stdout.write(printable("".join(f"audit: {one}\n" for one in sentences)))
        return findings

    def _write(self, records: list[ProcessRecord], findings: list[Finding], epochs: list[EpochCoverage]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "steps.jsonl").open("w", encoding="utf-8") as file:
            for rank, record in enumerate(records):
                for step in record.steps:
                    file.write(json.dumps({"process": rank, "lr": step.lrs[0], **dataclasses.asdict(step)}) + "\n")
        content: Mapping[str, Any] = {
            "ledger.json": {"epochs": [dataclasses.asdict(one) for one in epochs]},
            "findings.json": [{**dataclasses.asdict(one), "sentence": one.sentence} for one in findings],
        }
        for name, one in content.items():
            (self._folder / name).write_text(strict_json(one, indent=1), encoding="utf-8")


def _is_sharded(model: nn.Module) -> bool:
    """Return whether each process has only a part of the weights: FSDP."""
    kinds = (type(one).__name__ for one in model.modules())
    return "FullyShardedDataParallel" in kinds or any(hasattr(one, "device_mesh") for one in model.parameters())


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _gathered(value: Any) -> list[Any]:
    """The values of all processes, in the order of their ranks. A collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _identities(optimizer: Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


def _sums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Checksums: equal for equal tensors."""
    made = ((name, one) for name, one in tensors if not is_lazy(one))
    return {name: one.detach().double().sum() for name, one in made}


def _hex(sums: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: float(one).hex() for name, one in sums.items()}
