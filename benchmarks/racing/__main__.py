"""How often does a race stop the setup that would have won, and what does it cost?

    python -m benchmarks.racing record FILE --seeds 0 1 2
    python -m benchmarks.racing replay FILE

`record` trains whole grids of learning rates and batch sizes, and notes the metric at each rung; it continues a file.
`replay` races them, and random parts of them; then simulated grids.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
import torch.distributed as dist

from runner.backends import World
from runner.config.compose import compose, settings
from runner.launch.worker import connect
from runner.plan.experiment import prepare
from runner.tools.sweep.rungs import RUNGS, last_rank, ranks
from runner.train.build import build_loop
from runner.train.hooks import Hooks
from runner.train.job import Job

#: Samples of a run. 1/16 of the optimizer steps is a whole number for each batch size.
_SAMPLES, _BATCHES, _RATES = 8192, (16, 32, 64, 128), (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
#: By name: the share of wrong labels in the training data, which makes results noisy.
TASKS = {"digits": 0.0, "noisy digits": 0.3}
_SETTINGS = (
    *("trusted_packages=[benchmarks]", "recipe=linear", "recipe._target_=benchmarks.racing.digits.Digits"),
    *("recipe.name=digits", "recipe.metric=accuracy", "recipe.goal=max", "recipe.tuned.warmup_share=0.06", "epochs=8"),
    *("optimizer=adamw", "optimizer.clip_norm=1.0", "schedule=linear", "batch=fixed_global", "scaling=none"),
    *("device=cpu", "tracking=none", "checkpoint=none", "log_every=100", "evaluation.micro_batch=800"),
)
_AT = (*RUNGS, 1.0)
#: Differences in accuracy, in points, that do not matter.
_MARGIN = 1.0
_RACES = 1_000

Keep = Callable[[np.ndarray, int], np.ndarray]


def trained(task: str, lr: float, batch: int, seed: int) -> list[float]:
    """The metric at each rung and at the end of a run in this process."""
    evaluated = [f"evaluation.every_steps={_SAMPLES // batch // 16}", f"+recipe.wrong_labels={TASKS[task]}"]
    own = [f"optimizer.lr={lr}", f"batch.global_batch={batch}", f"seed={seed}"]
    experiment = prepare(settings(compose([*_SETTINGS, *evaluated, *own])))
    with tempfile.TemporaryDirectory() as folder:
        job = Job(experiment.config, experiment.facts, Path(folder), "cpu", 1, 1, experiment.plan, time.time())
        backend = connect(job, World(0, 1, 0, 1, dist.HashStore()))
        found: dict[float, float] = {}

        def log(step: int, metrics: dict[str, float]) -> None:
            if "eval/accuracy" in metrics:
                found[step / experiment.plan.optimizer_steps] = metrics["eval/accuracy"]

        loop = build_loop(job, backend, Hooks(log=log))
        loop.train()
        loop.finish()
        loop.policy.close()
        backend.close()
    return [found[share] for share in _AT]


def record(file: Path, seeds: Sequence[int]) -> None:
    """Append the runs that the file does not have."""
    torch.set_num_threads(1)
    columns = ["task", "seed", "lr", "global_batch", *(f"at {share:g}" for share in _AT)]
    known = set() if not file.exists() else set(pandas.read_csv(file)[columns[:4]].itertuples(index=False, name=None))
    with file.open("a", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        if not known:
            writer.writerow(columns)
        for seed, task, lr, batch in itertools.product(seeds, TASKS, _RATES, _BATCHES):
            if (task, seed, lr, batch) not in known:
                writer.writerow([task, seed, lr, batch, *trained(task, lr, batch, seed)])
                opened.flush()


def by_ranks(values: np.ndarray, setups: int) -> np.ndarray:
    """The runner's rule: which setups go on, bool [setups]. `values`: [setups in the race, rungs so far]."""
    return ranks(values[:, -1]) <= last_rank(values)


def halving(values: np.ndarray, setups: int) -> np.ndarray:
    """Successive halving (Jamieson & Talwalkar 2016): from the second rung on the better half goes on."""
    return ranks(values[:, -1]) < np.ceil(setups * 0.5 ** (values.shape[1] - 1))


def raced(values: np.ndarray, keep: Keep) -> tuple[float, float]:
    """The gap between the best final values of grid and race, and the share of the grid's training that it took.

    `values`: [setups, rungs and the end].
    """
    racing, share, before = np.arange(len(values)), 0.0, 0.0
    for rung, at in enumerate(_AT):
        share, before = share + (at - before) * len(racing) / len(values), at
        if rung < len(RUNGS) and len(racing) > 1:
            racing = racing[keep(values[racing, : rung + 1], len(values))]
    return float(values[:, -1].max() - values[racing, -1].max()), share


def row(name: str, setups: int, keep: Keep, grids: Sequence[np.ndarray], margin: float) -> dict[str, Any]:
    losses, shares = np.array([raced(grid, keep) for grid in grids]).T
    return {
        "grids": name,
        "setups": setups,
        "rule": keep.__name__,
        "races": len(grids),
        "winner": np.mean(losses == 0),
        "within margin": np.mean(losses <= margin),
        "share": shares.mean(),
        "90% below": np.quantile(shares, 0.9),
    }


def replayed(file: Path) -> Iterator[dict[str, Any]]:
    """Races of the recorded grids of one seed, and of random parts of them."""
    generator, runs = np.random.default_rng(0), pandas.read_csv(file)
    for task, own in runs.groupby("task"):
        grids = [part.iloc[:, 4:].to_numpy() for _, part in own.groupby("seed")]
        grids = [grid for grid in grids if len(grid) == len(_RATES) * len(_BATCHES)]
        for setups, keep in itertools.product((6, 12, 18, 24), (by_ranks, halving)):
            drawn = [grids[number % len(grids)] for number in range(_RACES if setups < len(grids[0]) else len(grids))]
            parts = [grid[generator.choice(len(grid), setups, replace=False)] for grid in drawn]
            yield row(str(task), setups, keep, parts, _MARGIN)


def simulated() -> Iterator[dict[str, Any]]:
    """Random walks from doubling to doubling of training, from starts with a standard deviation of 3.

    `shrink`: of a step's variance from one doubling to the next. Without a difference between setups all are winners.
    """
    generator = np.random.default_rng(0)
    for shrink, setups, noise in itertools.product((0.25, 0.5, 1.0), (6, 16, 32), (0.3, 1.0, 3.0)):
        starts = 3 * generator.standard_normal((_RACES, setups, 1))
        steps = noise * generator.standard_normal((_RACES, setups, len(_AT))) * shrink ** (np.arange(len(_AT)) / 2)
        yield row(f"variance × {shrink:g}, first step {noise:g}", setups, by_ranks, list(starts + steps.cumsum(2)), 0.0)
    for setups in (6, 16, 32):
        noise_only = list(generator.standard_normal((_RACES, setups, len(_AT))))
        yield row("noise only", setups, by_ranks, noise_only, np.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "replay"):
        commands.add_parser(name).add_argument("file", type=Path)
    commands.choices["record"].add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    if options.command == "record":
        record(options.file, options.seeds)
        return
    pandas.set_option("display.width", 160)
    for rows in (replayed(options.file), simulated()):
        print(pandas.DataFrame(rows).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
