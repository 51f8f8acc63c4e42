"""`summary.json`: how a run ended and what it measured, written and read as one typed record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config.plain import from_plain, to_plain
from runner.errors import UserError, first_line
from runner.folder.files import write_json
from runner.folder.reading import read_json

FILE_NAME = "summary.json"
#: Rises when an entry changes its meaning. Files from before there was a version are read as well.
VERSION = 1
#: Ends of a run. PREEMPTED: it was asked to make room; STOPPED: before its end, by a sweep that races its setups.
#: Both can be resumed.
FINISHED, FAILED, KILLED, PREEMPTED, STOPPED = "FINISHED", "FAILED", "KILLED", "PREEMPTED", "STOPPED"


@dataclass(frozen=True)
class Tokens:
    """Tokens that a model computed in training, by kind.

    `of_samples`: tokens of samples. The others are padding: `uneven` up to the longest sample of a batch, `beyond` from
    there to the width of the batch, `fillers` in filler rows.
    """

    of_samples: int = 0
    uneven: int = 0
    beyond: int = 0
    fillers: int = 0

    @property
    def padding_share(self) -> float:
        padding = self.uneven + self.beyond + self.fillers
        return padding / (self.of_samples + padding)

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclass(frozen=True)
class NoiseScale:
    """Over a whole run. `scale`: in samples, with its standard error; None if tr(Σ) or |G|² is within its error of 0.

    `trace`: tr(Σ); `squared_gradient`: |G|²; None for local steps, whose updates are compared in units of the weights.
    `measurements`: how many.
    """

    scale: float | None
    standard_error: float | None
    trace: float | None
    squared_gradient: float | None
    measurements: int


@dataclass(frozen=True)
class Compilations:
    """Programs that this process has compiled, the seconds that took, and programs loaded from the cache on disk."""

    count: int
    seconds: float
    from_cache: int


@dataclass(frozen=True)
class SmallerMicroBatches:
    """Memory was too little for step `after_step` + 1: from there on each worker has more micro-batches."""

    after_step: int
    accumulation_steps: int


@dataclass(frozen=True)
class RunResult:
    """The measurements of rank 0 at the end of training; None: unknown, as in a run that failed.

    `optimizer_steps`, `samples_seen`: completed. `applied_steps`, `skipped_steps`: optimizer steps that changed the
    weights, and those that the fp16 loss scaler skipped. `samples_per_s`: over all workers, after the first step.
    `first_step_s`: from the start of the command, or of workers that were started again, to the end of the first step,
    in `first_step_compile_s` of which programs were compiled. `comm_*`: of this worker's collectives for training.
    `checkpoint_stall_s`: for which training stood still to save. `sync`: statistics of local phases. `step_s`: seconds
    of an optimizer step by phase. `evaluation_s`: of all evaluations. `flops_per_sample`: operations to train a sample,
    `peak_flops_per_s`: what the devices of all workers could do (see train/flops.py). `peak_memory_bytes`: of each
    worker, by rank. `waited_share`: of the time in which this worker's threads could have run, in which they had no
    core. `noise`: of the gradient, where it was measured. `compilations`: of the whole run. `train_loss`:
    mean over the run. `eval`: the metrics of the saved weights. `best`: the step and value of the best evaluation.
    `batch_statistics`: whether the model has batch normalisation. `parameters`: of the model, with those of an adapter,
    and how many of them are trained. `truncated`: how many texts the recipe has truncated (see `Recipe.prepare`).
    `machine`: the hardware, in words. `weights_digest`: of the weights that were trained, before an adapter is merged,
    where any number of workers must have the same.
    `smaller_micro_batches`: than planned, for lack of memory.
    """

    optimizer_steps: int | None = None
    applied_steps: int | None = None
    skipped_steps: int | None = None
    samples_seen: int | None = None
    samples_per_s: float | None = None
    first_step_s: float | None = None
    first_step_compile_s: float | None = None
    synchronisations: int | None = None
    comm_bytes: int | None = None
    comm_s: float | None = None
    comm_stall_s: float | None = None
    checkpoint_stall_s: float | None = None
    sync: Mapping[str, Any] | None = None
    step_s: Mapping[str, float] | None = None
    evaluation_s: float | None = None
    tokens: Tokens | None = None
    flops_per_sample: float | None = None
    peak_flops_per_s: float | None = None
    peak_memory_bytes: tuple[int, ...] | None = None
    waited_share: float | None = None
    compilations: Compilations | None = None
    train_loss: float | None = None
    noise: NoiseScale | None = None
    eval: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None
    batch_statistics: bool = False
    parameters: int | None = None
    trained_parameters: int | None = None
    truncated: Any = None
    stopped_early: bool | None = None
    machine: str | None = None
    weights_digest: str | None = None
    smaller_micro_batches: tuple[SmallerMicroBatches, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSize:
    """Rows of the tables, the groups (such as questions) that they belong to, and what a constant answer scores."""

    train_samples: int | None = None
    eval_samples: int | None = None
    unit: str | None = None
    groups: str | None = None
    train_groups: int | None = None
    eval_groups: int | None = None
    constant: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SpeedFigures:
    """Figures from a result, and from the run of one worker that it is compared with; None: unknown.

    `samples_per_epoch`: that were read in the longest epoch, and as planned. `model_flops_utilization`: share of the
    devices' peak. `scaling_efficiency`: samples per second ÷ (workers × those of the `baseline`, a run's folder).
    `step_share`: of each phase in the time of a step. `link_gbit_per_s`: while a collective was in flight. Shares with
    names such as `start_up_share` are those of the whole run's time; `padding_share` is that of the tokens.
    """

    samples_per_epoch: int | None = None
    samples_per_epoch_planned: int | None = None
    tokens_per_s: float | None = None
    model_flops_utilization: float | None = None
    scaling_efficiency: float | None = None
    baseline: str | None = None
    baseline_samples_per_s: float | None = None
    step_share: Mapping[str, float] | None = None
    compute_s_per_sample: float | None = None
    link_gbit_per_s: float | None = None
    start_up_share: float | None = None
    evaluation_share: float | None = None
    ending_share: float | None = None
    restart_share: float | None = None
    compile_share: float | None = None
    padding_share: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """A reason why a run was not faster.

    `kind`: a fixed name. `lost_share`: share of the run's time that would be saved without the cause. `share`: what was
    measured, such as the share of padding in all tokens; None for a cause that is there or not. `settings`: what helps,
    as it is written on the command line; a name without a value stands for another value of it.
    """

    kind: str
    sentence: str
    lost_share: float
    share: float | None = None
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """A prediction, its interval where it has one, and what was measured."""

    predicted: float
    measured: float
    interval: tuple[float, float] | None = None
    error: float = field(init=False)

    def __post_init__(self) -> None:
        """Compute the share by which too much was predicted."""
        object.__setattr__(self, "error", self.predicted / self.measured - 1)


@dataclass(frozen=True)
class PredictionScores:
    """Predictions for a run from a measurement of the time `measured_at`, in seconds since the epoch."""

    measured_at: float | None
    training_s: Score
    wall_s: Score
    evaluation_s: Score
    peak_memory_bytes: Score | None


#: Parts of a result that are in the block `speed` of the file.
_IN_SPEED = ("tokens", "flops_per_sample", "peak_flops_per_s", "peak_memory_bytes", "waited_share")


@dataclass(frozen=True)
class RunRecord:
    """The end of a run, its setup, and its measurements; None: unknown, as in a run that was killed.

    `error`: why it failed, in a line; `user_error`: because of its settings; `diverged`: because numbers were not
    finite. `setup`: its name with the seed; `setup_digest`: equal for runs that differ only in the seed. `varied`: the
    settings that its sweep varies. `metric`, `goal`: of the objective. `jobs_at_once`: jobs that shared the machine.
    `design`: of the looks of a sweep that adds seeds, see `runner.tools.compare.design`; None for another. `raced`: how
    many setups began its race, None without one.
    `resumed_after`: the steps. `notes`: what may surprise, in sentences. `certificate`: its level. `speed_key`: equal
    for runs that should be equally fast. `diagnoses`: why it was not faster, the costliest cause first.
    """

    status: str
    error: str | None = None
    user_error: bool = False
    diverged: bool = False
    setup: str | None = None
    setup_digest: str | None = None
    seed: int | None = None
    varied: Mapping[str, str] = field(default_factory=dict)
    metric: str | None = None
    goal: str | None = None
    rehearsed: bool = False
    data: DataSize = DataSize()
    wall_s: float | None = None
    result: RunResult = RunResult()
    jobs_at_once: int | None = None
    design: Mapping[str, int] | None = None
    raced: int | None = None
    resumed_after: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    certificate: str | None = None
    mlflow_run_id: str | None = None
    speed_key: str | None = None
    speed: SpeedFigures = SpeedFigures()
    diagnoses: tuple[Diagnosis, ...] = ()
    prediction: PredictionScores | None = None

    @property
    def diagnosis(self) -> str | None:
        """The costliest cause, in a sentence."""
        return self.diagnoses[0].sentence if self.diagnoses else None

    @property
    def objective(self) -> float | None:
        """The value for an optimizing sweeper: the metric at the end of the run.

        None if the run diverged: sweepers treat that as a failed trial, and cannot rank NaN.
        """
        value = self.result.eval.get(self.metric or "")
        return value if value is not None and math.isfinite(value) else None

    def as_json(self) -> dict[str, Any]:
        """The content of `summary.json`: the entries of `result` are beside the others, or in the block `speed`."""
        content: dict[str, Any] = {"version": VERSION}
        for name, value in to_plain(self).items():
            content |= value if name == "result" else {name: value}
        content["speed"] |= {name: content.pop(name) for name in _IN_SPEED}
        content["speed"]["samples_per_s"] = self.result.samples_per_s
        return {**content, "diagnosis": self.diagnosis}

    def write(self, folder: Path) -> None:
        """Write `summary.json`, whose status says that the run has ended. Raises RunFailed."""
        write_json(folder / FILE_NAME, self.as_json())

    @staticmethod
    def read(folder: Path) -> RunRecord | None:
        """The record of the run in `folder`; None if it has not ended, or was killed. Raises UserError."""
        path = folder / FILE_NAME
        if not path.exists():
            return None
        # Any entry but the status may be missing in an older file.
        content = {name: value for name, value in read_json(path).items() if value is not None}
        if "evaluated" in content:
            raise UserError(f"{folder} holds the result of an evaluation: give the run or model that was evaluated")
        speed = content.get("speed", {})
        try:
            version = content.get("version", VERSION)
            if not isinstance(version, int) or version > VERSION:
                raise ValueError(f"a newer version of the runner has written it, as version {version}")
            if not isinstance(speed, Mapping):
                raise ValueError("speed is not a block of figures")
            in_speed = {name: speed[name] for name in _IN_SPEED if name in speed}
            return from_plain(RunRecord, {**content, "speed": speed, "result": {**content, **in_speed}})
        except ValueError as error:
            raise UserError(
                f"{path} is not the summary of a run ({first_line(error)}): restore it, or start a new run"
            ) from error

    @staticmethod
    def read_if_valid(folder: Path) -> RunRecord | None:
        """Read a record from a folder in any state: None as well for a file that is damaged, or something else."""
        try:
            return RunRecord.read(folder)
        except UserError:  # such as an empty file, which a machine that crashes may leave
            return None


def status_of(folder: Path) -> str | None:
    """The status at the end of the run in `folder`; None if it has not ended, or was killed. Raises UserError."""
    record = RunRecord.read(folder)
    return None if record is None else record.status


def amend(folder: Path, **entries: Any) -> None:
    """Change entries of a `summary.json`, and keep the others, which an evaluation or another version has written."""
    path = folder / FILE_NAME
    write_json(path, {**read_json(path), **entries})


def note_mlflow_run(folder: Path, run_id: str | None) -> None:
    """Add MLflow's run id to a `summary.json` that lacks it because the store did not answer at the end of the run."""
    path = folder / FILE_NAME
    if path.exists() and read_json(path).get("mlflow_run_id", run_id) is None:
        amend(folder, mlflow_run_id=run_id)
