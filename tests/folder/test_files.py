"""Files that other processes read at any time."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from runner.folder.files import started_ms, write_json


def test_a_reader_sees_old_or_new_content(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    contents = [{"number": n, "text": str(n) * 20_000} for n in (1, 2)]
    write_json(path, contents[0])
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            for content in contents:
                write_json(path, content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            assert json.loads(path.read_text()) in contents
    finally:
        ended.set()
        writer.join()
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]


def test_invalid_content_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, "before")
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]


def test_when_a_run_started(tmp_path: Path) -> None:
    """By `tracking.json`, else by the time of `summary.json`."""
    write_json(tmp_path / "summary.json", {})
    os.utime(tmp_path / "summary.json", ns=(5_000_000_000, 5_000_000_000))
    assert started_ms(tmp_path) == 5_000
    write_json(tmp_path / "tracking.json", {"started": 17})
    assert started_ms(tmp_path) == 17
