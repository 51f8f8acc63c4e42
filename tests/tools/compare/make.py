"""Runs with known numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.results import Block, RunComparison
from runner.tools.compare.runs import ACCUMULATION, SINGLE, BlockKey, CertificateProperty, FoundRuns, K, Run

KEY = BlockKey("task", (), 1000, 1, "accuracy", "max")


def run(setup: str, seed: int, metric: float, seconds: float | None = 100.0, **more: Any) -> Run:
    """A run like a line of a CSV file; `more`: any other field."""
    workers, accumulation, k = more.pop("workers", 1), more.pop("accumulation", 1), more.pop("k", 1)
    method = SINGLE if workers == 1 else K if k > 1 else ACCUMULATION
    fields = {
        "source": f"{setup}/{seed}",
        "block": KEY,
        "setup": setup,
        "digest": setup,
        "precision": "fp32",
        "method": method,
        **more,
    }
    return Run(seed=seed, metric=metric, seconds=seconds, workers=workers, accumulation=accumulation, k=k, **fields)


def runs(
    setup: str, metrics: Sequence[float], seconds: Sequence[float | None] | float = 100.0, **more: Any
) -> list[Run]:
    """One run per metric, seeds from 0."""
    times = seconds if isinstance(seconds, Sequence) else [seconds] * len(metrics)
    pairs = zip(metrics, times, strict=True)
    return [run(setup, seed, metric, time, **more) for seed, (metric, time) in enumerate(pairs)]


#: A baseline without flags: accuracies near 80, times within 1%.
BASE = runs("one", [80.0, 80.4, 80.2], [400.0, 401.0, 402.0])


def compared(*groups: Sequence[Run], **options: Any) -> RunComparison:
    """`options`: of `compare_runs`."""
    return compare_runs(FoundRuns([one for group in groups for one in group]), **options)


def block(*groups: Sequence[Run], **options: Any) -> Block:
    (only,) = compared(*groups, **options).blocks
    return only


def certificate(workers_allow: str = "equivalent", **values: Any) -> dict[str, CertificateProperty]:
    """A small certificate with some values replaced. `workers_allow`: the level of runs on other workers."""
    allows = {
        "recipe": "not comparable",
        "samples_seen": "not comparable",
        "seed": "not comparable",
        "global_batch": "comparable",
        "data_order": "comparable",
        "learning_rate": "comparable",
        "precision": "comparable",
        "world_size": workers_allow,
        "device": "equivalent",
    }
    usual: Mapping[str, Any] = {
        "recipe": "task 12ab",
        "samples_seen": 1000,
        "seed": 0,
        "global_batch": 48,
        "data_order": "seed 0, cut by 48",
        "learning_rate": 0.001,
        "precision": "fp32",
        "world_size": 1,
        "device": "cpu",
    }
    return {name: CertificateProperty(values.get(name, value), allows[name]) for name, value in usual.items()}


#: A published file with a slow seed, a collapsed one, twins, and empty cells.
PUBLISHED = """experiment,task,precision,learning_rate,gpus,train_samples,method,steps,seed,metric,train_seconds
old,qa,,,1,1000,single,1,0,80.1,400
old,qa,,,1,1000,single,1,1,80.3,402
old,qa,,,1,1000,single,1,2,80.2,401
old,qa,,,4,1000,accumulation,1,0,80.0,200
old,qa,,,4,1000,accumulation,1,1,80.2,450
old,qa,,,4,1000,accumulation,1,2,80.1,201
old,qa,,,4,1000,accumulation,2,0,76.0,150
old,qa,,,4,1000,accumulation,2,1,12.0,151
old,qa,,,4,1000,accumulation,2,2,76.2,152
old,qa,,,4,1000,k_batch,1,0,80.0,300
old,qa,,,4,1000,k_batch,1,1,80.1,303
old,qa,,,4,1000,k_batch,1,2,80.3,301
old,qa,,,4,1000,k_batch,2,0,79.0,100
old,qa,,,4,1000,k_batch,2,1,79.3,101
old,qa,,,4,1000,k_batch,2,2,79.1,100
old,qa,,,1,9000,single,,0,90.1,4000
old,qa,,,1,9000,single,,1,90.2,
old,qa,,,4,9000,accumulation,1,0,90.0,1000
old,qa,,,4,9000,accumulation,1,1,90.3,1010
old,qa,,,4,9000,accumulation,2,0,89.9,900
old,qa,,,4,9000,accumulation,2,1,90.1,905
new,qa,bf16,2e-5,1,1000,single,1,0,70,40
"""


def published_file(folder: Path) -> Path:
    path = folder / "published.csv"
    path.write_text(PUBLISHED)
    return path
