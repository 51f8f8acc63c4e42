"""End a worker's run: check and save what was trained, and give account of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from runner.backends import Backend
from runner.backends.machine import available_cores, describe_machine
from runner.backends.moving import to_device
from runner.errors import RunFailed, first_line
from runner.folder.evaluation_rows import KeptRows
from runner.folder.files import is_from_disk, require_space, write_json
from runner.folder.metrics_log import MetricsLog
from runner.folder.record import RunResult
from runner.sync.telemetry import sync_summary
from runner.train import ledger
from runner.train.adapter import changing_state, load_changing_state, parameter_count, without_adapter
from runner.train.checkpoint import Checkpoints
from runner.train.flops import measure_utilisation
from runner.train.identical import common_digest, weights_digest
from runner.train.job import Job
from runner.train.loop import Loop
from runner.train.replica import Replica
from runner.train.tokens import over_all_workers


@dataclass(frozen=True)
class RunFiles:
    """The files that a worker writes while it trains; `log` and `kept_rows` on rank 0 only."""

    checkpoints: Checkpoints
    log: MetricsLog | None = None
    kept_rows: KeptRows | None = None

    def warnings(self) -> list[str | None]:
        return [part.warning() for part in (self.checkpoints, self.log, self.kept_rows) if part is not None]


def write_ledger(job: Job, loop: Loop) -> None:
    """Write `ledger.json` on rank 0. Before its first epoch is closed a ledger has nothing to report."""
    if loop.backend.rank == 0 and (loop.ledger.epochs or loop.ledger.failures):
        write_json(job.folder / "ledger.json", ledger.as_json(loop.ledger, job.facts.unit, job.facts.groups))


def require_space_for_model(job: Job, loop: Loop) -> None:
    """Raises RunFailed on rank 0 if the disk has too little space for the model that is saved at the end."""
    if loop.backend.rank == 0:
        saved = loop.model.state_dict() if job.config.adapter.merge else changing_state(loop.model)
        require_space(job.folder, sum(tensor.nbytes for tensor in saved.values()), "the model")


def finish(job: Job, loop: Loop, files: RunFiles, waited_share: float | None) -> RunResult | None:
    """Save the model, unless the run pauses, and return the result, on rank 0. A collective.

    `waited_share`: of the time of training, see `RunResult`. Raises RunFailed.
    """
    replica, backend, best = loop.replica, loop.backend, loop.evaluator.best
    utilisation, uncounted = measure_utilisation(loop, job.local_workers * job.threads)
    loop.policy.close()
    warnings = (*gather_warnings(backend, loop.compilations.warning(), *files.warnings()), *uncounted)
    tokens = over_all_workers(loop.tokens, backend)
    digest = common_digest(loop.model, backend) if loop.plan.shards is not None else None
    if best.weights is not None:  # on worker 0, which saves them
        load_changing_state(loop.model, best.weights)
        digest = digest and weights_digest(changing_state(loop.model))
    whole = replica.sharded.whole() if replica.sharded is not None else None
    result = None
    if files.log is not None:
        files.log.close()
        measured = {
            **utilisation,
            "tokens": tokens,
            "warnings": warnings,
            "waited_share": waited_share,
            "checkpoint_stall_s": files.checkpoints.stall_seconds,
            "weights_digest": digest,
        }
        result = _result(job, loop, measured)
        if not job.pauses_after(loop.optimizer_step):
            require_space_for_model(job, loop)
            _save(replica, whole or to_device(loop.model, torch.device("cpu")), job.folder)
    backend.wait_for_all(None)  # a large model takes longer to save than a collective may last
    return result


def gather_warnings(backend: Backend, *own: str | None) -> tuple[str, ...]:
    """All workers' warnings, given this worker's `own`. A collective."""
    texts = backend.all_gather_object(own)
    return tuple(f"worker {rank}: {text}" for rank, said in enumerate(texts) for text in said if text)


def _save(replica: Replica, model: nn.Module, folder: Path) -> None:
    """Write the folder `model`, all of it or nothing. Raises RunFailed if the disk does not take it."""
    draft = folder / ".model"
    model = without_adapter(replica.config.adapter, model)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        replica.recipe.save(model, replica.prepared, draft)
        shutil.rmtree(folder / "model", ignore_errors=True)  # of a run that ended while it was saved
        draft.rename(folder / "model")
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)
        if not is_from_disk(error, folder):
            raise
        raise RunFailed(f"the model cannot be written to {folder} ({first_line(error)})") from error


def _result(job: Job, loop: Loop, measured: Mapping[str, Any]) -> RunResult:
    """The result, with what was `measured` at the end."""
    meter, stats, evaluator, first = loop.meter, loop.policy.stats(), loop.evaluator, loop.log.first_step
    return RunResult(
        optimizer_steps=loop.optimizer_step,
        applied_steps=loop.finite.applied_steps,
        skipped_steps=loop.finite.skipped_steps,
        samples_seen=sum(record.samples_seen for record in loop.ledger.epochs),
        samples_per_s=meter.timed_samples / meter.timed_seconds if meter.timed_seconds else None,
        first_step_s=(first.ended_at if first is not None else time.time()) - job.started_at,
        first_step_compile_s=first.compile_s if first is not None else None,
        synchronisations=stats.synchronisations,
        comm_bytes=stats.bytes,
        comm_s=stats.seconds,
        comm_stall_s=stats.stall_seconds,
        sync=sync_summary(loop.log.synchronisations, loop.policy.resolved_settings),
        step_s=meter.mean_step_seconds,
        evaluation_s=meter.paused_seconds,
        compilations=loop.compilations.total(),
        train_loss=meter.loss_total / max(meter.count_total, 1),
        noise=loop.step.noise.result(),
        eval=evaluator.final_metrics,
        best={"step": evaluator.best.step, job.config.evaluation.metric: evaluator.best.value},
        batch_statistics=any(isinstance(module, _BatchNorm) for module in loop.model.modules()),
        parameters=parameter_count(job.config.adapter, loop.model),
        trained_parameters=sum(one.numel() for one in loop.model.parameters() if one.requires_grad),
        truncated=loop.replica.prepared.properties.get("truncated"),
        stopped_early=loop.optimizer_step < job.plan.optimizer_steps,
        machine=describe_machine(job.device_type, available_cores()),
        smaller_micro_batches=tuple(loop.retry.smaller_micro_batches),
        **measured,
    )
