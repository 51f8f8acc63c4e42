"""Everything known about a run's speed, and the figures derived from it: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runner.train.throughput import PHASES
from runner.train.tokens import Tokens

#: The phases of a step whose time grows with the number of samples.
PER_SAMPLE = ("forward", "backward")


def flops_words(per_s: float) -> str:
    """Operations per second, in words."""
    return f"{per_s / 1e12:,.3g} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:,.3g} GFLOP/s"


@dataclass(frozen=True)
class Restarts:
    """Of the workers of one command, described in `sentences`.

    `earlier_s`: seconds until the last of them. `lost_s`: of these, the ones whose work no checkpoint kept.
    """

    sentences: tuple[str, ...] = ()
    earlier_s: float = 0.0
    lost_s: float = 0.0


@dataclass(frozen=True)
class SamplesRead:
    """Samples read in one epoch, or in the trained part of it, over all workers. `expected`: as planned."""

    expected: int
    seen: int
    unique: int


@dataclass(frozen=True)
class Collectives:
    """What one worker sent in collectives during a run, and the seconds in which one was in flight."""

    synchronisations: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Baseline:
    """A run of one worker, named by its folder. `compute_s`: seconds of forward and backward pass per sample."""

    folder: str
    samples_per_s: float
    micro_batch: int
    compute_s: float | None


@dataclass(frozen=True)
class RunNumbers:
    """None: unknown.

    `device`: the setup's name for it (`gpu4`). `local_workers`: on each machine. `cores`: of this machine, if workers
    compute on them. `k`: optimizer steps between two synchronisations; `largest_k`: the largest possible value, None if
    the settings leave no choice. `few_lengths`: batches are padded to one of a few lengths. `can_unpad`: of the recipe.
    `pads_to`: its setting `padding`, unless it is none. `compiled`: by `compile=true`.

    Seconds: `wall_s` of the whole run, `earlier_s` of which before its workers were last started again, `lost_s` of
    which without effect; `training_s` of their steps after the first, `first_step_s` until the end of that,
    `evaluation_s` of evaluation and of the ledger, `compile_s` of compiling programs, `first_step_compile_s` of which
    until the end of the first step; `step_s`: of an optimizer step on rank 0, by phase. `samples_per_s`: over all
    workers.

    `samples_seen`: of which `tokens` are. `flops_per_sample`: floating-point operations of forward and backward pass;
    `peak_flops_per_s`: of the devices of all workers. `peak_memory_bytes`: of each worker, by rank.
    `waited_share`: of the time in which threads could have run, in which they had no core.
    """

    device: str
    rehearsed: bool
    world_size: int
    local_workers: int
    cores: int | None
    jobs_at_once: int
    unit: str
    samples_per_epoch: int
    micro_batch: int
    replica_batch: int
    k: int
    largest_k: int | None
    length_sorted: bool
    few_lengths: bool
    can_unpad: bool
    pads_to: str | None
    compiled: bool
    wall_s: float
    earlier_s: float = 0.0
    lost_s: float = 0.0
    training_s: float | None = None
    first_step_s: float | None = None
    evaluation_s: float | None = None
    compile_s: float | None = None
    first_step_compile_s: float | None = None
    samples_per_s: float | None = None
    step_s: Mapping[str, float] | None = None
    collectives: Collectives | None = None
    tokens: Tokens | None = None
    samples_seen: int | None = None
    flops_per_sample: float | None = None
    peak_flops_per_s: float | None = None
    peak_memory_bytes: tuple[int, ...] | None = None
    waited_share: float | None = None
    reading: SamplesRead | None = None
    baseline: Baseline | None = None

    @property
    def step_share(self) -> dict[str, float] | None:
        """The share of each phase in the time of a step; they add up to 1."""
        total = sum(self.step_s.values()) if self.step_s else 0.0
        return {phase: self.step_s[phase] / total for phase in PHASES} if self.step_s and total > 0 else None

    @property
    def training_share(self) -> float:
        """Of the run's time; 1 if the time of training is unknown."""
        return 1.0 if self.training_s is None else min(self.training_s / self.wall_s, 1.0)

    @property
    def ending_s(self) -> float | None:
        """Seconds that were neither start-up, training, evaluation nor compiling; None for a run that did not finish.

        Compiling during evaluation is subtracted twice, so this is a lower bound.
        """
        if self.first_step_s is None:
            return None
        later_compile_s = (self.compile_s or 0.0) - (self.first_step_compile_s or 0.0)
        known = (self.earlier_s, self.first_step_s, self.training_s, self.evaluation_s, later_compile_s)
        return max(self.wall_s - sum(seconds or 0.0 for seconds in known), 0.0)

    @property
    def compute_s(self) -> float | None:
        """Seconds of forward and backward pass per sample and worker."""
        return sum(self.step_s[phase] for phase in PER_SAMPLE) / self.replica_batch if self.step_s else None

    @property
    def scaling_efficiency(self) -> float | None:
        """Samples per second ÷ (workers × the baseline's samples per second)."""
        if self.baseline is None or self.samples_per_s is None:
            return None
        return self.samples_per_s / (self.world_size * self.baseline.samples_per_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of samples, without padding, over all workers."""
        if self.tokens is None or not self.samples_seen or self.samples_per_s is None:
            return None
        return self.tokens.of_samples / self.samples_seen * self.samples_per_s

    @property
    def model_flops_utilization(self) -> float | None:
        """Operations that the model needs for the samples of a second, as a share of the devices' peak.

        Chowdhery et al. 2022, "PaLM: scaling language modeling with pathways". Padding and operations that are repeated
        for gradient checkpointing lower it.
        """
        if None in (self.flops_per_sample, self.samples_per_s) or not self.peak_flops_per_s:
            return None
        return self.flops_per_sample * self.samples_per_s / self.peak_flops_per_s  # type: ignore[operator]

    @property
    def compute_utilization(self) -> float | None:
        """The same while a step computes, with padding: how fast forward and backward pass are. None if unknown."""
        share = self.in_steps(*PER_SAMPLE)
        if self.model_flops_utilization is None or not share:
            return None
        padding = self.tokens.padding_share if self.tokens is not None else 0.0
        return self.model_flops_utilization / share / (1 - padding)

    @property
    def link_gbit_per_s(self) -> float | None:
        """The rate at which a worker sends during a ring all-reduce: 2 (n − 1) / n times the size of the tensor.

        Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations". A lower bound for
        the link's speed, since workers also wait for each other.
        """
        of = self.collectives
        if of is None or self.world_size == 1 or of.seconds <= 0:
            return None
        return 8e-9 * of.bytes / of.seconds * 2 * (self.world_size - 1) / self.world_size

    def in_steps(self, *phases: str) -> float:
        """The share of these phases in a step; 0 if unknown."""
        shares = self.step_share
        return sum(shares[phase] for phase in phases) if shares else 0.0

    def of_wall(self, seconds: float | None) -> float:
        """Seconds as a share of the whole run; 0 if unknown."""
        return 0.0 if seconds is None else min(seconds / self.wall_s, 1.0)

    @property
    def computing(self) -> float:
        """The share of forward and backward pass in the run's time; all of training if steps have no phases."""
        return self.training_share * (self.in_steps(*PER_SAMPLE) if self.step_share else 1.0)
