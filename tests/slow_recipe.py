"""Recipes whose runs are slow for one reason each, in real workers.

What a recipe changes outside itself it changes in the process of a worker, which ends with the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recipes.synthetic.acceptability import GrammarCorpus
from recipes.tasks.classification import Corpus, LabelledText, SequenceClassification
from runner.backends.torch_distributed import TorchBackend
from runner.data.recipe import Batch, Prepared
from runner.folder import metrics_log
from runner.plan import order
from runner.sync import synchronous

#: Of a sleep in a step: several times what the tiny model takes for one.
SECONDS = 0.06
#: Of one in an evaluation, and of one before or after training: long beside a start-up on a busy machine.
EVALUATION_SECONDS, ONCE_SECONDS = 1.0, 8.0


@dataclass(frozen=True)
class OneThread(SequenceClassification):
    """Models this small take ten times as long when two threads share their steps on a busy machine."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        torch.set_num_threads(1)
        return super().build_model(prepared)


@dataclass(frozen=True)
class SlowModel(OneThread):
    """There is nothing in a step that stands beside the forward pass."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        time.sleep(SECONDS)
        return super().loss(model, batch)


@dataclass(frozen=True)
class NotDealtOut(OneThread):
    """Every worker goes over a loader that nobody has sharded."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        order.deal = lambda ids, world_size, rank: ids
        return super().build_model(prepared)


@dataclass(frozen=True)
class SameShare(OneThread):
    """Every worker reads the share of the first."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        order.deal = lambda ids, world_size, rank: ids[::world_size]
        return super().build_model(prepared)


@dataclass(frozen=True)
class SlowCollate(OneThread):
    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        time.sleep(SECONDS)
        return super().collate(rows, prepared, length)


@dataclass(frozen=True)
class SlowEvaluation(OneThread):
    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        time.sleep(EVALUATION_SECONDS)
        return super().predict(model, batch)


@dataclass(frozen=True)
class SlowOptimizer(OneThread):
    def build_model(self, prepared: Prepared) -> nn.Module:
        register_optimizer_step_pre_hook(lambda *_: time.sleep(SECONDS))
        return super().build_model(prepared)


@dataclass(frozen=True)
class SlowDisk(OneThread):
    """Every value that is logged takes its time."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        dumps = metrics_log.json.dumps

        def slow(value: Any) -> str:
            time.sleep(SECONDS)
            return dumps(value)

        metrics_log.json = SimpleNamespace(dumps=slow)
        return super().build_model(prepared)


@dataclass(frozen=True)
class SlowLink(OneThread):
    """An average of gradients or of weights arrives later than it could."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        start = TorchBackend.start_all_reduce

        def late(future):  # type: ignore[no-untyped-def]  # as for the hook
            time.sleep(SECONDS)
            return future.value()

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that it cannot resolve
            return allreduce_hook(state, bucket).then(late)

        class SlowDDP(DistributedDataParallel):
            def __init__(self, *args: Any, **settings: Any) -> None:
                super().__init__(*args, **settings)
                self.register_comm_hook(None, hook)

        def start_all_reduce(self: TorchBackend, tensors: Sequence[Tensor], async_op: bool) -> Callable[[], Any]:
            finish = start(self, tensors, async_op)

            def wait() -> float | None:
                time.sleep(SECONDS)
                return finish()

            return wait

        synchronous.DistributedDataParallel = SlowDDP
        TorchBackend.start_all_reduce = start_all_reduce
        return super().build_model(prepared)


@dataclass(frozen=True)
class UnevenCorpus(GrammarCorpus):
    """Every fourth sentence is said four times over."""

    def read(self) -> Corpus:
        corpus = super().read()
        return Corpus(_uneven(corpus.train), _uneven(corpus.eval), corpus.source)


def _uneven(part: LabelledText) -> LabelledText:
    texts = [text if number % 4 else " ".join([text] * 4) for number, text in enumerate(part.texts)]
    return LabelledText(texts, part.labels)


@dataclass(frozen=True)
class SlowStart(OneThread):
    def build_model(self, prepared: Prepared) -> nn.Module:
        time.sleep(ONCE_SECONDS)
        return super().build_model(prepared)


@dataclass(frozen=True)
class SlowEnd(OneThread):
    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        time.sleep(ONCE_SECONDS)
        super().save(model, prepared, folder)


@dataclass(frozen=True)
class Noted(OneThread):
    """Has something to say about itself."""

    @property
    def notes(self) -> Sequence[str]:
        return ["weights of [x] are random", "timing only"]
