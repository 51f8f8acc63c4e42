"""The variants by name: program, workers, synchronisation period, and number of steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Samples per worker and optimizer step.
REPLICA_BATCH = 16

KS = (1, 2, 4, 8, 16, 32)

#: Measured steps of two workers are a multiple of this, so that windows of every k are whole.
LONGEST_WINDOW = max(KS)

#: Minimum warm-up steps of two workers, in which memory is touched for the first time.
_WARM_UP = 16

#: Variants whose steps are so slow that fewer of them take as long.
_SLOW_KS = (1, 2)

_NAME = re.compile(
    r"(?P<alone>one|apart|accelerate_one)"
    r"|runner_k(?P<k>\d+)(?P<overlap>_overlap|_streaming)?(?P<compress>_bf16|_fp16|_int8)?(?:_delay(?P<delay>\d+))?"
    r"|accelerate_ddp(?P<hook>_fp16)?"
    r"|accelerate_local_sgd_k(?P<local_k>\d+)"
)


@dataclass(frozen=True)
class Variant:
    """`workers`: of one world. `copies`: independent worlds that run at the same time.

    `k`: optimizer steps between two synchronisations. `compress`: none, bf16, fp16 or int8. `delay`: None for the
    default. `streaming`: overlap with as many fragments as a round has steps.
    """

    name: str
    program: str  # runner or accelerate
    workers: int
    k: int = 1
    copies: int = 1
    overlap: bool = False
    streaming: bool = False
    compress: str = "none"
    delay: int | None = None
    local_sgd: bool = False

    @property
    def step_samples(self) -> int:
        """Samples of all workers in one optimizer step."""
        return REPLICA_BATCH * self.workers

    @property
    def steps_in_flight(self) -> int:
        """Optimizer steps while an average is in flight."""
        default = 1 if self.streaming else -(-self.k // 2)
        return (self.delay or default) if self.overlap else 0


def parse(name: str) -> Variant:
    """A variant by its name. Raises ValueError."""
    found = _NAME.fullmatch(name)
    k = int((found and (found["k"] or found["local_k"])) or 1)
    if found is None or k < 1 or LONGEST_WINDOW % k:
        raise ValueError(f"--only {name} is invalid: use {', '.join(DEFAULT)}, or other powers of two up to 32 for k")
    if found["alone"]:
        program = "accelerate" if name == "accelerate_one" else "runner"
        return Variant(name, program, workers=1, copies=2 if name == "apart" else 1)
    if name.startswith("accelerate"):
        compress = "fp16" if found["hook"] else "none"
        return Variant(name, "accelerate", workers=2, k=k, compress=compress, local_sgd=found["local_k"] is not None)
    delay = int(found["delay"]) if found["delay"] else None
    overlap, streaming = found["overlap"] is not None, found["overlap"] == "_streaming"
    compress = (found["compress"] or "_none")[1:]
    return Variant(name, "runner", workers=2, k=k, overlap=overlap, streaming=streaming, compress=compress, delay=delay)


def _default_names() -> list[str]:
    """One worker first, since the others are compared with it."""
    blocking = [f"runner_k{k}" for k in KS]
    # k = 1 always overlaps with the backward pass; there is no other overlap.
    best = ["runner_k1_bf16", *(f"runner_k{k}_overlap_bf16" for k in KS if k > 1)]
    best += ["runner_k4_overlap_bf16_delay3", "runner_k16_overlap_bf16_delay4"]
    best += [f"runner_k{k}_streaming_{compress}" for k in KS if k > 2 for compress in ("bf16", "int8")]
    # Accelerate's bf16 hook is torch's, which needs GPUs; the fp16 hook does not.
    peers = ["accelerate_one", "accelerate_ddp", "accelerate_ddp_fp16"]
    return ["one", "apart", *blocking, *best, *peers, *(f"accelerate_local_sgd_k{k}" for k in KS if k > 1)]


DEFAULT = tuple(_default_names())


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of a run: up to `first` is warm-up, `measured` follow, and `total` are all."""

    first: int
    measured: int
    total: int


def steps_of(variant: Variant, measured: int) -> Steps:
    """The steps of a variant, if two workers are measured for `measured` steps.

    One worker trains on the same samples in twice as many steps, since batches differ in length.
    """
    if variant.workers == 1:
        return Steps(2 * _WARM_UP, 2 * measured, 2 * (_WARM_UP + measured))
    if variant.k in _SLOW_KS:
        measured = max(variant.k, measured // 2)
    first = max(_WARM_UP, variant.k)
    # With overlap an average finishes in the middle of a window, so time is measured between those points.
    return Steps(first, measured, first + measured + (variant.k if variant.overlap else 0))
