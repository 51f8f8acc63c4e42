"""A model and its data as the loop gets them, with gradients, clipping and steps written out in plain torch."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Prepared
from runner.exact import exact_streams, standard_streams
from runner.plan.experiment import prepare
from runner.plan.order import permutation
from runner.train.seeds import set_seed
from tests.replicas import Weights, tiny_job

#: What references are held to: one optimizer without and one with second moments, and dropout that can be computed.
SGD = ["optimizer=sgd", "optimizer.lr=0.05"]
ADAMW = ["optimizer=adamw", "optimizer.lr=1e-3"]
EXACT = ["equivalence=exact", "recipe.model.dropout=0.1", "recipe.model.attention_dropout=0.1"]


def largest_difference(a: Weights, b: Weights) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Models this small take ten times as long when two threads share their steps on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def _loaded(*overrides: str) -> tuple[Any, Any, Prepared]:
    job = tiny_job(list(overrides), 1)
    recipe = prepare(job.config).recipe
    return job, recipe, Prepared.load(recipe.prepare(Cache(job.config.cache_dir), job.facts))


class Reference:
    """What one worker or many train: `overrides` say everything but how replicas are brought together."""

    def __init__(self, overrides: list[str]) -> None:
        job, self.recipe, self.prepared = _loaded(*overrides)
        self.config, self.plan = job.config, job.plan
        set_seed(self.config.seed)
        self.model = self.recipe.build_model(self.prepared).double()
        self._lengths = np.asarray(self.prepared.train.column("length"))

    def global_batches(self) -> list[np.ndarray]:
        size, plan = self.plan.global_batch, self.plan
        orders = [permutation(plan.samples_per_epoch, self.config.seed, epoch) for epoch in range(plan.epochs)]
        batches = [order[i : i + size] for order in orders for i in range(0, len(order), size)]
        return batches[: plan.optimizer_steps]

    def shares(self, ids: np.ndarray, workers: int) -> list[np.ndarray]:
        """A global batch sorted by length, every n-th sample a worker."""
        by_length = ids[np.argsort(self._lengths[ids], kind="stable")]
        return [by_length[rank::workers] for rank in range(workers)]

    def seen(self) -> list[int]:
        """Samples seen before each step, and after the last."""
        return [0, *np.cumsum([len(ids) for ids in self.global_batches()]).tolist()]

    def lrs(self) -> list[float]:
        """The learning rate of each step: warm-up, then constant or linear, by hand, at the samples seen before it."""
        *seen, total = self.seen()
        schedule, peak = self.config.schedule, self.plan.lr
        warmup = schedule.warmup_share * total
        falls = {"linear": True, "constant": False}[schedule.name.name]
        return [
            peak * s / warmup if s < warmup else peak * (total - s) / (total - warmup) if falls else peak for s in seen
        ]

    def warming_up(self) -> list[bool]:
        *seen, total = self.seen()
        return [s < self.config.schedule.warmup_share * total for s in seen]

    def replica(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, settings = copy.deepcopy(self.model), self.config.optimizer
        if settings.name.name == "sgd":
            return model, torch.optim.SGD(model.parameters(), momentum=settings.momentum)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        return model, torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)

    def gradient(self, model: nn.Module, ids: np.ndarray, t: int) -> tuple[Tensor, int]:
        """The flat gradient of the mean over the loss terms of these samples (0 without a term), and their number."""
        count, exact = 0, self.config.equivalence.mode.name == "exact"
        gradient = torch.zeros_like(parameters_to_vector(model.parameters()))
        if len(ids):
            batch = self.recipe.collate(self.prepared.train[ids.tolist()], self.prepared)
            count = int((batch["labels"] != IGNORED_LABEL).sum())
        if count:
            with (exact_streams(self.config.seed) if exact else standard_streams)(t, ids, torch.device("cpu")):
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=IGNORED_LABEL)
            gradient = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        return gradient.detach(), count

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, gradient: Tensor, lr: float) -> None:
        """Clip a flat gradient and make an optimizer step of it."""
        for group in optimizer.param_groups:
            group["lr"] = lr
        parameters = list(model.parameters())
        for p, own in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            p.grad = own.view_as(p).clone()
        if self.config.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.config.optimizer.clip_norm)
        optimizer.step()

    @one_thread()
    def evaluate(self, weights: Weights) -> dict[str, float]:
        """The recipe's metrics over the evaluation part, in one batch."""
        table, model = self.prepared.eval, copy.deepcopy(self.model).eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            batch = self.recipe.collate(table[list(range(len(table)))], self.prepared)
            metrics: dict[str, float] = self.recipe.metrics(self.recipe.predict(model, batch), table)
        return metrics

    def flat(self, weights: Weights) -> Tensor:
        """Weights as one vector."""
        return parameters_to_vector([weights[name] for name, _ in self.model.named_parameters()])


@one_thread()
def simulate_synchronous(overrides: list[str]) -> Weights:
    """One worker, step by step."""
    reference = Reference(overrides)
    model, optimizer = reference.replica()
    for t, (ids, lr) in enumerate(zip(reference.global_batches(), reference.lrs(), strict=True)):
        gradient, _ = reference.gradient(model, ids, t)
        reference.apply(model, optimizer, gradient, lr)
    return dict(model.state_dict())
