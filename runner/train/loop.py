"""The training loop of one worker."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from runner.backends.memory import is_out_of_memory
from runner.config.choices import LedgerMode
from runner.data.layout import layout
from runner.data.loader import batches
from runner.errors import Preempted
from runner.folder.record import SmallerMicroBatches
from runner.plan.order import DataOrder, sample_seeds
from runner.plan.steps import Step
from runner.train.adapter import changing_state, load_changing_state
from runner.train.checkpoint import State, restored
from runner.train.compilation import CompilationWatch, compiled_by_torch
from runner.train.evaluation import Evaluator
from runner.train.finite import FiniteNumbers
from runner.train.hooks import Hooks
from runner.train.ledger import Ledger, LedgerError
from runner.train.replica import Replica
from runner.train.retry import StepRetry
from runner.train.seeds import random_state, restore_random_state
from runner.train.step import MicroBatch, StepDone, TrainStep
from runner.train.throughput import Meter
from runner.train.tokens import Tokens
from runner.train.training_log import TrainingLog


class Loop:
    """Trains one replica. All workers run the same loop in lockstep; the data order and the backend know the rank."""

    def __init__(self, replica: Replica, hooks: Hooks, order: DataOrder) -> None:
        self.replica, self.plan, self.order = replica, replica.plan, order
        self.model, self.policy, self.backend = replica.model, replica.policy, replica.backend
        config, train = replica.config, replica.prepared.train
        compilations = compiled_by_torch() if config.compile else self.backend.compilations
        self.compilations = CompilationWatch(compilations)
        self.meter = Meter(self.backend, compilations, annotates=config.profile.steps is not None)
        self.step = TrainStep(replica, order, self.meter.timer)
        self.retry = StepRetry(replica, order, self.meter.timer)
        self.ledger = Ledger(train.groups())
        self.finite = FiniteNumbers(config, self.backend)
        self.log = TrainingLog(replica, hooks.log, self.meter, self.step.noise, self.compilations)
        self.evaluator = Evaluator(replica, hooks, self.log, self.meter, self.finite, self.compilations)
        self._hooks = hooks.after_step
        lengths, buckets = np.asarray(train.column("length")), config.device.length_buckets
        self._layout = layout(lengths, self.plan.micro_batch, buckets, self.backend.compiles)
        #: Optimizer steps done, and the latest of them.
        self.optimizer_step = 0
        self.latest: StepDone | None = None
        self.tokens = Tokens()

    def train(self, until: int | None = None) -> None:
        """Train up to optimizer step `until` (default: the end of the plan), or until `evaluation.patience` ends it."""
        end = self.plan.optimizer_steps if until is None else min(until, self.plan.optimizer_steps)
        self.model.train()
        if self.evaluation_stopped:  # by the signal that ended the run before
            self.evaluator.run(self.optimizer_step)
            if self.evaluation_stopped:
                raise Preempted(self.optimizer_step)
        best = self.evaluator.best
        while self.optimizer_step < end and not best.should_stop():
            for step, ids, micro_batches in self._epoch_steps(end - self.optimizer_step):
                self.retry.before_step()
                try:
                    done = self.step.run(self.optimizer_step, step, ids, micro_batches)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    self.retry.halve_micro_batches(error, self.optimizer_step + 1)
                    continue  # with the same step
                self._record(done)
                self._after_step()
                if best.should_stop():
                    break

    def finish(self) -> None:
        """Make all replicas equal, evaluate them, and close the ledger. A collective."""
        self.meter.timer.begin("communication")
        changed = self.policy.finish()
        self.flush()
        self.evaluator.finish(self.optimizer_step, changed)
        self.close_ledger()
        self.finite.require_result(self.evaluator.final_metrics, self.replica.recipe.minimised)

    def _epoch_steps(self, limit: int) -> Iterator[tuple[Step, list[np.ndarray], Iterator[MicroBatch]]]:
        """The remaining steps of the current epoch, at most `limit`: each with its planned ids and its micro-batches.

        Ends earlier when micro-batches are to be smaller than these. A worker without samples runs one micro-batch of
        fillers; if forward passes are collectives, as many micro-batches as the others.
        """
        order, replica = self.order, self.replica
        accumulation_steps = order.accumulation_steps
        shares, ahead = itertools.tee(self._shares(order.epoch, order.t, min(order.t + limit, order.steps_per_epoch)))
        planned = itertools.chain.from_iterable(micro_batches for _, micro_batches in ahead)
        seeds = sample_seeds(replica.config.seed, order.epoch)
        loader = batches(replica.prepared.train, planned, replica.recipe, replica.prepared, self._layout, seeds)
        on_device = self.backend.feed(loader)
        for step, own in shares:
            if order.accumulation_steps != accumulation_steps:
                return
            yield step, own, itertools.islice(on_device, len(own))

    def _shares(self, epoch: int, start: int, stop: int) -> Iterator[tuple[Step, list[np.ndarray]]]:
        """Steps `start` to `stop` of an epoch with this worker's micro-batches, laid out when they are needed."""
        for step in map(self.order.step, range(start, stop)):
            own = self.order.micro_batches(epoch, step)
            least = self.order.most_micro_batches(step) if self.policy.collective_forward else 1
            yield step, own + [np.zeros(0, dtype=np.int64)] * (least - len(own))

    def _record(self, done: StepDone) -> None:
        """Take in what a step did."""
        trained = self.ledger.record(self.order.epoch, done.t, done.samples, done.skipped)
        self.tokens += done.tokens
        self.meter.add(dataclasses.replace(done.loss, repeated=self.retry.succeeded(), also=trained))
        self.compilations.after_step(done.loss.step, done.shapes)
        self.optimizer_step, self.latest = done.loss.step, done
        self.order.advance()

    def _after_step(self) -> None:
        """Log, evaluate, close the epoch and save, where it is due after this step."""
        self.log.after_step(self)
        self.evaluator.after_step(self)
        if self.order.t == 0:
            self._close_epoch()
        for hook in self._hooks:
            hook.after_step(self)

    def flush(self, wait: bool = True) -> None:
        """Reduce, check and log the losses of all steps since the previous flush. A collective. Raises LedgerError.

        `wait`: if false, they may be logged by the next flush, so that no worker waits for another.
        """
        records = self.log.reduce(wait)
        as_planned = self.ledger.check(records, self.order, self.backend)
        if not as_planned and self.replica.config.ledger is LedgerMode.fail:
            self.ledger.check(self.log.reduce(wait=True), self.order, self.backend)  # steps that were on their way
            self.ledger.close_epoch(self.order)
            raise LedgerError(f"{self.ledger.failures[0]} (set ledger=warn to continue nevertheless)")
        self.retry.agree(records)
        self.log.write_steps(self.optimizer_step, records, wait)
        self.finite.check(records)

    def close_ledger(self) -> None:
        """Close the ledger of an unfinished epoch. A collective. Raises LedgerError."""
        if self.order.t:
            self._close_epoch()

    def _close_epoch(self) -> None:
        self.flush()
        self.ledger.close_epoch(self.order)

    @property
    def synchronised(self) -> bool:
        """True if all workers have the same weights after the latest step."""
        return self.latest is None or self.latest.synchronised

    @property
    def evaluation_stopped(self) -> bool:
        """True if the evaluation that was due was stopped, because a worker was asked to save and end."""
        return self.evaluator.stopped

    @property
    def _parts(self) -> dict[str, Any]:
        """The parts that save and restore their own state; the model and the optimizer are saved besides."""
        return {
            "scaler": self.step.scaler,
            "order": self.order,
            "policy": self.policy,
            "ledger": self.ledger,
            "meter": self.meter,
            "noise": self.step.noise,
            "finite": self.finite,
            "best": self.evaluator.best,
        }

    def state_dict(self) -> State:
        """All state of this worker: a loop that loads it continues bit for bit. A collective.

        Tensors are those of the loop, on its device: copy them before training goes on.
        """
        self.flush()
        tensors, parameters = changing_state(self.model), dict(self.model.named_parameters(remove_duplicate=False))
        return {
            "model": {name: tensor for name, tensor in tensors.items() if name in parameters},
            # Running statistics differ between workers.
            "buffers": {name: tensor for name, tensor in tensors.items() if name not in parameters},
            "optimizer": self.replica.optimizer.state_dict()["state"],
            **{name: part.state_dict() for name, part in self._parts.items()},
            "optimizer_step": self.optimizer_step,
            "synchronisations": self.log.synchronisations,
            "smaller_micro_batches": [dataclasses.astuple(one) for one in self.retry.smaller_micro_batches],
            "evaluation": self.evaluator.state(),
            "tokens": dataclasses.astuple(self.tokens),
            "random": random_state(),
            "device_random": self.backend.random_state(),
        }

    def load_state_dict(self, state: State) -> None:
        """`state`: of a loop with the same plan. A part that is None or empty in it starts anew."""
        weights, optimizer, best = changing_state(self.model), self.replica.optimizer, self.evaluator.best
        load_changing_state(self.model, restored({**state["model"], **state["buffers"]}, weights))
        groups = optimizer.state_dict()["param_groups"]  # the settings are the configuration's
        optimizer.load_state_dict({"state": self._optimizer_state(state["optimizer"]), "param_groups": groups})
        if state["best"]["weights"] is not None and best.keeps_weights:
            on_cpu = {name: torch.empty_like(tensor, device="cpu") for name, tensor in weights.items()}
            state = {**state, "best": {**state["best"], "weights": restored(state["best"]["weights"], on_cpu)}}
        for name, part in self._parts.items():
            if state[name]:  # that of the scaler is empty in any precision but fp16
                part.load_state_dict(state[name])
        self.log.continue_from(state["synchronisations"])
        self.optimizer_step = state["optimizer_step"]
        smaller = [SmallerMicroBatches(*one) for one in state["smaller_micro_batches"]]
        self.retry.smaller_micro_batches[:] = smaller
        self.evaluator.load_state(state["evaluation"])
        self.tokens = Tokens(*state["tokens"])
        if state["random"] is not None:
            restore_random_state(state["random"])
            self.backend.restore_random_state(state["device_random"])

    def _optimizer_state(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """A saved state of the optimizer, by the numbers of its parameters, sharded where these are."""
        parameters = [p for group in self.replica.optimizer.param_groups for p in group["params"]]
        saved = {(number, name): value for number, own in state.items() for name, value in own.items()}
        tensors = {key: value for key, value in saved.items() if value is not None}
        saved |= restored(tensors, {key: parameters[key[0]] for key in tensors})
        return {number: {name: saved[number, name] for name in own} for number, own in state.items()}
