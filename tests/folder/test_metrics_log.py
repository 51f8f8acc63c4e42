"""`metrics.jsonl`: written line by line, read while it grows."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from runner.folder.metrics_log import FILE_NAME, Metric, MetricsLog, MetricsReader


@pytest.fixture
def log(tmp_path: Path) -> MetricsLog:
    return MetricsLog(tmp_path)


def line(key: str, value: float) -> str:
    return json.dumps({"key": key, "value": value, "step": 1, "timestamp": 5}) + "\n"


def test_round_trip(tmp_path: Path, log: MetricsLog) -> None:
    """What was written comes back in order with key, exact value and step."""
    log.write(1, {"train/loss": 0.1 + 0.2, "train/lr": 1e-5})
    log.write(2, {"train/loss": 3})
    read = MetricsReader(tmp_path).read()
    assert [(m.key, m.value, m.step) for m in read] == [
        ("train/loss", 0.30000000000000004, 1),
        ("train/lr", 1e-5, 1),
        ("train/loss", 3, 2),
    ]


def test_one_json_object_for_each_metric(tmp_path: Path, log: MetricsLog) -> None:
    """Each metric is one line of JSON with just the four promised keys."""
    log.write(1, {"a": 1.0, "b": 2.0})
    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    assert FILE_NAME == "metrics.jsonl"
    assert [set(json.loads(text)) for text in lines] == [{"key", "value", "step", "timestamp"}] * 2


def test_time_stamps_are_milliseconds(tmp_path: Path, log: MetricsLog) -> None:
    """Stamps are milliseconds since the epoch, the unit that MLflow takes, and whole."""
    before = time.time() * 1000
    log.write(1, {"a": 1.0})
    (metric,) = MetricsReader(tmp_path).read()
    assert isinstance(metric.timestamp, int)
    assert before - 1 <= metric.timestamp <= time.time() * 1000 + 1


def test_reader_gives_each_metric_once(tmp_path: Path, log: MetricsLog) -> None:
    """Reading goes on where it stopped, and a reader that starts later gets everything."""
    reader = MetricsReader(tmp_path)
    assert reader.read() == []
    log.write(1, {"a": 1.0})
    assert [m.key for m in reader.read()] == ["a"]
    assert reader.read() == []
    log.write(2, {"b": 1.0, "c": 1.0})
    assert [m.key for m in reader.read()] == ["b", "c"]
    assert [m.key for m in MetricsReader(tmp_path).read()] == ["a", "b", "c"]


def test_nothing_is_read_before_there_is_a_file(tmp_path: Path) -> None:
    """A reader may be there before the writer is."""
    reader = MetricsReader(tmp_path)
    assert reader.read() == []
    MetricsLog(tmp_path).write(1, {"a": 1.0})
    assert len(reader.read()) == 1


def test_lines_are_there_at_once(tmp_path: Path, log: MetricsLog) -> None:
    """What was logged is in the file before the log is closed, so a crash loses nothing."""
    log.write(1, {"a": 1.0})
    assert (tmp_path / FILE_NAME).read_text().endswith("}\n")


@pytest.mark.parametrize("cut", [1, 10, len(line("ä/loss", 2.0).encode()) - 1])
def test_half_written_last_line_waits(tmp_path: Path, cut: int) -> None:
    """A last line that is not yet whole is left alone and read once it is, wherever it was cut."""
    reader, path = MetricsReader(tmp_path), tmp_path / FILE_NAME
    second = json.dumps({"key": "ä/loss", "value": 2.0, "step": 1, "timestamp": 5}, ensure_ascii=False).encode()
    path.write_bytes(line("a", 1.0).encode() + second[:cut])
    assert reader.read() == [Metric("a", 1.0, 1, 5)]
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(second[cut:] + b"\n" + line("c", 3.0).encode())
    assert reader.read() == [Metric("ä/loss", 2.0, 1, 5), Metric("c", 3.0, 1, 5)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers(tmp_path: Path, log: MetricsLog, value: float) -> None:
    """A loss that has become NaN or infinite is logged and read as such, and what follows it too."""
    log.write(1, {"train/loss": value, "train/lr": 0.5})
    broken, after = MetricsReader(tmp_path).read()
    assert broken.value == value or (math.isnan(value) and math.isnan(broken.value))
    assert after.value == 0.5


def test_a_second_log_appends(tmp_path: Path, log: MetricsLog) -> None:
    """A run that is taken up again adds to what is there."""
    log.write(1, {"a": 1.0})
    log.close()
    MetricsLog(tmp_path).write(2, {"b": 1.0})
    assert [(m.key, m.step) for m in MetricsReader(tmp_path).read()] == [("a", 1), ("b", 2)]


def test_no_metrics_write_no_line(tmp_path: Path, log: MetricsLog) -> None:
    """An empty table of metrics leaves no empty line behind."""
    log.write(1, {})
    assert (tmp_path / FILE_NAME).read_text() == ""


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    """What a killed process left half written is no metric, and what comes after it is whole."""
    (tmp_path / FILE_NAME).write_text(line("a", 1.0) + line("b", 2.0)[:-9])
    MetricsLog(tmp_path).write(2, {"c": 3.0})
    assert [(m.key, m.value) for m in MetricsReader(tmp_path).read()] == [("a", 1.0), ("c", 3.0)]
