"""A short form of `benchmarks/faults`: a few kills, signals and saves, with the requirements of the long one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.faults import __main__ as faults
from benchmarks.faults import records
from benchmarks.faults.records import Trial


def _trial(name: str, *problems: str, faults: int = 1) -> Trial:
    return Trial("kills", "two workers", name, [{"target": "worker", "phase": "saving"}] * faults, problems, 2.0)


def test_trials_are_counted(tmp_path: Path) -> None:
    """A line that was cut off is made again; a run counts once, whatever happened to it."""
    path = tmp_path / "trials.jsonl"
    records.append(path, _trial("0", faults=3))
    with path.open("a") as file:
        file.write('{"experiment": "ki')
    assert [trial.name for trial in records.read(path)] == ["0"]
    records.append(path, _trial("1", "other bits", "left: process"))
    records.append(path, _trial("2", "other bits", "other bits"))
    trials = records.read(path)
    assert [trial.name for trial in trials] == ["0", "1", "2"]
    tables = {name: table.to_dict("records") for name, table in records.tables(trials).items()}
    (count,) = tables["counts"]
    assert (count["runs"], count["faults"], count["runs with a problem"]) == (3, 5, 2)
    assert [row["faults"] for row in tables["phases"]] == [5]
    assert {row["problem"]: row["runs"] for row in tables["problems"]} == {"left: process": 1, "other bits": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ["saves", "--every=12"],
            marks=pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed"),
        ),
        ["kills", "--faults=4"],
        ["signals", "--moments=4"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_nothing_is_lost(arguments: list[str], tmp_path: Path) -> None:
    """The command goes on where it stopped: the second one has nothing left to do."""
    places = [f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}"]
    assert faults.main([*arguments, *places]) == 0, (tmp_path / "out" / "problems.csv").read_text()
    made = records.read(tmp_path / "out" / "trials.jsonl")
    assert made
    assert faults.main([*arguments, *places]) == 0
    assert records.read(tmp_path / "out" / "trials.jsonl") == made
