"""Trials as lines of a JSON Lines file, so that a campaign can be run in pieces, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import json_lines


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
    json_lines.append(path, asdict(trial))


def read(path: Path) -> list[Trial]:
    """The trials that were made."""
    return [Trial(**record) for record in json_lines.read(path)]


def tables(trials: Sequence[Trial]) -> dict[str, pd.DataFrame]:
    """By name: `counts` of runs and faults, the `phases` that faults hit, `problems`, and the `time` that kills cost.

    Tables without a row are left out.
    """
    found = {"counts": _counts(trials), "phases": _phases(trials), "problems": _problems(trials), "time": _time(trials)}
    return {name: table for name, table in found.items() if len(table)}


def _counts(trials: Sequence[Trial]) -> pd.DataFrame:
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
    found["seconds per fault"] = (found.pop("seconds") / found["faults"]).round(1)
    return found.reset_index()


def _phases(trials: Sequence[Trial]) -> pd.DataFrame:
    rows = [(trial.experiment, fault["target"], fault["phase"]) for trial in trials for fault in trial.faults]
    return _sizes(rows, ["experiment", "target", "phase"], "faults")


def _problems(trials: Sequence[Trial]) -> pd.DataFrame:
    rows = [(trial.experiment, trial.case, problem) for trial in trials for problem in set(trial.problems)]
    return _sizes(rows, ["experiment", "case", "problem"], "runs")


def _sizes(rows: Sequence[tuple[str, ...]], columns: list[str], counted: str) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns).groupby(columns).size().rename(counted).reset_index()


def _time(trials: Sequence[Trial]) -> pd.DataFrame:
    """Medians of what `lost_time` has measured; `stall_s` of one save."""
    rows = pd.DataFrame(
        {
            "case": trial.case,
            "killed": trial.faults[0]["target"],
            **trial.details,
            "stall_s": statistics.median(trial.details["stall_s"]),
        }
        for trial in trials
        if trial.experiment == "time"
    )
    return rows.groupby(["case", "killed"]).median().round(3).reset_index() if len(rows) else rows
