"""Recipes that go wrong or are slow in a worker, each in one way.

What a recipe changes outside itself it changes in the process of a worker, which ends with the run.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recipes.synthetic.acceptability import GrammarCorpus
from recipes.tasks.classification import Corpus, LabelledText, SequenceClassification
from runner.data.recipe import Batch, Prepared
from runner.errors import UserError
from runner.plan import order
from runner.train.checkpoint import saved_folders
from tests import processes

#: Seconds of a sleep: in a step (several times what the tiny model takes), in an all-reduce, and outside of steps.
STEP_S, LINK_S, ONCE_S = 0.06, 0.03, 3.0


def faulty(name: str) -> list[str]:
    """The overrides that choose a recipe of this module."""
    return [f"recipe._target_=tests.faulty_recipes.{name}", "trusted_packages=[recipes,tests]"]


@dataclass(frozen=True)
class RaisesOnRank1(SequenceClassification):
    """Fails in the middle of training, while rank 0 waits in a collective."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if os.environ["RANK"] == "1":
            raise RuntimeError("broken on purpose")
        return super().loss(model, batch)


@dataclass(frozen=True)
class RaisesUserError(SequenceClassification):
    """A user's mistake that is found only when the model is built."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        raise UserError("recipe.model=x is invalid: refused on purpose")


@dataclass(frozen=True)
class RepeatsRow(SequenceClassification):
    """Its table returns row 0 for row 1, as a broken file or loader might."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        fetch = type(prepared.train).__getitem__

        class Repeating(type(prepared.train)):  # type: ignore[misc]
            def __getitem__(self, rows: Any) -> Any:
                return fetch(self, [0 if row == 1 else row for row in rows])

        object.__setattr__(prepared, "train", Repeating(prepared.train.folder))
        return super().build_model(prepared)


@dataclass(frozen=True)
class Miscounts(SequenceClassification):
    """Counts one loss term too many in every micro-batch."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(model, batch)
        return loss_sum, count + 1


@dataclass(frozen=True)
class BlocksSummary(SequenceClassification):
    """Leaves a folder where the parent writes `summary.json`, so that writing fails as it would on a full disk."""

    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        super().save(model, prepared, folder)
        (folder.parent / "summary.json" / "in the way").mkdir(parents=True)


@dataclass(frozen=True)
class Overflows(SequenceClassification):
    """Gradients beyond fp16 at any loss scale, and finite in fp32."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(model, batch)
        return 1e12 * loss_sum, count


@dataclass(frozen=True)
class LastGradientInfinite(SequenceClassification):
    """In the step of at most four samples, which is the last of an epoch: the loss is finite, its gradient is not."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(model, batch)
        if len(batch["labels"]) <= 4:
            loss_sum = loss_sum + (loss_sum - loss_sum.detach()).abs().sqrt()
        return loss_sum, count


@dataclass(frozen=True)
class LossInTrainingOnly(SequenceClassification):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if not model.training:
            raise RuntimeError("no loss outside of training")
        return super().loss(model, batch)


#: A file in the current folder that names a folder, for the two recipes below.
DISK = "disk.txt"


@dataclass(frozen=True)
class HarmsFolder(SequenceClassification):
    """Calls `harm(folder)` when worker 0 comes to its eighth micro-batch of training."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        calls = vars(self).setdefault("calls", [])
        calls.extend([len(batch)] if model.training else [])
        if len(calls) == 8 and os.environ["RANK"] == "0":
            self.harm(Path(Path(DISK).read_text()))
        return super().loss(model, batch)

    def harm(self, folder: Path) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class FillsDisk(HarmsFolder):
    """Leaves no byte on the folder's file system once two checkpoints, which are written beside training, are there."""

    def harm(self, folder: Path) -> None:
        processes.wait_until(lambda: len(saved_folders(folder / "run")) == 2, "no two checkpoints")
        fill(folder)


