"""Close a run when its workers have ended: certificate, `summary.json`, tags in the tracking store."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from runner.config.schema import AUTO
from runner.errors import Diverged, RunFailed, UserError, first_line
from runner.folder.files import write_json
from runner.folder.metrics_log import MetricsLog, MetricsReader
from runner.folder.reading import read_json
from runner.folder.record import FAILED, FILE_NAME, FINISHED, STOPPED, DataSize, RunRecord, RunResult, amend
from runner.launch.local import WorkerFailed
from runner.log import LOG
from runner.measure.scores import prediction_metrics, scored
from runner.plan.experiment import Experiment
from runner.plan.history import Outcome, ended_at, split_at
from runner.plan.levels import NOT_COMPARABLE
from runner.run.context import RunContext
from runner.run.earlier import certificate_of_run
from runner.run.model_card import write_model_card
from runner.speed.figures import speed_metrics, with_speed
from runner.speed.run_numbers import Restarts
from runner.track.description import NOTE_TAG, run_description
from runner.track.secrets import masked
from runner.track.tracker import Tracker


@dataclass(frozen=True)
class RunCloser:
    """Records how a run ended, in its folder, in the tracking store and on the terminal."""

    experiment: Experiment
    folder: Path
    context: RunContext
    tracker: Tracker
    restarts: Restarts

    def close(self, status: str, result: RunResult | None, failure: Exception | None) -> RunRecord:
        """Write `summary.json` and the card of a finished run's model, and return the record.

        `result`: None if training did not reach its end. `failure`: why it failed. Raises RunFailed if the disk does
        not take the record.
        """
        result = result or _partial_result(self.folder)
        experiment = self._update_certificate(result)
        record = self._record(status, experiment, result)
        if failure is not None:
            record = dataclasses.replace(record, **failure_of(failure))
        record = with_speed(record, experiment, self.folder, self.restarts)
        record = dataclasses.replace(record, prediction=scored(experiment, record, self.context.started_at))
        self._tag(record, experiment)
        self._log_speed(record)
        record.write(self.folder)
        if status == FINISHED:
            try:
                write_model_card(self.folder, record)
            except (UserError, RunFailed, OSError, ValueError, KeyError) as error:
                LOG.warning(f"{self.folder / 'model'} has no model card ({type(error).__name__}: {first_line(error)})")
        return record

    def _record(self, status: str, experiment: Experiment, result: RunResult) -> RunRecord:
        """Everything but the figures of `runner.speed` and how good predictions were."""
        evaluation, sweep = experiment.config.evaluation, self.context.sweep
        return RunRecord(
            status=status,
            setup=experiment.setup_name,
            setup_digest=experiment.setup_digest,
            seed=experiment.config.seed,
            varied=dict(sweep.varied),
            metric=evaluation.metric,
            goal=evaluation.goal.name,
            rehearsed=experiment.placement.rehearsed,
            data=DataSize(**{one.name: getattr(experiment.facts, one.name) for one in dataclasses.fields(DataSize)}),
            wall_s=time.time() - self.context.started_at,
            result=result,
            jobs_at_once=sweep.at_once,
            design=sweep.design,
            raced=sweep.raced,
            resumed_after=tuple(segment.after_step for segment in experiment.certificate.segments[1:]),
            notes=(*experiment.notes, *self.restarts.sentences, *_surprises(status, experiment, result)),
            certificate=experiment.certificate.level if self._ledger_is_sound() else NOT_COMPARABLE,
            mlflow_run_id=self.tracker.wait_until_open(status),
        )

    def _update_certificate(self, result: RunResult) -> Experiment:
        """Add what is known only after the model was built and trained."""
        experiment = self.experiment
        segments = ended_at(experiment.certificate.segments, result.optimizer_steps)
        for smaller in result.smaller_micro_batches:
            segments = split_at(segments, smaller.after_step, smaller.accumulation_steps)
        if segments[-1].accumulation_steps != experiment.plan.accumulation_steps:
            experiment = experiment.with_accumulation_steps(segments[-1].accumulation_steps)
            write_json(self.folder / "plan.json", experiment.plan.as_json())
        sync = experiment.config.sync
        if sync.fragments == AUTO and result.sync is not None:
            sync = dataclasses.replace(sync, fragments=result.sync["fragments"])
        stopped_after = result.samples_seen if result.stopped_early else None
        trained = experiment.trained(Outcome(segments, sync, bool(result.batch_statistics), stopped_after))
        if trained.certificate != experiment.certificate:
            write_json(self.folder / "certificate.json", trained.certificate.as_json())
            self.tracker.tag("certificate", trained.certificate.level)
        return trained

    def _ledger_is_sound(self) -> bool:
        """Check that the ledger, as far as it was written, has the planned samples; else withdraw the certificate."""
        ledger = self.folder / "ledger.json"
        if not ledger.exists() or read_json(ledger)["sound"]:
            return True
        reason = "the ledger does not match the plan"
        withdrawn = dataclasses.replace(certificate_of_run(self.folder), level=NOT_COMPARABLE, withdrawn=reason)
        write_json(self.folder / "certificate.json", withdrawn.as_json())
        self.tracker.tag("certificate", NOT_COMPARABLE)
        self.context.console.print(
            "[bold red]The ledger does not match the plan[/]: see ledger.json; this run is not comparable."
        )
        return False

    def _tag(self, record: RunRecord, experiment: Experiment) -> None:
        tags = {
            "notes": "; ".join(record.notes),
            "weights.digest": record.result.weights_digest,
            "machine": record.result.machine,
            "diagnosis": record.diagnosis,
            NOTE_TAG: run_description(experiment, record),
        }
        for name, value in tags.items():
            if value:
                self.tracker.tag(name, value)

    def _log_speed(self, record: RunRecord) -> None:
        """Log the figures; print the diagnosis of a run that failed, which gets no report."""
        if metrics := speed_metrics(record) | prediction_metrics(record):
            assert record.result.optimizer_steps is not None
            log = MetricsLog(self.folder)
            log.write(record.result.optimizer_steps, metrics)
            log.close()
        if record.diagnosis is not None and record.status == FAILED:
            self.context.console.print(f"[bold]diagnosis:[/] {escape(record.diagnosis)}", soft_wrap=True)


def _partial_result(folder: Path) -> RunResult:
    """The progress of a run that did not reach its end, from its metrics."""
    seen = [metric for metric in MetricsReader(folder).read() if metric.key == "train/samples_seen"]
    return RunResult(optimizer_steps=seen[-1].step, samples_seen=int(seen[-1].value)) if seen else RunResult()


def _surprises(status: str, experiment: Experiment, result: RunResult) -> Iterator[str]:
    """Findings during the run that may surprise, in sentences."""
    for smaller in result.smaller_micro_batches:
        yield (
            f"for lack of memory each worker had {smaller.accumulation_steps} smaller micro-batches from step "
            f"{smaller.after_step + 1:,} on: the same global batches, summed in another order, so that last bits differ"
        )
    steps = experiment.plan.optimizer_steps
    if status == STOPPED:
        yield f"stopped after step {result.optimizer_steps:,} of {steps:,} by the race of its sweep, which may go on"
    elif result.stopped_early:
        assert result.best is not None
        evaluation = experiment.config.evaluation
        gain = f"gain above {evaluation.min_delta:g}" if evaluation.min_delta else "gain"
        yield (
            f"stopped early, at step {result.optimizer_steps:,} of {steps:,}: no {gain} in {evaluation.metric} since "
            f"step {result.best['step']:,} (evaluation.patience={evaluation.patience} evaluations)"
        )
    for truncated in [result.truncated] if isinstance(result.truncated, Mapping) else result.truncated or ():
        counts = [(name, *truncated[part]) for name, part in (("training", "train"), ("evaluation", "eval"))]
        found = [f"{count:,} of {total:,} {name} {truncated['what']}" for name, count, total in counts if count]
        if found:
            yield f"{' and '.join(found)} were truncated to {truncated['setting']}={truncated['tokens']} tokens"


def failure_of(error: Exception) -> dict[str, Any]:
    """Entries of a `RunRecord` that say why a run failed."""
    kinds = {"user_error": UserError, "diverged": Diverged}
    return {"error": masked(one_line(error)), **{name: isinstance(error, kind) for name, kind in kinds.items()}}


def note_failure(folder: Path, error: Exception) -> None:
    """Record in a run's `summary.json` why it failed; the file may not exist yet."""
    try:
        if (folder / FILE_NAME).exists():
            amend(folder, **failure_of(error))
        else:
            RunRecord(FAILED, **failure_of(error)).write(folder)
    except (RunFailed, UserError) as problem:  # the failure itself is reported by whoever caught it
        LOG.warning(str(problem))


def one_line(error: Exception) -> str:
    """An error in one line; the last line of a worker's traceback."""
    return str(error).strip().splitlines()[-1] if isinstance(error, WorkerFailed) else first_line(error)
