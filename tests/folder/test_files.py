"""Files that others read while they are written."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from runner.folder.files import write_json, write_whole


def test_a_reader_finds_all_or_what_was_before(tmp_path: Path) -> None:
    """While a file is written again and again, every look at it finds one of the whole contents."""
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
        for _ in range(300):
            assert json.loads(path.read_text()) in contents
    finally:
        ended.set()
        writer.join()
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    """A content that is no JSON, and a folder that is gone: an error, and no half file."""
    path = tmp_path / "x.json"
    write_whole(path, "before")
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "away" / "x.json", "after")
    assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]