@dataclass(frozen=True)
class RemovesFolder(HarmsFolder):
    def harm(self, folder: Path) -> None:
        shutil.rmtree(folder.rename(folder.with_name("gone")))  # at once: others write into it


def fill(disk: Path) -> None:
    with (disk / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@dataclass(frozen=True)
class NotSharded(SequenceClassification):
    """Every worker reads all samples."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        order.deal = lambda ids, world_size, rank: ids
        return super().build_model(prepared)


@dataclass(frozen=True)
class SlowLoss(SequenceClassification):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        time.sleep(STEP_S)
        return super().loss(model, batch)


@dataclass(frozen=True)
class SlowCollate(SequenceClassification):
    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        time.sleep(STEP_S)
        return super().collate(rows, prepared, length)


@dataclass(frozen=True)
class SlowOptimizer(SequenceClassification):
    def build_model(self, prepared: Prepared) -> nn.Module:
        register_optimizer_step_pre_hook(lambda *_: time.sleep(STEP_S))
        return super().build_model(prepared)


@dataclass(frozen=True)
class SlowAllReduce(SequenceClassification):
    """Averages of gradients are available later than they could be."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        init = DistributedDataParallel.__init__

        def delayed(future):  # type: ignore[no-untyped-def]  # as for the hook
            time.sleep(LINK_S)
            return future.value()

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that it cannot resolve
            return allreduce_hook(state, bucket).then(delayed)

        def init_slow(self: DistributedDataParallel, *arguments: Any, **settings: Any) -> None:
            init(self, *arguments, **settings)
            self.register_comm_hook(None, hook)

        DistributedDataParallel.__init__ = init_slow  # type: ignore[method-assign]
        return super().build_model(prepared)


@dataclass(frozen=True)
class SlowStart(SequenceClassification):
    """Slow before the first step, and in evaluations."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        time.sleep(ONCE_S)
        return super().build_model(prepared)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        time.sleep(ONCE_S)
        return super().predict(model, batch)


@dataclass(frozen=True)
class UnevenCorpus(GrammarCorpus):
    """Every fourth sentence is repeated four times."""

    def read(self) -> Corpus:
        corpus = super().read()
        return Corpus(_uneven(corpus.train), _uneven(corpus.eval), corpus.source)


def _uneven(part: LabelledText) -> LabelledText:
    texts = [text if number % 4 else " ".join([text] * 4) for number, text in enumerate(part.texts)]
    return LabelledText(texts, part.labels)


@dataclass(frozen=True)
class WithNotes(SequenceClassification):
    @property
    def notes(self) -> Sequence[str]:
        return ["weights of [x] are random", "timing only"]


#: MiB that `NeedsMemory` reserves for each sample of a micro-batch.
SAMPLE_MIB = 256


class _ReservesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, samples: int) -> Tensor:
        ctx.samples = samples
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _reserve(ctx.samples)
        return gradient, None


def _reserve(samples: int) -> None:
    torch.empty(samples, SAMPLE_MIB * 2**18)


@dataclass(frozen=True)
class NeedsMemory(SequenceClassification):
    """A forward or backward pass that takes much memory for each sample, on workers that have a limit.

    `free_mib`: that a worker may still have when it has built the model. `killed_above`: samples of a micro-batch that
    get a worker killed, as by a system without memory, once the run in the folder `little` has a checkpoint.
    """

    free_mib: int | None = None
    in_backward: bool = False
    killed_above: int | None = None

    def build_model(self, prepared: Prepared) -> nn.Module:
        model = super().build_model(prepared)
        if self.free_mib is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + self.free_mib * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        samples = len(batch["input_ids"])
        if self.killed_above is not None and samples > self.killed_above and saved_folders(Path("little")):
            os.kill(os.getpid(), signal.SIGKILL)
        loss_sum, count = super().loss(model, batch)
        if self.in_backward:
            return _ReservesInBackward.apply(loss_sum, samples), count
        _reserve(samples)
        return loss_sum, count
