"""`compile=true`, the number of compilations in a run, and the batch shapes that cause more of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from runner.backends import Compilations

#: Optimizer steps in which compilations are expected, and how many later ones are tolerated without a warning.
_WARM_UP_STEPS, _TOLERATED = 10, 5

#: Programs of one function, after which torch runs it uncompiled. transformers' layers of all kinds share a function,
#: and each kind has programs for training and evaluation, with and without padding, and for a single row.
_MOST_PROGRAMS = 64


def compile_model(model: nn.Module) -> None:
    """Have torch.compile compile the model's repeated layers, or all of it if it has none, when they first run.

    Layers of one kind share a program, so this takes the time of one layer and not of the whole model. Numbers of rows
    and tokens vary: the same programs serve all of them. The names in `model.state_dict()` stay.
    """
    from torch._dynamo import config  # takes a second, and few runs need it

    config.recompile_limit = max(config.recompile_limit, _MOST_PROGRAMS)
    layers = list(_repeated_layers(model))
    if not layers:
        model.compile(dynamic=True)
        return
    # DDP cuts programs into pieces so that gradients are sent early; gradients of a layer are sent early anyway.
    config.optimize_ddp = False
    for layer in layers:
        # Not `layer.compile`, which includes hooks: those that remove padding are on the first and the last layer only,
        # and would make these other programs than the rest.
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _repeated_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists that are all of one class, and made of other modules."""
    for child in module.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList) else []
        of_one_class = len({type(member) for member in members}) == 1 and not isinstance(members[0], nn.ModuleList)
        if of_one_class and any(members[0].children()):
            yield from members
        else:
            yield from _repeated_layers(child)


def compiled_by_torch() -> Callable[[], Compilations]:
    """A function that returns what torch.compile has compiled in this process since this call."""
    from torch._dynamo import utils  # takes a second, and few runs need it

    def total() -> Compilations:
        count, hits = utils.counters["stats"]["unique_graphs"], utils.counters["aot_autograd"]["autograd_cache_hit"]
        return Compilations(count, utils.calculate_time_spent()["total_wall_time"], hits)

    def since() -> Compilations:
        now = total()
        return Compilations(now.count - then.count, now.seconds - then.seconds, now.from_cache - then.from_cache)

    then = total()
    return since


class CompilationWatch:
    """Attributes new compilations to the work that was just done. The host compiles, so this is exact.

    `total`: all compilations so far; None if nothing compiles.
    """

    def __init__(self, total: Callable[[], Compilations | None]) -> None:
        self.total = total
        self._late: Counter[str] = Counter()
        self._first_step: int | None = None  # of this process: a resumed run compiles again
        self._last_late_step = 0
        self._before = self._count()

    def _count(self) -> int:
        total = self.total()
        return total.count if total is not None else 0

    def _new(self) -> int:
        before, self._before = self._before, self._count()
        return self._before - before

    def after_step(self, step: int, shapes: Mapping[str, torch.Size]) -> None:
        """Attribute new compilations to optimizer step `step` (counted from 1), whose last micro-batch has `shapes`."""
        new = self._new()
        self._first_step = self._first_step or step
        if new and step >= self._first_step + _WARM_UP_STEPS:
            self._late[", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())] += new
            self._last_late_step = step

    def after_evaluation(self) -> None:
        """Ignore compilations of an evaluation: it has its own programs, the same ones each time."""
        self._new()

    def warning(self) -> str | None:
        """One sentence if the run compiled more than a few programs after the first steps."""
        if self._late.total() <= _TOLERATED:
            return None
        shapes = list(self._late)
        shown = "; ".join(shapes[:3]) + (f"; and {len(shapes) - 3} more" if len(shapes) > 3 else "")
        return (
            f"{self._late.total()} compilations after the first {_WARM_UP_STEPS} optimizer steps, the last in step "
            f"{self._last_late_step}, for {shown}: use few batch shapes (check that the recipe's collate pads to "
            "the length it is given, and see device.length_buckets)"
        )
