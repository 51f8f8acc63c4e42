"""Functions that test workers run: training that stops, is saved to the disk, and continues from there."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.backends import Backend
from runner.config.schema import Checkpoint
from runner.errors import Preempted
from runner.folder.metrics_log import MetricsLog, cut_metrics
from runner.train import build, checkpoint
from runner.train.build import build_loop
from runner.train.checkpoint import Checkpoints, newest, sync_digest
from runner.train.hooks import Hooks, Paused
from runner.train.job import Job
from runner.train.loop import Loop
from runner.train.sharding import full
from tests.replicas import outcome, tiny_job

#: Parts of a loop's state that are only checked or reported, or that a CPU does not have.
WITHOUT_EFFECT = ("device_random", "smaller_micro_batches")
#: What is logged about time is never the same.
_REPEATABLE = ("train/loss", "train/lr", "train/samples_seen", "eval/", "sync/drift", "sync/cosine")


class _Log(dict[tuple[str, int], float]):
    """Logged values by metric and step; for a value that is logged twice and differs, there is another entry."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name.startswith(_REPEATABLE) and not same(self.setdefault((name, step), value), value):
                self[f"differs: {name}", step] = value


def train_whole(backend: Backend, overrides: list[str]) -> dict[str, Any]:
    """Train without a stop; everything in which two runs can be compared."""
    log = _Log()
    loop = build_loop(tiny_job(overrides, backend.world_size), backend, Hooks(log=log.write))
    loop.train()
    return _finished(loop, log)


