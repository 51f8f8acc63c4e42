"""A sweep and its jobs, as files: `sweep.json`, one `job.json` per attempt at a job, and each job's `summary.json`.

Nothing else is shared between the command and its jobs, so it is the same under every Hydra launcher.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config.plain import to_plain
from runner.errors import UserError
from runner.folder.files import write_json
from runner.folder.metrics_log import MetricsReader
from runner.folder.reading import folders_with, read_json
from runner.folder.record import FINISHED, STOPPED, RunRecord
from runner.tools.compare.design import Design
from runner.track.secrets import without_credentials

FILE_NAME, JOB_FILE, RACE_FILE = "sweep.json", "job.json", "race.json"
#: The overrides of a job; without a seed those of a setup.
Overrides = tuple[str, ...]
#: The status of a job without a `summary.json`.
RUNNING = "RUNNING"


@dataclass(frozen=True)
class Sweep:
    """What the jobs of one command share. Launchers pickle it, to files as well, so it holds no secrets.

    `folder`: contains the jobs' folders; its name is the sweep's id. `command`: the overrides. `varied`: the settings
    that differ between jobs. `jobs`: their names, None if an optimizing sweeper chooses them; `total`: their number,
    None if unknown. `at_once`: how many run in parallel on this machine. `in_process`: whether they run in the
    command's process. `divides_machine`: whether each locks the GPUs or cores that it uses. `key`: of the parent run's
    card, None if the sweep is not tracked. `started_at`: seconds since the epoch. `design`: with `seed=auto`, when
    seeds are no longer added; `asked`: on what verdicts depend besides. `host`: where the command runs.
    """

    folder: str
    command: tuple[str, ...]
    varied: tuple[str, ...]
    jobs: tuple[str, ...] | None
    total: int | None
    at_once: int
    in_process: bool
    divides_machine: bool
    key: str | None
    started_at: float
    design: Design | None = None
    asked: Mapping[str, Any] | None = None
    host: str = field(default_factory=socket.gethostname)

    @property
    def id(self) -> str:
        return Path(self.folder).name

    def write(self) -> None:
        """Write `sweep.json`."""
        write_json(Path(self.folder, FILE_NAME), without_credentials({"id": self.id, **to_plain(self)}))

    def varied_by(self, overrides: Sequence[str]) -> dict[str, str]:
        """A job's values of the settings that vary."""
        pairs = (override.lstrip("+").partition("=") for override in overrides)
        return {key: value for key, _, value in pairs if key in self.varied}

    def states(self) -> list[JobState]:
        """The current state of each job that has started."""
        return latest(attempts(Path(self.folder)), self.jobs)


def check_same_question(folder: Path, design: Design | None, asked: Mapping[str, Any] | None) -> None:
    """Refuse to resume the sweep in a folder with another question than it has had so far. Raises UserError."""
    before, now = read_json(folder / FILE_NAME), {"design": design and to_plain(design), "asked": asked}
    if any(before.get(name) != value for name, value in now.items()):
        raise UserError(
            f"the sweep {folder.name} was started with other seeds, setups or decide.* settings, on which the "
            "certainty of its verdicts depends: resume it with the same, or start another sweep"
        )


def job_name(overrides: Sequence[str]) -> str:
    """A job's name: its overrides, in an order that does not depend on the command line."""
    return " ".join(sorted(overrides))


def setup_of(job: Sequence[str]) -> Overrides:
    """A job's overrides without its seed."""
    return tuple(override for override in job if not override.startswith("seed="))


@dataclass(frozen=True)
class JobState:
    """One attempt at a job.

    `names`: its overrides; several if different overrides mean the same settings. `shown`: the settings that vary.
    `started_at`: seconds since the epoch. `digest`: of its settings and data, None if it had invalid ones. `wall_s`,
    `error`, `user_error`, `steps` (of the optimizer): once it has ended. `wanted_at`: when a job with its settings was
    last asked for, and not run again.
    """

    folder: Path
    names: tuple[str, ...]
    shown: str
    started_at: float
    status: str
    digest: str | None = None
    wall_s: float | None = None
    error: str | None = None
    user_error: bool = False
    steps: int | None = None
    wanted_at: float | None = None

    @property
    def share_done(self) -> float:
        """The share of its optimizer steps that the job has done, from 0 to 1."""
        if self.status not in (RUNNING, STOPPED):
            return 1.0
        steps = self.steps
        if steps is None:
            logged = [metric.step for metric in MetricsReader(self.folder).read() if metric.key == "train/loss"]
            steps = logged[-1] if logged else 0
        return steps / max(1, int(read_json(self.folder / "plan.json")["optimizer_steps"])) if steps else 0.0


def write_job(folder: Path, name: str, shown: str, started_at: float, digest: str | None) -> None:
    """Write `job.json`, which makes a folder an attempt at a job."""
    write_json(folder / JOB_FILE, {"names": [name], "shown": shown, "started_at": started_at, "digest": digest})


def note_wanted(folder: Path, name: str) -> None:
    """Note that a finished job is wanted again, perhaps by a new name: other overrides that mean the same settings."""
    content = read_json(folder / JOB_FILE)
    names = [*content["names"], *([name] if name not in content["names"] else [])]
    write_json(folder / JOB_FILE, {**content, "names": names, "wanted_at": time.time()})


def attempts(sweep_folder: Path) -> list[JobState]:
    """Every attempt at every job, the oldest first."""
    found = []
    for folder in folders_with(JOB_FILE, sweep_folder):
        if content := _read(folder / JOB_FILE):
            record = RunRecord.read_if_valid(folder) or RunRecord(RUNNING)
            state = JobState(
                folder=folder,
                names=tuple(content["names"]),
                shown=content["shown"],
                started_at=content["started_at"],
                status=record.status,
                digest=content.get("digest"),
                wall_s=record.wall_s,
                error=record.error,
                user_error=record.user_error,
                steps=record.result.optimizer_steps,
                wanted_at=content.get("wanted_at"),
            )
            found.append(state)
    return sorted(found, key=lambda state: state.started_at)


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = read_json(path)
    except UserError:  # a machine that crashes may leave an empty file
        return {}
    return content


def latest(found: Iterable[JobState], jobs: Sequence[str] | None) -> list[JobState]:
    """The last attempt at each job, but of those with the same settings and data the one that finished.

    `jobs`: names to consider, None for all.
    """
    by_name: dict[str, JobState] = {}
    for state in sorted(found, key=lambda state: state.wanted_at or state.started_at):
        for name in state.names:
            before = by_name.get(name)
            counts = before is None or before.status != FINISHED or before.digest != state.digest
            if counts and (jobs is None or name in jobs):
                by_name[name] = state
    return list(by_name.values())


@dataclass(frozen=True)
class Rung:
    """Where a race lets jobs train to now. `until`: the share of training; `setups`: at the start of the race."""

    until: float = 1.0
    setups: int | None = None

    def write(self, sweep_folder: Path) -> None:
        write_json(sweep_folder / RACE_FILE, to_plain(self))

    @staticmethod
    def read(sweep_folder: Path) -> Rung:
        """The end of training in a sweep without a race."""
        path = sweep_folder / RACE_FILE
        return Rung(**read_json(path)) if path.exists() else Rung()


def finished_run(sweep_folder: Path, digest: str, until: float = 1.0) -> Path | None:
    """The folder of a job with exactly these settings and data that has finished, or this share of its training."""
    own = [state for state in attempts(sweep_folder) if state.digest == digest]
    found = (one for one in own if one.status == FINISHED or (one.status == STOPPED and one.share_done >= until))
    return next((state.folder for state in found), None)
