"""Trials as lines of a JSON Lines file, so that a campaign can be run in pieces, and their tables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Trial:
    """One run and the faults injected into it.

    `case`: trials of a table's row. `name`: unique in the experiment. `seconds`: of the whole trial. `problems`: what
    was not as required. `faults`: for each its `target` and the `phase` of the run. `commit`: of the code, or empty.
    """

    experiment: str
    case: str
    name: str
    faults: Sequence[Mapping[str, Any]]
    problems: Sequence[str]
    seconds: float = 0.0
    commit: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def append(path: Path, trial: Trial) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # remove a line that was cut off
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(trial)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Trial]:
    """The trials that were made, without a last line that was cut off."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [Trial(**json.loads(line)) for line in lines if line.endswith("\n")]


def counts(trials: Sequence[Trial]) -> pd.DataFrame:
    """A row for each experiment and case: runs, faults, runs with a problem, and seconds for each fault."""
    rows = pd.DataFrame(
        {
            "experiment": trial.experiment,
            "case": trial.case,
            "runs": 1,
            "faults": len(trial.faults),
            "runs with a problem": int(bool(trial.problems)),
            "seconds": trial.seconds,
        }
        for trial in trials
    )
    found = rows.groupby(["experiment", "case"]).sum()
    found["s per fault"] = (found.pop("seconds") / found["faults"]).round(1)
    return found.reset_index()


def phases(trials: Sequence[Trial]) -> pd.DataFrame:
    """How many faults hit which target in which phase, by experiment."""
    rows = pd.DataFrame(
        {"experiment": trial.experiment, "target": fault["target"], "phase": fault["phase"]}
        for trial in trials
        for fault in trial.faults
    )
    return pd.crosstab([rows["experiment"], rows["target"]], rows["phase"]).reset_index()


def problems(trials: Sequence[Trial]) -> pd.DataFrame:
    """How many runs had which problem."""
    rows = pd.DataFrame(
        [(trial.experiment, trial.case, one) for trial in trials for one in sorted(set(trial.problems))],
        columns=["experiment", "case", "problem"],
    )
    return rows.groupby(["experiment", "case", "problem"]).size().rename("runs").reset_index()
