"""The optimizer step: one worker's share of one global batch, forward, backward, update and synchronisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.clip_grad import clip_grad_norm_  # torch_xla replaces the other name's, if it comes later

from runner.data.loader import FILLER
from runner.data.recipe import Batch, label_counts
from runner.kernels.unpadded import known_places
from runner.plan.experiment import unmeasured_noise
from runner.plan.order import DataOrder
from runner.plan.steps import Step
from runner.sync import StepFacts
from runner.train.noise import GradientNoise, squared_norm
from runner.train.optim import LearningRate
from runner.train.replica import Replica
from runner.train.sharding import full
from runner.train.throughput import PhaseTimer, StepLoss
from runner.train.tokens import Tokens, tokens_of

#: A micro-batch on the device, with the rows of the training table that it has.
MicroBatch = tuple[np.ndarray, Batch]


@dataclass(frozen=True)
class StepDone:
    """The result of an optimizer step on this worker.

    `samples`: the ids that it trained on. `skipped`: by the fp16 scaler. `synchronised`: whether all workers have the
    same weights after it. `shapes`: of the tensors of its last micro-batch.
    """

    t: int
    loss: StepLoss
    samples: np.ndarray
    tokens: Tokens
    skipped: bool
    synchronised: bool
    shapes: Mapping[str, torch.Size]


class TrainStep:
    """Trains a replica on one global batch after the other, together with the other workers."""

    def __init__(self, replica: Replica, order: DataOrder, timer: PhaseTimer) -> None:
        self._replica, self._order, self._timer = replica, order, timer
        config, plan, prepared, backend = replica.config, replica.plan, replica.prepared, replica.backend
        self.scaler = replica.precision.scaler()
        self.learning_rate = LearningRate(plan, config.schedule)
        self._counts = label_counts(prepared.train)
        self._lengths = np.asarray(prepared.train.column("length"))
        self._padded = replica.recipe.computes_padding or prepared.compiles
        self._parameters = replica.trained
        self._dropout = replica.dropout
        measured = unmeasured_noise(config, plan, backend.device.type) is None
        every_steps = config.noise.every_steps if measured else None
        self.noise = GradientNoise(every_steps, backend, float(self._counts.mean()))

    def run(self, done: int, step: Step, ids: list[np.ndarray], micro_batches: Iterator[MicroBatch]) -> StepDone:
        """Train on this worker's share of one global batch, after `done` optimizer steps. A collective.

        The host does not wait for the device here, unless a sync policy or the fp16 scaler needs a value. What happens
        before the last backward pass has ended can be undone, if memory is too little.
        """
        replica, timer = self._replica, self._timer
        policy, backend, optimizer = replica.policy, replica.backend, replica.optimizer
        samples_seen = replica.plan.samples_before(done)
        lr = self.learning_rate.apply(optimizer, samples_seen)
        facts = self._facts(done, step, ids, lr)
        divisor = policy.loss_divisor(facts)
        losses: list[torch.Tensor] = []
        step_count = torch.zeros((), dtype=torch.int64, device=backend.device)
        gradient_norm, applied, skipped = None, False, False
        trained: list[np.ndarray] = []
        tokens = Tokens()
        own_gradient = None

        timer.begin("data")
        for number, (rows, batch) in enumerate(micro_batches):
            timer.begin("forward")
            if number > 0:
                backend.mark_step()
            trained.append(rows[rows != FILLER])
            tokens += tokens_of(batch, rows, self._lengths, self._padded)
            with policy.backward_pass(facts, number):
                dropout = self._dropout(done, rows, backend.device)
                with backend.forward_pass(), replica.precision.autocast(), dropout, known_places(batch):
                    loss_sum, count = replica.recipe.loss(policy.forward_model, batch)
                timer.begin("backward")
                policy.before_backward()
                self.scaler.scale(loss_sum / backend.scalar(divisor, loss_sum.dtype)).backward()
            if facts.compares_gradients and number == 0 and facts.micro_batches > 1:
                own_gradient = squared_norm(self._parameters)
            losses.append(loss_sum.detach())
            step_count += count
            timer.begin("data")
        timer.begin("communication")
        step_loss = policy.loss_sum(facts, losses, self._parameters[0].dtype)
        if policy.before_optimizer_step(facts):
            timer.begin("optimizer")
            scale = self.scaler.get_scale() if facts.compares_gradients else 1.0
            gradient_norm, skipped = self._update(facts.compares_gradients)
            applied = not skipped
            if facts.compares_gradients:
                assert gradient_norm is not None
                own_gradient = policy.own_gradient() if own_gradient is None else own_gradient
                self._compare_gradients(facts, trained[0], divisor / scale, own_gradient, gradient_norm)
        optimizer.zero_grad(set_to_none=True)
        backend.mark_step()

        timer.begin("communication")
        synchronised = policy.after_step(facts)
        if synchronised and self.scaler.is_enabled() and not replica.config.sync.always_synchronous:
            # Each worker's scaler has adapted to its own gradients: continue with the smallest loss scale of all.
            self.scaler.update(min(backend.all_gather_object(self.scaler.get_scale())))
        timer.begin("other")
        loss = StepLoss(
            step=done + 1,
            loss_sum=step_loss,
            counted=step_count,
            planned=facts.global_count,
            lr=lr,
            samples=step.samples,
            samples_seen=samples_seen + step.samples,
            gradient_norm=gradient_norm,
            applied=applied,
        )
        shapes = {name: tensor.shape for name, tensor in batch.items()}
        return StepDone(step.t, loss, np.concatenate(trained), tokens, skipped, synchronised, shapes)

    def _facts(self, done: int, step: Step, ids: list[np.ndarray], lr: float) -> StepFacts:
        local_count = int(self._counts[np.concatenate(ids)].sum())
        global_count = int(self._counts[self._order.ids(self._order.epoch, step.start, step.stop)].sum())
        compares = self._replica.policy.averages_gradients and self.noise.is_due(done)
        return StepFacts(done, step.samples, len(ids), local_count, global_count, lr, compares)

    def _update(self, needs_norm: bool) -> tuple[torch.Tensor | None, bool]:
        """Clip gradients, step the optimizer and update the loss scale.

        Returns the norm of the gradients before clipping, if they are clipped or it is needed, and whether the fp16
        scaler skipped the step.
        """
        optimizer, clip_norm = self._replica.optimizer, self._replica.config.optimizer.clip_norm
        self.scaler.unscale_(optimizer)
        norm = None
        if clip_norm is not None:
            norm = full(clip_grad_norm_(self._parameters, clip_norm))
        elif needs_norm:
            norm = squared_norm(self._parameters).sqrt()
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        self.scaler.step(optimizer)
        self.scaler.update()
        return norm, self.scaler.is_enabled() and not self.scaler.get_scale() >= scale > 0

    def _compare_gradients(
        self, facts: StepFacts, rows: np.ndarray, divisor: float, own: torch.Tensor | None, global_norm: torch.Tensor
    ) -> None:
        """Note the noise of the gradient. `own`: |g|² of the loss terms of `rows` ÷ `divisor`."""
        terms = int(self._counts[rows].sum())
        # Micro-batches can have become smaller for lack of memory; those of sorted lengths are no samples of the batch.
        sorted_part = facts.micro_batches > 1 and self._replica.config.batch.length_sorted
        if own is None or sorted_part:
            own, terms = torch.zeros((), dtype=torch.float64), 0
        mean = own * (divisor / max(terms, 1)) ** 2
        self.noise.add(mean, terms, len(rows), global_norm.double().square(), facts.samples)