def train_in_parts(
    backend: Backend, overrides: list[str], stops: Sequence[int], leave_out: str | None = None
) -> dict[str, Any] | str:
    """Stop after each of these optimizer steps, save, rebuild everything, load, and continue.

    `leave_out`: a part of the state that is as in a new run each time. Returns the error if that ends the run.
    """
    folder = Path(backend.broadcast_object(tempfile.mkdtemp()))
    job, log = tiny_job(overrides, backend.world_size, folder), _Log()
    loop = build_loop(job, backend, Hooks(log=log.write))
    new = copy.deepcopy(loop.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        if leave_out is not None:
            load = build.load
            patch.setattr(build, "load", lambda *own: {**load(*own), leave_out: copy.deepcopy(new[leave_out])})
        try:
            for stop in stops:
                loop.train(until=stop)
                _save(loop, backend, folder)
                loop.policy.close()
                torch.manual_seed(999)  # nothing may depend on the generators' current states
                loop = build_loop(_from_newest(job), backend, Hooks(log=log.write))
            loop.train()
            return _finished(loop, log)
        except AssertionError as error:
            return repr(error)
        finally:
            loop.policy.close()
            backend.all_gather_object(None)
            if backend.rank == 0:
                shutil.rmtree(folder)


def train_paused(backend: Backend, overrides: list[str], rungs: Sequence[int]) -> dict[str, Any]:
    """Pause at these optimizer steps as a race does, which evaluates the run there and ends it; continue each time."""
    with _shared_folder(backend) as folder:
        job, log = tiny_job(overrides, backend.world_size, folder), _Log()
        identity = {"sync": sync_digest(job.config.sync, job.config.sharding)}
        for rung in rungs:
            pauses_after = dataclasses.replace(job, pause_after=rung).pauses_after
            checkpoints = Checkpoints(folder, Checkpoint(keep=1), backend, identity, pauses_after=pauses_after)
            loop = build_loop(_from_newest(job), backend, Hooks(log=log.write, after_step=[checkpoints]))
            if not pauses_after(loop.optimizer_step):  # at the first synchronisation after the rung before
                with pytest.raises(Paused):
                    loop.train()
            assert rung <= loop.optimizer_step < loop.plan.optimizer_steps
            before = dict(log)
            loop.finish()
            log.clear()
            log.update(before)  # without the evaluation of the race
            loop.policy.close()
            backend.all_gather_object(None)  # until worker 0 has completed the checkpoint
        return _to_its_end(job, backend, log)


def train_preempted(backend: Backend, overrides: list[str], moments: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Ask the last worker to make room at these moments, `("step", n)` or `("evaluation", n)`; continue each time."""
    with _shared_folder(backend) as folder:
        job, log = tiny_job(overrides, backend.world_size, folder), _Log()
        for when, after in moments:
            loops: list[Loop] = []

            def asked(loops: list[Loop] = loops, when: str = when, after: int = after) -> bool:
                (loop,) = loops
                evaluates = loop.meter.timer.phase == "evaluation"
                return (
                    backend.rank == backend.world_size - 1
                    and loop.optimizer_step >= after
                    and evaluates == (when == "evaluation")
                )

            settings = Checkpoint(on_preemption=True, keep=1)
            identity = {"sync": sync_digest(job.config.sync, job.config.sharding)}
            checkpoints = Checkpoints(folder, settings, backend, identity, asked)
            hooks = Hooks(log=log.write, asked_to_end=checkpoints.preempted, after_step=[checkpoints])
            loop = build_loop(_from_newest(job), backend, hooks)
            loops.append(loop)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(checkpoint, "_AGREE_EVERY_S", 0.0)
                with pytest.raises(Preempted) as caught:
                    loop.train()
            assert caught.value.step == loop.optimizer_step
            assert loop.optimizer_step >= after
            loop.policy.close()
            backend.all_gather_object(None)  # until worker 0 has completed the checkpoint
        return _to_its_end(job, backend, log)


def train_part(backend: Backend, overrides: list[str], folder: Path, until: int | None) -> dict[str, Any]:
    """Continue the run in `folder` on these workers, up to `until` optimizer steps (None: to its end), and save it.

    The plan is that of one worker, dealt to as many as there are.
    """
    job, log = tiny_job(overrides, 1, folder), _Log()
    plan = job.plan.on_workers(backend.world_size, 1, job.config.sync.k)
    job = dataclasses.replace(job, plan=plan, local_workers=backend.world_size)
    loop = build_loop(_from_newest(job), backend, Hooks(log=log.write))
    loop.train(until)
    if until is None:
        return _finished(loop, log)
    _save(loop, backend, folder)
    loop.policy.close()
    return {"logged": dict(log), "synchronised": loop.synchronised}


def train_killed(backend: Backend, overrides: list[str], folder: Path, saved_after: int, killed_after: int) -> None:
    """Save, train on, lose all of that but what was logged, and continue from the checkpoint to the end."""
    job = tiny_job(overrides, backend.world_size, folder)
    for until in (killed_after, None):
        log = MetricsLog(folder) if backend.rank == 0 else None
        loop = build_loop(_from_newest(job), backend, Hooks(log=log.write if log is not None else None))
        if until is not None:
            loop.train(saved_after)
            _save(loop, backend, folder)
        loop.train(until)
        loop.flush() if until is not None else loop.finish()
        loop.policy.close()
        if log is not None:
            log.close()
            cut_metrics(folder, saved_after if until is not None else loop.optimizer_step)
        backend.all_gather_object(None)


def _save(loop: Loop, backend: Backend, folder: Path) -> None:
    replica, equal = loop.replica, loop.policy.replicated_keys if loop.synchronised else ()
    identity = {**replica.identity, "sync": sync_digest(replica.config.sync, replica.config.sharding)}
    checkpoints = Checkpoints(folder, Checkpoint(keep=1), backend, identity)
    checkpoints.save(loop.optimizer_step, loop.state_dict, equal)
    checkpoints.wait()
    assert checkpoints.warning() is None, checkpoints.warning()
    backend.all_gather_object(None)  # until worker 0 has completed it


@contextlib.contextmanager
def _shared_folder(backend: Backend) -> Iterator[Path]:
    """A temporary folder of all workers. A collective at its begin and end."""
    folder = Path(backend.broadcast_object(tempfile.mkdtemp()))
    try:
        yield folder
    finally:
        backend.all_gather_object(None)
        if backend.rank == 0:
            shutil.rmtree(folder)


def _to_its_end(job: Job, backend: Backend, log: _Log) -> dict[str, Any]:
    """Continue a run from its newest checkpoint to its end; everything in which two runs can be compared."""
    loop = build_loop(_from_newest(job), backend, Hooks(log=log.write))
    loop.train()
    return _finished(loop, log)


def _from_newest(job: Job) -> Job:
    saved, damaged = newest(job.folder)
    assert not damaged
    return dataclasses.replace(job, checkpoint=saved.folder if saved is not None else None)


def _finished(loop: Loop, log: _Log) -> dict[str, Any]:
    loop.finish()
    state = loop.state_dict()
    del state["policy"]  # of a run that has ended; it counts seconds
    syncs = [(row["drift"], row["cosine"], row["steps"], row["bytes"]) for row in state.pop("synchronisations")]
    result = {**outcome(loop), "state": _whole(state), "synchronisations": syncs, "logged": dict(log)}
    loop.policy.close()
    return result


def _whole(state: Any) -> Any:
    """A copy in which no tensor is sharded. A collective if one is."""
    if isinstance(state, dict):
        return {key: _whole(value) for key, value in state.items()}
    return full(state).clone() if isinstance(state, Tensor) else copy.deepcopy(state)


def same(a: Any, b: Any) -> bool:
    """Whether two results have the same bits."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))
