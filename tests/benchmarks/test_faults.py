"""A short form of `benchmarks/faults`: a few kills, signals and saves, with the requirements of the long one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.faults import __main__ as faults
from benchmarks.faults import records
from benchmarks.faults.records import Trial
from benchmarks.faults.runs import Place


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


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def signals(number: int, seed: int, place: Place) -> Trial:
        made.append(number)
        if made == [0, 1]:
            raise KeyboardInterrupt
        return Trial(
            "signals", "SIGINT", f"{seed}-{number}", [{"target": "parent", "phase": "end"}], ["lost"] * (number == 2)
        )

    monkeypatch.setattr(faults, "signals", signals)
    command = ["signals", "--moments=3", f"--out={tmp_path}", f"--work={tmp_path}"]
    assert [faults.main(command), faults.main([*command, "--minutes=0"]), faults.main(command)] == [130, 0, 1]
    assert made == [0, 1, 1, 2]
    assert [trial.name for trial in records.read(tmp_path / "trials.jsonl")] == ["0-0", "0-1", "0-2"]
    assert "lost" in (tmp_path / "problems.csv").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [["saves", "--every=24"], ["kills", "--faults=2", "--seed=26"], ["signals", "--moments=4"]],
    ids=lambda own: own[0],
)
def test_nothing_is_lost(arguments: list[str], tmp_path: Path) -> None:
    if arguments[0] == "saves" and shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    assert faults.main([*arguments, f"--out={tmp_path}", f"--work={tmp_path / 'work'}"]) == 0, _problems(tmp_path)


def _problems(out: Path) -> str:
    return (out / "problems.csv").read_text()
