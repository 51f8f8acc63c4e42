"""Everything known about a run's speed, and the figures derived from it: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from runner.cost.step import ring_bytes
from runner.folder.record import RunResult
from runner.plan import Plan
from runner.train.throughput import PHASES

#: The phases of a step whose time grows with the number of samples.
PER_SAMPLE = ("forward", "backward")


def flops_words(per_s: float) -> str:
    """Operations per second, in words."""
    return f"{per_s / 1e12:,.3g} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:,.3g} GFLOP/s"


@dataclass(frozen=True)
class Restarts:
    """Restarts of the workers of one command, described in `sentences`.

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
class Baseline:
    """A run of one worker, named by its folder. `compute_s`: seconds of forward and backward pass per sample."""

    folder: str
    samples_per_s: float
    micro_batch: int
    compute_s: float | None


@dataclass(frozen=True)
class RunNumbers:
    """A setup, what its run has measured, and the run of one worker that it is compared with. None: unknown.

    `device`: the setup's name for it (`gpu4`). `local_workers`: on each machine. `cores`: of this machine, if workers
    compute on them. `largest_k`: the largest possible `sync.k`, None if the settings leave no choice. `few_lengths`:
    batches are padded to one of a few lengths. `can_unpad`: of the recipe. `pads_to`: its setting `padding`, unless it
    is none. `compiled`: by `compile=true`.

    `wall_s`: seconds of the whole run; `training_s`: of its steps after the first.
    """

    plan: Plan
    device: str
    rehearsed: bool
    local_workers: int
    cores: int | None
    jobs_at_once: int
    unit: str
    largest_k: int | None
    length_sorted: bool
    few_lengths: bool
    can_unpad: bool
    pads_to: str | None
    compiled: bool
    wall_s: float
    result: RunResult
    restarts: Restarts
    training_s: float | None = None
    reading: SamplesRead | None = None
    baseline: Baseline | None = None

    @property
    def step_share(self) -> dict[str, float] | None:
        """The share of each phase in the time of a step; they add up to 1."""
        seconds = self.result.step_s or {}
        total = sum(seconds.values())
        return {phase: seconds[phase] / total for phase in PHASES} if total > 0 else None

    @property
    def training_share(self) -> float:
        """Share of the run's time; 1 if the time of training is unknown."""
        return 1.0 if self.training_s is None else min(self.training_s / self.wall_s, 1.0)

    @property
    def ending_s(self) -> float | None:
        """Seconds that were neither start-up, training, evaluation nor compiling; None for a run that did not finish.

        Compiling during evaluation is subtracted twice, so this is a lower bound.
        """
        result = self.result
        if result.first_step_s is None:
            return None
        later_compile_s = (self.compile_s or 0.0) - (result.first_step_compile_s or 0.0)
        known = (self.restarts.earlier_s, result.first_step_s, self.training_s, result.evaluation_s, later_compile_s)
        return max(self.wall_s - sum(seconds or 0.0 for seconds in known), 0.0)

    @property
    def compute_s(self) -> float | None:
        """Seconds of forward and backward pass per sample and worker."""
        seconds = self.result.step_s
        return sum(seconds[phase] for phase in PER_SAMPLE) / self.plan.replica_batch if seconds else None

    @property
    def compile_s(self) -> float | None:
        """Seconds of compiling programs."""
        return None if self.result.compilations is None else self.result.compilations.seconds

    @property
    def scaling_efficiency(self) -> float | None:
        """Samples per second ÷ (workers × the baseline's samples per second)."""
        if self.baseline is None or self.result.samples_per_s is None:
            return None
        return self.result.samples_per_s / (self.plan.world_size * self.baseline.samples_per_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of samples, without padding, over all workers."""
        result = self.result
        if result.tokens is None or not result.samples_seen or result.samples_per_s is None:
            return None
        return result.tokens.of_samples / result.samples_seen * result.samples_per_s

    @property
    def model_flops_utilization(self) -> float | None:
        """Operations that the model needs for the samples of a second, as a share of the devices' peak.

        Chowdhery et al. 2022, "PaLM: scaling language modeling with pathways". Padding and operations that are repeated
        for gradient checkpointing lower it.
        """
        result = self.result
        if result.flops_per_sample is None or result.samples_per_s is None or not result.peak_flops_per_s:
            return None
        return result.flops_per_sample * result.samples_per_s / result.peak_flops_per_s

    @property
    def compute_utilization(self) -> float | None:
        """The same while a step computes, with padding: how fast forward and backward pass are. None if unknown."""
        share = self.in_steps(*PER_SAMPLE)
        if self.model_flops_utilization is None or not share:
            return None
        padding = self.result.tokens.padding_share if self.result.tokens is not None else 0.0
        return self.model_flops_utilization / share / (1 - padding)

    @property
    def link_gbit_per_s(self) -> float | None:
        """The rate at which a worker sends during a ring all-reduce.

        A lower bound for the link's speed, since workers also wait for each other.
        """
        sent, seconds = self.result.comm_bytes, self.result.comm_s
        if self.plan.world_size == 1 or sent is None or not seconds:
            return None
        return ring_bytes(8e-9 * sent / seconds, self.plan.world_size)

    def in_steps(self, *phases: str) -> float:
        """The share of these phases in a step; 0 if unknown."""
        shares = self.step_share
        return sum(shares[phase] for phase in phases) if shares else 0.0

    def of_wall(self, seconds: float | None) -> float:
        """Seconds as a share of the whole run; 0 if unknown."""
        return self.share_of_wall(seconds) or 0.0

    def share_of_wall(self, seconds: float | None) -> float | None:
        """The same; None if unknown."""
        return None if seconds is None else min(seconds / self.wall_s, 1.0)

    @property
    def computing(self) -> float:
        """The share of forward and backward pass in the run's time; all of training if steps have no phases."""
        return self.training_share * (self.in_steps(*PER_SAMPLE) if self.step_share else 1.0)
