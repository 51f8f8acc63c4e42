"""Files that other processes read at any time."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path

import pytest

from runner.errors import RunFailed, UserError
from runner.folder.files import check_folder, require_space, started_ms, write_json
from tests.faulty_recipes import fill


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


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    """Their names, in mappings and sequences: any reader of JSON takes the file, and `float` takes the names."""
    write_json(tmp_path / "x.json", {"a": math.nan, "b": [math.inf, {"c": (-math.inf, 1.5)}]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    content = json.loads((tmp_path / "x.json").read_text(), parse_constant=refuse)
    assert content == {"a": "NaN", "b": ["Infinity", {"c": ["-Infinity", 1.5]}]}
    assert [float(name) for name in ("Infinity", "-Infinity")] == [math.inf, -math.inf]


def test_a_full_disk_is_a_sentence(small_disk: Path) -> None:
    """It names the file, whose old content stays, and leaves no draft; a folder that takes nothing is refused."""
    path = small_disk / "x.json"
    write_json(path, "before")
    check_folder("hydra.run.dir", small_disk / "run", size=1000)
    fill(small_disk)
    with pytest.raises(RunFailed, match=r"x\.json"):
        write_json(path, "x" * 10_000)
    assert json.loads(path.read_text()) == "before"
    with pytest.raises(RunFailed, match=r"the model needs 1,000 bytes.* 0 left"):
        require_space(small_disk, 1000, "the model")
    with pytest.raises(UserError, match=r"hydra\.run\.dir"):
        check_folder("hydra.run.dir", small_disk / "run", size=1000)
    assert sorted(one.name for one in small_disk.iterdir()) == ["fill", "x.json"]


def test_when_a_run_started(tmp_path: Path) -> None:
    """By `tracking.json`, else by the time of its folder, which a run that was killed has, too."""
    os.utime(tmp_path, ns=(5_000_000_000, 5_000_000_000))
    assert started_ms(tmp_path) == 5_000
    write_json(tmp_path / "tracking.json", {"started": 17})
    assert started_ms(tmp_path) == 17
