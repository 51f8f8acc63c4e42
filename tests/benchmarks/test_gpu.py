"""The checks of a GPU, tried on a CPU with a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import json_lines
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.checks import CHECKS


def check(monkeypatch: pytest.MonkeyPatch, out: Path, *only: str, minutes: float = 20) -> int:
    arguments = ["--device=cpu", f"--out={out}", f"--minutes={minutes}", "--only", *only]
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    return main()


@pytest.mark.long
def test_every_check_passes_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that take minutes there: `compiled`, `planner` and `beside_peers`."""
    slow = ("compiled", "planner", "beside_peers")
    names = [one.__name__ for one in CHECKS if one.__name__ not in slow]
    assert check(monkeypatch, tmp_path, *names) == 0
    rows = {row["check"]: row["result"] for row in json_lines.read(tmp_path / "results.jsonl")}
    assert rows == {name: "passed" for name in names if name != "tests_that_need_a_gpu"}


def test_it_ends_in_time_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, tmp_path, "machine", minutes=0) == 0
    assert "| `machine` | not reached |" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert check(monkeypatch, tmp_path, "machine") == 0
    assert check(monkeypatch, tmp_path, "machine") == 0  # which is there already
    assert [row["result"] for row in json_lines.read(tmp_path / "results.jsonl")] == ["passed"]
