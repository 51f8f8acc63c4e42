"""`metrics.jsonl`: written line by line, read while it grows."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from pathlib import Path

import pytest

from runner.folder.metrics_log import FILE_NAME, Metric, MetricsLog, MetricsReader, cut_metrics, damaged_lines
from tests.faulty_recipes import fill


def line(key: str, value: float) -> str:
    return json.dumps({"key": key, "value": value, "step": 1, "timestamp": 5}, ensure_ascii=False) + "\n"


def test_round_trip(tmp_path: Path) -> None:
    """Exact values, NaN and infinity included, one JSON object per line, whole milliseconds; flushed at once."""
    log = MetricsLog(tmp_path)
    before = int(time.time() * 1000)
    log.write(1, {"train/loss": 0.1 + 0.2, "train/lr": 1e-5})
    log.write(2, {"train/loss": math.nan, "train/lr": -math.inf})
    log.write(3, {})
    first, second, third, fourth = MetricsReader(tmp_path).read()
    assert [(m.key, m.value, m.step) for m in (first, second, fourth)] == [
        ("train/loss", 0.30000000000000004, 1),
        ("train/lr", 1e-5, 1),
        ("train/lr", -math.inf, 2),
    ]
    assert math.isnan(third.value)
    assert isinstance(first.timestamp, int)
    assert before <= first.timestamp <= time.time() * 1000
    assert FILE_NAME == "metrics.jsonl"
    text = (tmp_path / FILE_NAME).read_text()
    assert [json.loads(row)["value"] for row in text.splitlines()[2:]] == ["NaN", "-Infinity"]
    assert [set(json.loads(row)) for row in text.splitlines()] == [{"key", "value", "step", "timestamp"}] * 4


def test_a_reader_returns_each_metric_once(tmp_path: Path) -> None:
    """It may exist before the file; a resumed run appends."""
    reader = MetricsReader(tmp_path)
    assert reader.read() == []
    log = MetricsLog(tmp_path)
    log.write(1, {"a": 1.0})
    assert [m.key for m in reader.read()] == ["a"]
    log.close()
    MetricsLog(tmp_path).write(2, {"b": 1.0, "c": 1.0})
    assert [m.key for m in reader.read()] == ["b", "c"]
    assert reader.read() == []
    assert [m.key for m in MetricsReader(tmp_path).read()] == ["a", "b", "c"]


def test_a_metric_has_one_value_at_a_step(tmp_path: Path) -> None:
    """The first one: of a step that is logged and saved, and of one that is evaluated again after a kill."""
    log = MetricsLog(tmp_path)
    log.write(4, {"comm/bytes": 4.0})
    log.write(3, {"train/loss": 3.0})
    log.write(4, {"train/loss": 2.0, "comm/bytes": 5.0})
    log.write(4, {"eval/loss": 1.0})
    log.close()
    log = MetricsLog(tmp_path)
    log.write(4, {"eval/loss": 1.5, "step/other_s": 0.1})
    log.write(5, {"eval/loss": 1.5})
    found = [(metric.key, metric.value, metric.step) for metric in MetricsReader(tmp_path).read()]
    assert found == [
        ("comm/bytes", 4.0, 4),
        ("train/loss", 3.0, 3),
        ("train/loss", 2.0, 4),
        ("eval/loss", 1.0, 4),
        ("step/other_s", 0.1, 4),
        ("eval/loss", 1.5, 5),
    ]


@pytest.mark.parametrize("cut", [1, 10, len(line("ä/loss", 2.0).encode()) - 1])
def test_an_incomplete_last_line_waits(tmp_path: Path, cut: int) -> None:
    reader, path = MetricsReader(tmp_path), tmp_path / FILE_NAME
    second = line("ä/loss", 2.0).encode()
    path.write_bytes(line("a", 1.0).encode() + second[:cut])
    assert reader.read() == [Metric("a", 1.0, 1, 5)]
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(second[cut:] + line("c", 3.0).encode())
    assert reader.read() == [Metric("ä/loss", 2.0, 1, 5), Metric("c", 3.0, 1, 5)]


def test_a_line_cut_off_by_a_crash_is_removed(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(line("a", 1.0) + line("b", 2.0)[:-9])
    MetricsLog(tmp_path).write(2, {"c": 3.0})
    assert [(m.key, m.value) for m in MetricsReader(tmp_path).read()] == [("a", 1.0), ("c", 3.0)]


DAMAGED = {
    "blank": "",
    "zeros": "\0" * 512,
    "cut off": '{"key": "b", "va',
    "without a value": '{"key": "b"}',
    "a number": "3",
    "deep": "[" * 100_000,
    **{
        what: json.dumps({"key": "b", "value": 1.0, "step": 1, "timestamp": 1} | change)
        for what, change in {
            "infinite step": {"step": float("inf")},
            "large step": {"step": 10**30},
            "large value": {"value": 10**400},
            "no name": {"key": 3},
            "no text": {"key": "\ud800"},
        }.items()
    },
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_is_left_out(tmp_path: Path, damage: str) -> None:
    (tmp_path / FILE_NAME).write_text(line("a", 1.0) + damage + "\n" + line("c", 2.0))
    assert damaged_lines(tmp_path) == 1
    assert MetricsReader(tmp_path).read() == [Metric("a", 1.0, 1, 5), Metric("c", 2.0, 1, 5)]
    cut_metrics(tmp_path, 1)
    assert (tmp_path / FILE_NAME).read_text() == line("a", 1.0) + line("c", 2.0)


def test_a_line_of_any_length_takes_little_memory(tmp_path: Path) -> None:
    size = 2**28
    with (tmp_path / FILE_NAME).open("wb") as file:
        file.truncate(size)  # zeros that take no room on the disk
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write("\n" + line("a", 1.0))
    tracemalloc.start()
    try:
        assert MetricsReader(tmp_path).read() == [Metric("a", 1.0, 1, 5)]
        cut_metrics(tmp_path, 1)
        assert tracemalloc.get_traced_memory()[1] < size / 100
    finally:
        tracemalloc.stop()
    assert (tmp_path / FILE_NAME).read_text() == line("a", 1.0)


def test_bare_nan_of_older_versions(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"key": "a", "value": NaN, "step": 1, "timestamp": 5}\n')
    (found,) = MetricsReader(tmp_path).read()
    assert math.isnan(found.value)


def test_a_full_disk_ends_nothing(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One warning; what was not written is counted, and written in order once there is room."""
    log = MetricsLog(small_disk)
    log.write(1, {"a": 1.0})
    fill(small_disk)
    for step in range(2, 100):
        log.write(step, {"a": float(step), "b": math.nan})
    assert capsys.readouterr().err.count("metrics.jsonl") == 1
    lost = 2 * 98 + 1 - len(MetricsReader(small_disk).read())
    assert lost > 100
    assert f" {lost} values" in (log.warning() or "")
    (small_disk / "fill").unlink()
    log.write(100, {"a": 100.0})
    assert log.warning() is None
    assert [m.step for m in MetricsReader(small_disk).read() if m.key == "a"] == list(range(1, 101))


def test_a_file_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"a": 1.0})
    (tmp_path / FILE_NAME).unlink()
    log.write(2, {"a": 2.0})
    assert "metrics.jsonl" in capsys.readouterr().err
    assert "1 values" in (log.warning() or "")
