"""The training loop of one worker."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.clip_grad import clip_grad_norm_  # torch_xla replaces the other name's, if it comes later
from torch.optim import Optimizer

from runner.backends import Backend
from runner.backends.memory import enough_for, is_out_of_memory
from runner.config.choices import LedgerMode
from runner.config.schema import Config
from runner.data.layout import layout
from runner.data.loader import FILLER, batches
from runner.data.recipe import Batch, Prepared, Recipe, label_counts
from runner.data.unpadded import known_places
from runner.errors import OutOfMemory, Preempted, first_line
from runner.exact import DropoutStreams
from runner.folder.record import SmallerMicroBatches
from runner.log import LOG
from runner.plan import Plan
from runner.plan.checks import unmeasured_noise
from runner.plan.order import DataOrder
from runner.plan.steps import Step
from runner.sync import StepFacts, SyncPolicy
from runner.sync.telemetry import SyncStats
from runner.train.adapter import changing_state, load_changing_state
from runner.train.checkpoint import Checkpoints, restored
from runner.train.compilation import CompilationWatch, compiled_by_torch
from runner.train.early_stopping import BestTracker
from runner.train.evaluate import Predictor
from runner.train.finite import FiniteNumbers
from runner.train.ledger import Ledger, LedgerError
from runner.train.noise import GradientNoise, squared_norm
from runner.train.optim import LearningRate
from runner.train.precision import Precision
from runner.train.seeds import random_state, restore_random_state
from runner.train.sharding import ShardedModel, full
from runner.train.throughput import Meter, StepLoss, StepRecord
from runner.train.tokens import Tokens, tokens_of

#: Called on rank 0 with (optimizer step, metrics).
LogMetrics = Callable[[int, dict[str, float]], None]

#: A mistake in the data repeats in every step: the ledger lists the first ones only.
_MAX_FAILURES = 10

#: The parts of a loop that save and restore their own state; the model and the optimizer are saved besides.
_STATEFUL = ("scaler", "order", "policy", "ledger", "meter", "noise", "finite", "best")


class Loop:
    """Trains one replica. All workers run the same loop in lockstep; the data order and the backend know the rank."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        recipe: Recipe,
        prepared: Prepared,
        model: nn.Module,
        optimizer: Optimizer,
        policy: SyncPolicy,
        backend: Backend,
        precision: Precision,
        dropout: DropoutStreams,
        log: LogMetrics,
    ) -> None:
        """`model` is on the device already, and compiled if requested; `optimizer` and `policy` were built for it."""
        self.config, self.plan, self.recipe, self.prepared = config, plan, recipe, prepared
        self.model, self.policy, self.backend, self.precision = model, policy, backend, precision
        self._dropout, self._log = dropout, log
        self.optimizer = optimizer
        self.scaler = precision.scaler()
        self.learning_rate = LearningRate(plan, config.schedule)
        self._lengths = lengths = np.asarray(prepared.train.column("length"))
        self._padded = self.recipe.computes_padding or self.prepared.compiles
        self.order = DataOrder(plan, config.seed, backend.rank, lengths if config.batch.length_sorted else None)
        buckets = config.device.length_buckets
        self._layout = layout(lengths, plan.micro_batch, buckets, backend.compiles)
        self.ledger = Ledger(prepared.train.groups())
        compilations = compiled_by_torch() if config.compile else backend.compilations
        self.meter = Meter(backend, compilations)
        self.finite = FiniteNumbers(config, backend)
        self.tokens = Tokens()
        self.compilations = CompilationWatch(compilations)
        #: The synchronisations that ended a local phase, as logged; on rank 0 only.
        self.synchronisations: list[dict[str, float | None]] = []
        keeps_weights = config.evaluation.keep_best and (backend.rank == 0 or policy.collective_forward)
        self.best = BestTracker(config.evaluation, keeps_weights)
        self.optimizer_step = 0
        self.eval_metrics: dict[str, float] = {}
        #: Called with the progress of an evaluation, in micro-batches: (done, total).
        self.eval_progress: Callable[[int, int], None] | None = None
        #: Called on rank 0 with the metrics by row of the weights that would be saved.
        self.keep_rows: Callable[[dict[str, Tensor]], None] | None = None
        #: The latest step: whether all workers have the same weights after it, this worker's samples, and whether the
        #: fp16 scaler skipped it.
        self.synchronised = True
        self.last_samples = np.zeros(0, dtype=np.int64)
        self.last_skipped = False
        #: When the first step ended, and the seconds of compilation until then.
        self.first_step_at: float | None = None
        self.first_step_compile_s: float | None = None
        self._counts = label_counts(prepared.train)
        measured = unmeasured_noise(config, plan, backend.device.type) is None
        every_steps = config.noise.every_steps if measured else None
        self.noise = GradientNoise(every_steps, backend, float(self._counts.mean()))
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = list(model.buffers())
        self._evaluation_due = self._evaluation_stopped = False
        self._evaluated_at: int | None = None
        self._stalled_before = 0.0
        self._finishing = False
        #: What must be the same when its state is loaded: tokens, layers and frozen weights.
        self.identity: Mapping[str, str] = {}
        #: When there was too little memory for the micro-batches.
        self.smaller_micro_batches: list[SmallerMicroBatches] = []
        #: Whether this worker has repeated the step with smaller ones, and what there was before its passes.
        self._repeated = False
        self._before_passes = self._retry_snapshot()
        #: Called after each optimizer step.
        self.on_step: Callable[[], None] | None = None
        #: The model as it was sharded; None if every worker has all weights.
        self.sharded: ShardedModel | None = None
        #: Saves the loop's state while it trains; None: nothing is saved.
        self.checkpoints: Checkpoints | None = None

    def train(self, until: int | None = None) -> None:
        """Train up to optimizer step `until` (default: the end of the plan), or until `evaluation.patience` ends it."""
        end = self.plan.optimizer_steps if until is None else min(until, self.plan.optimizer_steps)
        self.model.train()
        if self._evaluation_stopped:  # by the signal that ended the run before
            self._evaluate()
            if self._evaluation_stopped:
                raise Preempted(self.optimizer_step)
        while self.optimizer_step < end and not self.best.should_stop():
            for step, ids, micro_batches in self._epoch_steps(end - self.optimizer_step):
                try:
                    self._train_step(step, ids, micro_batches)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    self._halve_micro_batches(error)
                    continue  # with the same step
                self.order.advance()
                self._after_step()
                if self.best.should_stop():
                    break

    def finish(self) -> None:
        """Make all replicas equal, evaluate them, and close the ledger. A collective."""
        self._finishing = True
        self.meter.begin("communication")
        changed = self.policy.finish()
        self.flush()
        if changed or self._evaluated_at != self.optimizer_step:
            self._evaluate()
        self.close_ledger()
        self.finite.require_result(self.final_metrics, self.recipe.minimised)

    @property
    def final_metrics(self) -> dict[str, float]:
        """The metrics of the weights that are saved at the end."""
        return self.best.metrics if self.config.evaluation.keep_best else self.eval_metrics

    def close_ledger(self) -> None:
        """Close the ledger of an unfinished epoch. A collective. Raises LedgerError."""
        if self.order.t:
            self._close_epoch(self.order.epoch, self.order.t)

    def _epoch_steps(self, limit: int) -> Iterator[tuple[Step, list[np.ndarray], Iterator[tuple[np.ndarray, Batch]]]]:
        """The remaining steps of the current epoch, at most `limit`: each with its planned ids and its micro-batches.

        Ends earlier when micro-batches are to be smaller than these. A worker without samples runs one micro-batch of
        fillers; if forward passes are collectives, as many micro-batches as the others.
        """
        epoch, accumulation_steps = self.order.epoch, self.order.accumulation_steps
        steps = self.order.steps()[self.order.t :][:limit]
        shares = [self.order.micro_batches(epoch, step) for step in steps]
        for step, own in zip(steps, shares, strict=True):
            least = self.order.most_micro_batches(step) if self.policy.collective_forward else 1
            own += [np.zeros(0, dtype=np.int64)] * (least - len(own))
        planned = itertools.chain.from_iterable(shares)
        loader = batches(self.prepared.train, planned, self.recipe, self.prepared, self._layout)
        on_device = self.backend.feed(loader)
        for step, own in zip(steps, shares, strict=True):
            if self.order.accumulation_steps != accumulation_steps:
                return
            yield step, own, itertools.islice(on_device, len(own))

    def _train_step(self, step: Step, ids: list[np.ndarray], micro_batches: Iterator[tuple[np.ndarray, Batch]]) -> None:
        """One optimizer step: this worker's share of one global batch.

        The host does not wait for the device here, unless a sync policy or the fp16 scaler needs a value. What happens
        before the last backward pass has ended can be undone, if memory is too little.
        """
        policy, meter = self.policy, self.meter
        samples_seen = self.plan.samples_before(self.optimizer_step)
        lr = self.learning_rate.apply(self.optimizer, samples_seen)
        facts = self._step_facts(step, ids, lr)
        divisor = policy.loss_divisor(facts)
        losses: list[torch.Tensor] = []
        step_count = torch.zeros((), dtype=torch.int64, device=self.backend.device)
        gradient_norm, applied, skipped = None, False, False
        trained: list[np.ndarray] = []
        tokens = Tokens()
        own_gradient = None

        self._before_passes = self._retry_snapshot()
        meter.begin("data")
        for number, (rows, batch) in enumerate(micro_batches):
            meter.begin("forward")
            if number > 0:
                self.backend.mark_step()
            trained.append(rows[rows != FILLER])
            tokens += tokens_of(batch, rows, self._lengths, self._padded)
            with policy.backward_pass(facts, number):
                dropout = self._dropout(self.optimizer_step, rows, self.backend.device)
                with self.backend.forward_pass(), self.precision.autocast(), dropout, known_places(batch):
                    loss_sum, count = self.recipe.loss(policy.forward_model, batch)
                meter.begin("backward")
                policy.before_backward()
                self.scaler.scale(loss_sum / self.backend.scalar(divisor, loss_sum.dtype)).backward()
            if facts.compares_gradients and number == 0 and facts.micro_batches > 1:
                own_gradient = squared_norm(self._parameters)
            losses.append(loss_sum.detach())
            step_count += count
            meter.begin("data")
        self.tokens += tokens
        meter.begin("communication")
        step_loss = policy.loss_sum(facts, losses, self._parameters[0].dtype)
        if policy.before_optimizer_step(facts):
            meter.begin("optimizer")
            scale = self.scaler.get_scale() if facts.compares_gradients else 1.0
            gradient_norm, skipped = self._optimizer_step(facts.compares_gradients)
            applied = not skipped
            if facts.compares_gradients:
                assert gradient_norm is not None
                own_gradient = policy.own_gradient() if own_gradient is None else own_gradient
                self._compare_gradients(facts, trained[0], divisor / scale, own_gradient, gradient_norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.backend.mark_step()
        meter.begin("other")

        self.last_samples, self.last_skipped = np.concatenate(trained), skipped
        self.ledger.record(step.t, self.last_samples, skipped)
        meter.begin("communication")
        self.synchronised = policy.after_step(facts)
        self.optimizer_step += 1
        if self.synchronised and self.scaler.is_enabled() and not self.config.sync.always_synchronous:
            # Each worker's scaler has adapted to its own gradients: continue with the smallest loss scale of all.
            self.scaler.update(min(self.backend.all_gather_object(self.scaler.get_scale())))
        meter.begin("other")
        seen = samples_seen + step.samples
        loss = StepLoss(self.optimizer_step, step_loss, step_count, facts.global_count, lr, step.samples, seen)
        meter.add(dataclasses.replace(loss, gradient_norm=gradient_norm, applied=applied, repeated=self._repeated))
        self.compilations.after_step(self.optimizer_step, batch)
        self._repeated = False

    def _halve_micro_batches(self, error: Exception) -> None:
        """Undo what a step has done for which memory was too little, so that it can be repeated with smaller ones.

        Raises OutOfMemory if this worker cannot repeat it alone: nothing is smaller, the others wait for it, or weights
        or running statistics have changed already.
        """
        phase, (on_host, on_device, buffers) = self.meter.phase, self._before_passes
        size = -(-self.plan.replica_batch // self.order.accumulation_steps)
        step, rank = self.optimizer_step + 1, self.backend.rank
        what = f"step {step:,}: worker {rank} has too little memory for micro-batches of {size}"
        alone = phase in ("data", "forward") or (phase == "backward" and not self.policy.collective_backward)
        unchanged = self._retry_snapshot()[2] == buffers
        if not (self.order.can_cut_smaller and alone and unchanged) or self.policy.collective_forward:
            raise OutOfMemory(f"{what} ({first_line(error)})", self.order.accumulation_steps) from error
        self.optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(on_host)
        self.backend.restore_random_state(on_device)
        self._repeated = True
        self.order.accumulation_steps = min(2 * self.order.accumulation_steps, self.plan.replica_batch)
        LOG.warning(f"{what}: the step is repeated with smaller ones")

    def _retry_snapshot(self) -> tuple[torch.Tensor, torch.Tensor | int | None, list[int]]:
        """Random states of host and device, which can be restored, and the versions of buffers, which cannot."""
        return torch.get_rng_state(), self.backend.random_state(), [buffer._version for buffer in self._buffers]

    def _agree_on_micro_batches(self, records: Sequence[StepRecord]) -> None:
        """Some workers had to repeat a step with smaller micro-batches: all continue with these. A collective."""
        self.order.accumulation_steps = max(self.backend.all_gather_object(self.order.accumulation_steps))
        first = next(record.step for record in records if record.repeated)
        self.smaller_micro_batches.append(SmallerMicroBatches(first - 1, self.order.accumulation_steps))

    def _step_facts(self, step: Step, ids: list[np.ndarray], lr: float) -> StepFacts:
        local_count = int(self._counts[np.concatenate(ids)].sum())
        permutation = self.order.epoch_permutation(self.order.epoch)
        global_count = int(self._counts[permutation[step.start : step.stop]].sum())
        compares = self.policy.averages_gradients and self.noise.is_due(self.optimizer_step)
        return StepFacts(self.optimizer_step, step.samples, len(ids), local_count, global_count, lr, compares)

    def _compare_gradients(
        self, facts: StepFacts, rows: np.ndarray, divisor: float, own: torch.Tensor | None, global_norm: torch.Tensor
    ) -> None:
        """Note the noise of the gradient. `own`: |g|² of the loss terms of `rows` ÷ `divisor`."""
        terms = int(self._counts[rows].sum())
        # Micro-batches can have become smaller for lack of memory; those of sorted lengths are no samples of the batch.
        sorted_part = facts.micro_batches > 1 and self.config.batch.length_sorted
        if own is None or sorted_part:
            own, terms = torch.zeros((), dtype=torch.float64), 0
        mean = own * (divisor / max(terms, 1)) ** 2
        self.noise.add(mean, terms, len(rows), global_norm.double().square(), facts.samples)

    def _optimizer_step(self, needs_norm: bool) -> tuple[torch.Tensor | None, bool]:
        """Clip gradients, step the optimizer and update the loss scale.

        Returns the norm of the gradients before clipping, if they are clipped or it is needed, and whether the fp16
        scaler skipped the step.
        """
        self.scaler.unscale_(self.optimizer)
        norm = None
        if self.config.optimizer.clip_norm is not None:
            norm = full(clip_grad_norm_(self._parameters, self.config.optimizer.clip_norm))
        elif needs_norm:
            norm = squared_norm(self._parameters).sqrt()
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm, self.scaler.is_enabled() and not self.scaler.get_scale() >= scale > 0

    def _after_step(self) -> None:
        """Log, evaluate, close the epoch and save if this step is due for it."""
        if self.on_step is not None:
            self.on_step()
        if self.first_step_at is None:
            self.flush()
            self.first_step_at = time.time()
            compiled = self.compilations.total()
            self.first_step_compile_s = compiled.seconds if compiled is not None else None
        elif self.synchronised and self.meter.pending_steps >= self.config.log_every:
            self.flush(wait=not self.policy.overlaps)
        every = self.config.evaluation.every_steps
        if self.order.t == 0 if every is None else self.optimizer_step % every == 0:
            self._evaluation_due = True
        ended = self.optimizer_step == self.plan.optimizer_steps  # `finish` may still change the weights
        if self._evaluation_due and self.synchronised and not ended:
            self.flush()
            self._evaluate()
        if self.order.t == 0:
            self._close_epoch(self.order.epoch - 1, self.plan.steps_per_epoch)
        if self.checkpoints is not None:
            self.checkpoints.count(self.optimizer_step)
            if self.synchronised:
                self._save_if_due(self.checkpoints)

    def _save_if_due(self, checkpoints: Checkpoints) -> None:
        """Raises Preempted after the save that ends the run."""
        if not checkpoints.ending:
            checkpoints.agree(wait=not self.policy.overlaps)
        if checkpoints.due or checkpoints.ending:
            self.flush()  # which may make micro-batches smaller
            stalled = checkpoints.save(
                self.optimizer_step, self.state_dict, self.policy.replicated_keys, self.order.accumulation_steps
            )
            if self.backend.rank == 0:
                self._log(self.optimizer_step, {"checkpoint/stall_seconds": stalled})
        if checkpoints.ending:
            checkpoints.wait()
            raise Preempted(self.optimizer_step if checkpoints.warning() is None else None)

    def flush(self, wait: bool = True) -> None:
        """Reduce and log the losses of all steps since the previous flush. A collective.

        `wait`: if false, they may be logged by the next flush, so that no worker waits for another.
        """
        stats = self.policy.stats()
        records = self.meter.reduce(stats.backward_stall_seconds - self._stalled_before, wait)
        self._stalled_before = stats.backward_stall_seconds
        for record in records:
            if record.counted != record.planned:
                self._fail_ledger(
                    f"optimizer step {record.step}: the recipe counted {record.counted} loss terms where "
                    f"{record.planned} were planned"
                )
        if any(record.repeated for record in records):
            self._agree_on_micro_batches(records)
        noise = self.noise.reduce(wait)
        if noise and self.backend.rank == 0:
            self._log(self.optimizer_step, noise)
        self._log_synchronisations()
        if self.backend.rank == 0 and records:
            self._log_training(records, stats)
        self.finite.check(records)

    def _log_training(self, records: list[StepRecord], stats: SyncStats) -> None:
        for record in records:
            self._log(
                record.step,
                {"train/loss": record.loss, "train/lr": record.lr, "train/samples_seen": record.samples_seen},
            )
        compiled = self.compilations.total()
        known = {
            "train/samples_per_s": self.meter.samples_per_s or None,
            "comm/bytes": stats.bytes,
            "comm/seconds": stats.seconds,
            "comm/stall_seconds": stats.stall_seconds,
            "compile/count": compiled.count if compiled else None,
            "compile/seconds": compiled.seconds if compiled else None,
            **{f"step/{phase}_s": seconds for phase, seconds in self.meter.step_seconds.items()},
        }
        self._log(self.optimizer_step, _without_none(known))

    def _log_synchronisations(self) -> None:
        """Log the synchronisations that ended local phases, on rank 0."""
        records = self.policy.take_records()
        if self.backend.rank != 0:
            return
        for record in records:
            metrics = record.metrics()
            self.synchronisations.append(metrics)
            self._log(record.step, _without_none({f"sync/{name}": value for name, value in metrics.items()}))
            samples = self.plan.samples_before(record.step) - self.plan.samples_before(record.step - record.steps)
            if noise := self.noise.add_updates(record, samples):
                self._log(record.step, noise)

    @property
    def predictor(self) -> Predictor:
        """For the weights that the model has."""
        return Predictor(
            self.recipe,
            self.model,
            self.backend,
            self.precision,
            self.config.evaluation.micro_batch,
            self.config.device.length_buckets,
            self.policy.collective_forward,
            same_batches=self.plan.shards is not None,
        )

    def _evaluate(self) -> None:
        self.meter.pause()
        on_host, on_device = random_state(), self.backend.random_state()
        size = self.config.evaluation.micro_batch
        enough = enough_for(f"to evaluate {size} samples at a time", "a smaller evaluation.micro_batch")
        with self.policy.common_weights(), enough:
            self.finite.require_weights(self._parameters, self.optimizer_step)
            evaluated = self.predictor.evaluate(self.prepared, self.eval_progress, self._must_stop_evaluation)
            if evaluated is not None:
                self.eval_metrics, predictions = evaluated
                best = self.best.update(self.optimizer_step, self.eval_metrics, self.model)
                if self.keep_rows is not None and (best or not self.config.evaluation.keep_best):
                    self.keep_rows(self.recipe.row_metrics(predictions, self.prepared.eval))
        restore_random_state(on_host)  # the number of evaluations must not change training
        self.backend.restore_random_state(on_device)
        self.compilations.after_evaluation()
        self._evaluation_stopped = evaluated is None
        if evaluated is not None:
            self._evaluation_due = False
            self._evaluated_at = self.optimizer_step
            if self.backend.rank == 0:
                self._log(self.optimizer_step, {f"eval/{name}": value for name, value in self.eval_metrics.items()})
        elif self.checkpoints is not None:
            self.checkpoints.ending = True  # as all workers know now
        self.meter.resume()

    def _must_stop_evaluation(self) -> bool:
        """Called before each micro-batch: whether to save and end, as asked for. The last evaluation is finished."""
        self.meter.progress("evaluation")
        stop = self.checkpoints is not None and self.checkpoints.preempted() and not self._finishing
        if self.policy.collective_forward:  # no worker can go on alone
            stop = self.backend.start_host_sum([stop], async_op=False)() != [0.0]
        return stop

    def _close_epoch(self, epoch: int, steps_done: int) -> None:
        self.flush()
        self.meter.pause()
        record = self.ledger.close_epoch(epoch, steps_done, self.order, self.backend)
        self.meter.resume()
        if not record.sound:
            self._fail_ledger(
                f"epoch {epoch}: of {record.expected} planned samples {record.missing} were missing, "
                f"{record.duplicated} were duplicated and {record.misplaced} were in another step"
            )

    def _fail_ledger(self, sentence: str) -> None:
        """Note a mismatch with the plan, on all workers. With ledger=fail it is a collective and raises LedgerError."""
        if len(self.ledger.failures) < _MAX_FAILURES:
            self.ledger.failures.append(sentence)
        if self.config.ledger is LedgerMode.fail:
            order, whole = self.order, self.plan.steps_per_epoch
            epoch, done = (order.epoch, order.t) if order.t else (order.epoch - 1, whole)
            if len(self.ledger.epochs) == epoch:  # still open: its samples explain why a count is wrong
                self.ledger.close_epoch(epoch, done, order, self.backend)
            raise LedgerError(f"{sentence} (set ledger=warn to continue nevertheless)")

    def state_dict(self) -> dict[str, Any]:
        """All state of this worker: a loop that loads it continues bit for bit. A collective.

        Tensors are those of the loop, on its device: copy them before training goes on.
        """
        self.flush()
        tensors, parameters = changing_state(self.model), dict(self.model.named_parameters(remove_duplicate=False))
        return {
            "model": {name: tensor for name, tensor in tensors.items() if name in parameters},
            # Running statistics differ between workers.
            "buffers": {name: tensor for name, tensor in tensors.items() if name not in parameters},
            "optimizer": self.optimizer.state_dict()["state"],
            **{name: getattr(self, name).state_dict() for name in _STATEFUL},
            "optimizer_step": self.optimizer_step,
            "synchronisations": self.synchronisations,
            "smaller_micro_batches": [dataclasses.astuple(one) for one in self.smaller_micro_batches],
            "evaluation": (self._evaluation_due, self._evaluation_stopped, self._evaluated_at, self.eval_metrics),
            "tokens": dataclasses.astuple(self.tokens),
            "random": random_state(),
            "device_random": self.backend.random_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`state`: of a loop with the same plan. A part that is None or empty in it starts anew."""
        weights = changing_state(self.model)
        load_changing_state(self.model, restored({**state["model"], **state["buffers"]}, weights))
        groups = self.optimizer.state_dict()["param_groups"]  # the settings are the configuration's
        self.optimizer.load_state_dict({"state": self._optimizer_state(state["optimizer"]), "param_groups": groups})
        best = state["best"]
        if best["weights"] is not None and self.best.keeps_weights:
            on_cpu = {name: torch.empty_like(tensor, device="cpu") for name, tensor in weights.items()}
            state = {**state, "best": {**best, "weights": restored(best["weights"], on_cpu)}}
        for name in _STATEFUL:
            if state.get(name):  # that of the scaler is empty in any precision but fp16, and older ones have no noise
                getattr(self, name).load_state_dict(state[name])
        self._stalled_before = self.policy.stats().backward_stall_seconds
        self.optimizer_step = state["optimizer_step"]
        self.synchronisations = list(state["synchronisations"])
        self.smaller_micro_batches = [SmallerMicroBatches(*one) for one in state.get("smaller_micro_batches", ())]
        self._evaluation_due, self._evaluation_stopped, self._evaluated_at, self.eval_metrics = state["evaluation"]
        self.tokens = Tokens(*state["tokens"])
        if state["random"] is not None:
            restore_random_state(state["random"])
            self.backend.restore_random_state(state["device_random"])

    def _optimizer_state(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """A saved state of the optimizer, by the numbers of its parameters, sharded where these are."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        saved = {(number, name): value for number, own in state.items() for name, value in own.items()}
        tensors = {key: value for key, value in saved.items() if value is not None}
        saved |= restored(tensors, {key: parameters[key[0]] for key in tensors})
        return {number: {name: saved[number, name] for name in own} for number, own in state.items()}


def _without_none(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}
