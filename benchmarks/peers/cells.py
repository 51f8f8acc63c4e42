"""What is measured: tasks, variants, and which of them in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

#: Steps at which a time is taken: the first and every tenth after it, where the runner logs by default.
EVERY = 10


@dataclass(frozen=True)
class Task:
    """`batch`: samples per optimizer step of all workers. `steps`: of the run whose speed is measured, the long one."""

    name: str
    recipe: str
    batch: int
    lr: float
    steps: int


TASKS = {
    task.name: task
    for task in (
        Task("cola", "cola", batch=32, lr=1e-4, steps=41),
        Task("squad", "squad", batch=8, lr=3e-5, steps=21),
        Task("gpt2", "causal_lm", batch=8, lr=5e-5, steps=21),
    )
}

#: Steps before the speed is measured: memory is touched for the first time, and the runner's parent imports MLflow.
_SKIPPED = 11

SHORT_STEPS = 20

#: The length-grouping sampler sorts stretches of 50 batches, so that 50 measured steps have the lengths of all data.
_GROUPED_STEPS = _SKIPPED + 50

#: What is measured of them: `limit` is no training (see `limit.py`), and the shares of others refer to it.
LIMIT, OURS, BASE = "limit", "runner", "accelerate"
PROGRAMS = (LIMIT, OURS, BASE, "trainer", "trainer_grouped", "plain")
PRECISIONS = ("fp32", "bf16", "tf32")  # the last on GPUs only
_ON_GPUS = (
    *("runner_compile", "accelerate_compile", "trainer_compile", "plain_compile"),
    *("accelerate_flash", "trainer_flash", "plain_flash"),
)
_NAME = re.compile(rf"(?P<program>{'|'.join(PROGRAMS)})(?P<compile>_compile)?(?P<flash>_flash)?")


@dataclass(frozen=True)
class Variant:
    """`compile`: with torch.compile. `flash`: with the package flash-attn instead of torch's SDPA, for peers."""

    program: str
    compile: bool = False
    flash: bool = False


def parse(name: str) -> Variant:
    """A variant by its name, such as `plain_compile`. Raises ValueError."""
    found = _NAME.fullmatch(name)
    if found is None or (found["program"] in (LIMIT, OURS) and found["flash"]) or name == f"{LIMIT}_compile":
        known = f"{', '.join(PROGRAMS)}; also with _compile or, for peers, _flash"
        raise ValueError(f"--variants {name} is invalid: use {known}")
    return Variant(found["program"], found["compile"] is not None, found["flash"] is not None)


@dataclass(frozen=True)
class Cell:
    """One run: `variant` by name. `steps`: optimizer steps, 0 for the limit."""

    task: str
    workers: int
    precision: str
    variant: str
    steps: int

    @property
    def skipped(self) -> int:
        """Steps before the speed is measured."""
        return min(_SKIPPED, (self.steps - 2) // EVERY * EVERY + 1)


def cells(complete: bool, device: str, asked: Sequence[str] = ()) -> Iterator[Cell]:
    """Those of one repetition, in order: variants that are compared are neighbours. `asked`: variants by name.

    Not complete: all variants of CoLA on one worker; elsewhere only the runner, Accelerate and those asked for, with
    one worker for SQuAD and GPT-2.
    """
    everything = dict.fromkeys((*PROGRAMS, *(_ON_GPUS if device == "cuda" else ()), *asked))
    for task in TASKS.values():
        for workers in (1, 2) if complete or task.name == "cola" else (1,):
            for precision in PRECISIONS if device == "cuda" else PRECISIONS[:2]:
                every = complete or (task.name, workers) == ("cola", 1)
                names = everything if every else dict.fromkeys((LIMIT, OURS, BASE, *asked))
                for name in names:
                    variant = parse(name)
                    if variant.program == "trainer_grouped" and task.name == "gpt2":
                        continue  # its rows are equally long
                    if variant.flash and precision != "bf16":
                        continue  # flash-attn has no other number format of these
                    yield Cell(task.name, workers, precision, name, _steps(task, variant))
                if task.name == "cola" and (complete or (workers, precision) == (1, "fp32")):
                    short = ("trainer", "plain") if complete else ()
                    yield from (Cell(task.name, workers, precision, name, SHORT_STEPS) for name in (OURS, BASE, *short))


def _steps(task: Task, variant: Variant) -> int:
    if variant.program == LIMIT:
        return 0
    return _GROUPED_STEPS if variant.program == "trainer_grouped" else task.steps


def in_trial(every: Sequence[Cell], steps: int) -> list[Cell]:
    """The same with a few steps, so that only the script itself is tried."""
    return list(dict.fromkeys(replace(cell, steps=steps) if cell.steps else cell for cell in every))


def chosen(
    every: Sequence[Cell], tasks: Sequence[str], workers: Sequence[int], precisions: Sequence[str], names: Sequence[str]
) -> list[Cell]:
    """The cells with these properties; no restriction where a list is empty."""
    return [
        cell
        for cell in every
        if (not tasks or cell.task in tasks)
        and (not workers or cell.workers in workers)
        and (not precisions or cell.precision in precisions)
        and (not names or cell.variant in names)
    ]
