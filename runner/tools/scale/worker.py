"""Workers of a branch test: each trains branches alone, one after the other."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.backends import Backend, World
from runner.config.choices import Goal
from runner.errors import Diverged
from runner.folder.files import strict_json
from runner.launch.local import WorkerContext
from runner.launch.worker import connect, rendezvous_store, translate_worker_errors
from runner.tools.scale.branches import Branch, Outcome
from runner.train.adapter import changing_state, load_changing_state
from runner.train.build import build_loop
from runner.train.job import Job
from runner.train.loop import Loop

#: Files in the test's folder: the common weights with their loss, and a line for each branch. Trackers are not sent
#: files whose name starts with a dot.
START, OUTCOMES = ".start.pt", "branches.jsonl"
#: How long workers wait for the one that trains the common weights.
_TIMEOUT = datetime.timedelta(hours=24)


def run_launched(test: dict[str, Any], context: WorkerContext) -> None:
    """The entry point of a worker.

    `test`: `start`, the job that trains the common weights until step `start_until`; `branches`, each with its job.
    Jobs are `Job.as_json()`, for one worker.
    """
    start = Job.from_json(test["start"])
    store = rendezvous_store(context)
    store.set_timeout(_TIMEOUT)
    with translate_worker_errors(context.rank, "a smaller batch.micro_batch, or precision=bf16"):
        # A separate prefix in the common store makes each worker a separate world.
        alone = dist.PrefixStore(f"alone {context.rank}", store)
        backend = connect(start, World(0, 1, context.rank, start.local_workers, alone))
        path = start.folder / START
        if context.rank == 0:
            if not path.exists():
                _train_start(start, test["start_until"], backend, path)
            store.set(START, "trained")
        store.wait([START])
        weights = torch.load(path, weights_only=True, map_location="cpu")["weights"]
        while (number := store.add("branch", 1)) <= len(test["branches"]):
            branch, job = test["branches"][number - 1]
            outcome = _train_branch(Job.from_json(job), weights, backend)
            append(start.folder, Branch(**branch), outcome)
        backend.close()


def _train_start(job: Job, until: int, backend: Backend, path: Path) -> None:
    loop = build_loop(job, backend)
    loop.train(until)
    loop.finish()
    weights = {name: tensor.detach().cpu().clone() for name, tensor in changing_state(loop.model).items()}
    draft = path.with_suffix(".draft")
    loss, metric = _measured(loop)
    torch.save({"weights": weights, "loss": loss, "metric": metric}, draft)
    draft.rename(path)
    loop.policy.close()


def _train_branch(job: Job, weights: dict[str, torch.Tensor], backend: Backend) -> Outcome:
    """A whole training with the common weights in place of the recipe's; its optimizer starts anew, as theirs did."""
    started = time.monotonic()
    loop = build_loop(job, backend)
    load_changing_state(loop.model, weights)
    try:
        loop.train()
        loop.finish()
        loss, metric = _measured(loop)
    except Diverged:
        loss = metric = math.inf
    loop.policy.close()
    return Outcome(loss, metric, time.monotonic() - started)


def _measured(loop: Loop) -> tuple[float, float]:
    """Loss and metric on the evaluation data. A recipe without a loss has the metric for both, lower being better."""
    metrics, evaluation = loop.evaluator.metrics, loop.replica.config.evaluation
    metric = metrics[evaluation.metric]
    return metrics.get("loss", metric if evaluation.goal is Goal.min else -metric), metric


def append(folder: Path, branch: Branch, outcome: Outcome) -> None:
    """Add a line, whole or not at all."""
    line = strict_json({**dataclasses.asdict(branch), **dataclasses.asdict(outcome)})
    with (folder / OUTCOMES).open("ab") as file:
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> dict[Branch, Outcome]:
    """The outcomes so far. A last line that a crash has cut off is left out."""
    path = folder / OUTCOMES
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            row = json.loads(line)
            branch = Branch(row["batch"], row["rule"], row["seed"], row["windows"])
            found[branch] = Outcome(float(row["loss"]), float(row["metric"]), row["seconds"])
    return found
