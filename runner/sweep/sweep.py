"""A sweep as each of its jobs knows it, in whatever process or machine the job runs."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.config.plain import to_plain
from runner.folder.files import write_json
from runner.track.secrets import without_credentials

FILE_NAME = "sweep.json"


@dataclass(frozen=True)
class Sweep:
    """What the jobs of one command have in common; plain data, since launchers send it to other processes.

    Launchers keep it in files, too, so nothing in it may be secret: where to log a job finds in its own settings.

    `folder`: holds the jobs' folders; its name is the sweep's id. `command`: the overrides. `varied`: the settings that
    differ between jobs. `jobs`: every job by name, None where a sweeper decides as it goes; `total`: how many, None if
    that is not known. `at_once`: how many run side by side on this machine. `in_process`: whether they run in the
    command's own process. `key`: of the sweep's card in the tracking store, None if it is not tracked. `started_at`:
    seconds since the epoch. `host`: where the command runs.
    """

    folder: str
    command: tuple[str, ...]
    varied: tuple[str, ...]
    jobs: tuple[str, ...] | None
    total: int | None
    at_once: int
    in_process: bool
    key: str | None
    started_at: float
    host: str = field(default_factory=socket.gethostname)

    @property
    def id(self) -> str:
        return Path(self.folder).name

    def write(self) -> None:
        """Leave `sweep.json` in the sweep's folder."""
        content = {"id": self.id, **to_plain(self)}
        write_json(Path(self.folder, FILE_NAME), without_credentials(content))

    def varied_by(self, overrides: Sequence[str]) -> dict[str, str]:
        """What a job with these overrides has as its own, among the settings that vary."""
        pairs = (override.lstrip("+").partition("=") for override in overrides)
        return {key: value for key, _, value in pairs if key in self.varied}


def job_name(overrides: Sequence[str]) -> str:
    """A job by what it overrides, in whatever order that was typed."""
    return " ".join(sorted(overrides))


def tags_of(sweep: Sweep, varied: Mapping[str, str]) -> dict[str, str]:
    """The tags by which a store's user finds the jobs of a sweep, and what is special about each."""
    return {"sweep.id": sweep.id, **{f"varied.{key}": value for key, value in varied.items()}}
