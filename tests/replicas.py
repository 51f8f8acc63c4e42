"""Functions that test workers run: the shipped loop on a recipe small enough for exact comparisons."""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.backends import Backend
from runner.config.plain import to_plain
from runner.errors import UserError
from runner.plan.experiment import Experiment, prepare
from runner.train.build import build_loop
from runner.train.hooks import Hooks
from runner.train.job import Job
from runner.train.loop import Loop
from runner.train.sharding import full
from tests.configured import configured

#: 100 samples in global batches of 24 leave a tail of 4: with 8 workers, 4 have no samples in it.
TINY = [
    "recipe=acceptability",
    "recipe.data.train_samples=100",
    "recipe.data.eval_samples=30",
    "recipe.model.hidden_size=16",
    "recipe.model.feed_forward_size=16",
    "recipe.model.layers=1",
    "recipe.model.heads=2",
    "recipe.model.dropout=0.0",
    "batch.global_batch=24",
    "epochs=2",
    "precision=fp64",
    "tracking=none",
]

Weights = dict[str, Tensor]


@functools.cache
def _tiny_experiment(*overrides: str) -> Experiment:
    return prepare(configured([*TINY, "device=cpu", *overrides]))


def tiny_job(overrides: list[str], workers: int, folder: Path | None = None) -> Job:
    experiment = _tiny_experiment(f"device.workers={workers}", *overrides)
    folder = folder or Path(tempfile.mkdtemp())
    return Job(experiment.config, experiment.facts, folder, "cpu", workers, 1, experiment.plan, time.time())


def make_loop(backend: Backend, overrides: list[str], logged: list[Any] | None = None) -> Loop:
    log = (lambda step, metrics: logged.append((step, metrics))) if logged is not None else None
    return build_loop(tiny_job(overrides, backend.world_size), backend, Hooks(log=log))


def weights_of(loop: Loop) -> Weights:
    """All weights. A collective if they are sharded."""
    return {name: full(tensor.detach()).clone() for name, tensor in loop.model.state_dict().items()}


def outcome(loop: Loop) -> dict[str, Any]:
    """The results in which two ways of training are compared."""
    return {
        "weights": weights_of(loop),
        "metrics": loop.evaluator.metrics,
        "ledger": [to_plain(record) for record in loop.ledger.epochs],
    }


def train(backend: Backend, overrides: list[str]) -> dict[str, Any]:
    """Train to the end; the worker's results."""
    logged: list[Any] = []
    loop = make_loop(backend, overrides, logged)
    loop.train()
    loop.finish()
    result = {
        **outcome(loop),
        "logged": logged,
        "steps": loop.optimizer_step,
        "stats": loop.policy.stats(),
        "noise": loop.step.noise.result(),
        "best": (loop.evaluator.best.step, loop.evaluator.best.value),
    }
    loop.policy.close()
    return result


def refusal(backend: Backend, overrides: list[str]) -> str:
    """What a worker refuses to train with, or an empty string."""
    try:
        train(backend, overrides)
    except UserError as error:
        return str(error)
    return ""


def train_recipe(backend: Backend, overrides: list[str]) -> dict[str, Any]:
    """Train any recipe as this group of workers; its results, and every logged training loss."""
    workers = backend.world_size
    experiment = prepare(configured([*overrides, f"device.workers={workers}"]))
    job = Job(experiment.config, experiment.facts, Path(), "cpu", workers, 1, experiment.plan, time.time())
    losses: list[float] = []
    hooks = Hooks(log=lambda _, metrics: losses.extend(v for k, v in metrics.items() if k == "train/loss"))
    loop = build_loop(job, backend, hooks)
    loop.train()
    loop.finish()
    result = {**outcome(loop), "losses": losses}
    loop.policy.close()
    return result


def count_all_reduces(backend: Backend, overrides: list[str], steps: int) -> tuple[int, int]:
    """The number of gradient all-reduces and of micro-batches in `steps` optimizer steps."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    loop = make_loop(backend, overrides)
    calls = micro_batches = 0

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that it cannot resolve
        nonlocal calls
        calls += bucket.is_last()
        return allreduce_hook(state, bucket)

    loop.policy.forward_model.register_comm_hook(None, hook)
    loss = loop.replica.recipe.loss

    def counted(model: Any, batch: Any) -> Any:
        nonlocal micro_batches
        micro_batches += 1
        return loss(model, batch)

    object.__setattr__(loop.replica.recipe, "loss", counted)
    loop.train(until=steps)
    loop.policy.close()
    return calls, micro_batches


def train_with_high_loss_scale(backend: Backend, overrides: list[str]) -> dict[str, Any]:
    """fp16 with a loss scale that overflows at first, so that the scaler skips steps."""
    loop = make_loop(backend, overrides)
    loop.step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10_000)
    loop.train()
    loop.finish()
    result = {"ledger": [to_plain(record) for record in loop.ledger.epochs], "scale": loop.step.scaler.get_scale()}
    result["weights"] = weights_of(loop)
    loop.policy.close()
    return result


def train_with_wrong_dealing(backend: Backend, overrides: list[str], mistake: str) -> str:
    """Deal samples wrongly on every worker but the first; the loop's error."""
    loop = make_loop(backend, overrides)
    order, right = loop.order, loop.order.micro_batches

    def wrong(epoch: int, step: Any) -> Any:
        if backend.rank == 0 and mistake != "every worker reads everything":
            return right(epoch, step)
        return {
            "every worker reads everything": lambda: [order.global_batch(epoch, step)],
            "a worker reads another's share": lambda: [order.global_batch(epoch, step)[0 :: backend.world_size]],
            "a worker skips its last sample": lambda: [ids[:-1] if len(ids) > 1 else ids for ids in right(epoch, step)],
        }[mistake]()

    order.micro_batches = wrong  # type: ignore[method-assign]
    try:
        loop.train()
        loop.finish()
    except AssertionError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        loop.policy.close()
    return "nothing: " + ", ".join(f"{r.missing} missing, {r.duplicated} twice" for r in loop.ledger.epochs)


def noise_of(backend: Backend, overrides: list[str]) -> tuple[Any, Weights]:
    """Train any recipe as this group of workers; the noise of its gradient, and its weights."""
    workers = backend.world_size
    experiment = prepare(configured([*overrides, f"device.workers={workers}"]))
    job = Job(experiment.config, experiment.facts, Path(), "cpu", workers, 1, experiment.plan, time.time())
    loop = build_loop(job, backend)
    loop.train()
    loop.finish()
    result = loop.step.noise.result(), weights_of(loop)
    loop.policy.close()
    return result
