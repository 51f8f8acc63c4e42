"""Evaluates a replica while it trains."""

from __future__ import annotations

from typing import Any

from runner.backends.memory import enough_for
from runner.folder.evaluation_rows import MOST_ROWS
from runner.train.compilation import CompilationWatch
from runner.train.early_stopping import BestTracker
from runner.train.finite import FiniteNumbers
from runner.train.hooks import Hooks, LogMetrics, Training
from runner.train.replica import Replica
from runner.train.seeds import random_state, restore_random_state
from runner.train.throughput import Meter


class Evaluator:
    """Evaluates the common weights at the first synchronisation after an evaluation is due."""

    def __init__(
        self,
        replica: Replica,
        hooks: Hooks,
        log: LogMetrics,
        meter: Meter,
        finite: FiniteNumbers,
        compilations: CompilationWatch,
    ) -> None:
        self._replica, self._hooks, self._log = replica, hooks, log
        self._meter, self._finite, self._compilations = meter, finite, compilations
        config, policy = replica.config.evaluation, replica.policy
        self._keeps_best = config.keep_best
        keeps_weights = self._keeps_best and (replica.backend.rank == 0 or policy.collective_forward)
        self.best = BestTracker(config, keeps_weights)
        #: The latest evaluation's.
        self.metrics: dict[str, float] = {}
        #: An evaluation is due; the latest one was stopped because a worker was asked to save and end.
        self._due = self.stopped = False
        self._evaluated_at: int | None = None

    @property
    def final_metrics(self) -> dict[str, float]:
        """The metrics of the weights that are saved at the end."""
        return self.best.metrics if self._keeps_best else self.metrics

    def after_step(self, training: Training) -> None:
        step, every = training.optimizer_step, self._replica.config.evaluation.every_steps
        if training.order.t == 0 if every is None else step % every == 0:
            self._due = True
        ended = step == self._replica.plan.optimizer_steps  # `finish` may still change the weights
        if self._due and training.synchronised and not ended:
            training.flush()
            self.run(step)

    def finish(self, step: int, changed: bool) -> None:
        """Evaluate the final weights, unless they were evaluated and have not `changed`. A collective."""
        if changed or self._evaluated_at != step:
            pauses = step < self._replica.plan.optimizer_steps and not self.best.should_stop()
            self.run(step, may_stop=False, keeps_rows=not pauses)

    def run(self, step: int, may_stop: bool = True, keeps_rows: bool = True) -> None:
        """Evaluate the weights after optimizer step `step`. A collective.

        `keeps_rows`: if false, the file of rows stays that of an earlier evaluation, whose weights may be saved.
        """
        replica, backend = self._replica, self._replica.backend
        self._meter.pause()
        on_host, on_device = random_state(), backend.random_state()
        size = replica.config.evaluation.micro_batch
        enough = enough_for(f"to evaluate {size} samples at a time", "a smaller evaluation.micro_batch")
        with replica.policy.common_weights(), enough:
            self._finite.require_weights(replica.trained, step)
            evaluated = replica.predictor.evaluate(
                replica.prepared, self._hooks.evaluation_progress, lambda: self._must_stop(may_stop)
            )
            if evaluated is not None:
                self.metrics, predictions = evaluated
                would_be_saved = self.best.update(step, self.metrics, replica.model) or not self._keeps_best
                keeps_rows = keeps_rows and would_be_saved and len(replica.prepared.eval) <= MOST_ROWS
                if keeps_rows and self._hooks.kept_rows is not None:
                    rows = replica.recipe.row_metrics(predictions, replica.prepared.eval)
                    self._hooks.kept_rows.write({name: values.numpy() for name, values in rows.items()})
        restore_random_state(on_host)  # the number of evaluations must not change training
        backend.restore_random_state(on_device)
        self._compilations.after_evaluation()
        self.stopped = evaluated is None
        if evaluated is not None:
            self._due, self._evaluated_at = False, step
            self._log(step, {f"eval/{name}": value for name, value in self.metrics.items()})
        self._meter.resume()

    def _must_stop(self, may_stop: bool) -> bool:
        """Called before each micro-batch: whether to save and end, as asked for."""
        self._meter.timer.progress("evaluation")
        stop = may_stop and self._hooks.asked_to_end()
        if self._replica.policy.collective_forward:  # no worker can go on alone
            stop = self._replica.backend.start_host_sum([stop], async_op=False)() != [0.0]
        return stop

    def state(self) -> tuple[Any, ...]:
        """All but `best`, which has its own state."""
        return self._due, self.stopped, self._evaluated_at, self.metrics

    def load_state(self, state: tuple[Any, ...]) -> None:
        self._due, self.stopped, self._evaluated_at, self.metrics = state
