"""The cache: an entry is built once, whole or not at all, also when several build it at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runner.data import cache as cache_module
from runner.data.cache import Cache
from runner.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


class Builder:
    """Writes two files and counts how often it was asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        assert folder.is_dir()
        assert not any(folder.iterdir())
        (folder / "data.txt").write_text("words")
        (folder / "part").mkdir()
        (folder / "part" / "more.txt").write_text("more")


@pytest.fixture
def build() -> Builder:
    return Builder()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_entry_is_built_once_and_found_again(tmp_path: Path, build: Builder) -> None:
    """The second time, and in another Cache on the same folder, the entry is found and not built."""
    first = Cache(tmp_path / "new" / "cache").get({"data": "x", "max_length": 5}, build)
    assert (first / "data.txt").read_text() == "words"
    assert (first / "part" / "more.txt").read_text() == "more"
    again = Cache(tmp_path / "new" / "cache").get({"max_length": 5, "data": "x"}, build)
    assert again == first
    assert build.calls == 1
    assert names(tmp_path / "new" / "cache") == [first.name]


@pytest.mark.parametrize(
    "other", [{"data": "y"}, {"data": "x", "more": 1}, {"data": None}, {"data": ["x"]}, {"Data": "x"}, {}]
)
def test_another_key_is_another_entry(tmp_path: Path, build: Builder, other: dict[str, Any]) -> None:
    """Whatever differs in the key, the entry is built anew beside the old one."""
    cache = Cache(tmp_path)
    assert cache.get({"data": "x"}, build) != cache.get(other, build)
    assert build.calls == 2
    assert len(names(tmp_path)) == 2


def test_another_layout_is_another_entry(tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raising the layout version leaves old entries unread."""
    old = Cache(tmp_path).get({"data": "x"}, build)
    monkeypatch.setattr(cache_module, "LAYOUT_VERSION", cache_module.LAYOUT_VERSION + 1)
    assert Cache(tmp_path).get({"data": "x"}, build) != old
    assert build.calls == 2


def test_entry_says_what_it_is_of(tmp_path: Path, build: Builder) -> None:
    """An entry holds its own key, so that a folder of hashes can be read."""
    entry = Cache(tmp_path).get({"data": "x", "max_length": 5}, build)
    key = json.loads((entry / "key.json").read_text())
    assert {name: key[name] for name in ("data", "max_length")} == {"data": "x", "max_length": 5}


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), OSError("disk full"), UserError("bad line"), KeyboardInterrupt()]
)
def test_failed_build_leaves_nothing(tmp_path: Path, build: Builder, error: BaseException) -> None:
    """A build that fails half-way leaves no entry and no draft, passes its error on, and can be repeated."""

    def fail(folder: Path) -> None:
        (folder / "half.txt").write_text("half")
        raise error

    with pytest.raises(type(error)):
        Cache(tmp_path).get({"data": "x"}, fail)
    assert names(tmp_path) == []
    assert (Cache(tmp_path).get({"data": "x"}, build) / "data.txt").exists()


def test_drafts_of_killed_processes_are_removed(tmp_path: Path, build: Builder) -> None:
    """A day later; a draft that somebody may be writing stays."""
    left, fresh = tmp_path / ".draft-left", tmp_path / ".draft-fresh"
    for draft in (left, fresh):
        draft.mkdir()
        (draft / "half.txt").write_text("half")
    yesterday = time.time() - 25 * 3600
    os.utime(left, (yesterday, yesterday))
    entry = Cache(tmp_path).get({"data": "x"}, build)
    assert set(names(tmp_path)) == {".draft-fresh", entry.name}


def test_entry_is_not_seen_before_it_is_whole(tmp_path: Path) -> None:
    """While it is built an entry is not at its place, nor is anything else that could be taken for an entry."""
    seen = []

    def watch(folder: Path) -> None:
        seen.extend(name for name in names(tmp_path) if not name.startswith("."))

    Cache(tmp_path).get({"data": "x"}, watch)
    assert seen == []


def test_threads_that_build_the_same_entry(tmp_path: Path) -> None:
    """Four threads that are all in the middle of building get one whole entry, and no draft stays."""
    all_building = threading.Barrier(4, timeout=20)

    def build(folder: Path) -> None:
        (folder / "a.txt").write_text("a" * 1000)
        all_building.wait()
        (folder / "b.txt").write_text("b" * 1000)

    with ThreadPoolExecutor(4) as threads:
        entries = list(threads.map(lambda _: Cache(tmp_path).get({"data": "x"}, build), range(4)))
    assert len(set(entries)) == 1
    assert names(tmp_path) == [entries[0].name]
    assert names(entries[0]) == ["a.txt", "b.txt", "key.json"]


def test_processes_that_build_the_same_entry(tmp_path: Path) -> None:
    """Two processes that are both in the middle of building get one whole entry, and no draft stays."""
    code = """if True:
        import os, sys, time
        from pathlib import Path
        from runner.data.cache import Cache
        root, meeting = map(Path, sys.argv[1:])
        def build(folder):
            (folder / "a.txt").write_text("a" * 1000)
            (meeting / str(os.getpid())).touch()
            deadline = time.monotonic() + 20
            while len(list(meeting.iterdir())) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            (folder / "b.txt").write_text("b" * 1000)
        print(Cache(root).get({"data": "x"}, build))
    """
    (tmp_path / "meeting").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(tmp_path / "meeting")]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    entries = [process.communicate(timeout=60)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert entries[0] == entries[1]
    assert names(tmp_path / "cache") == [Path(entries[0]).name]
    assert names(Path(entries[0])) == ["a.txt", "b.txt", "key.json"]


@pytest.mark.parametrize("below", [".", "sub", "sub/deeper"])
def test_root_that_cannot_be_made(tmp_path: Path, build: Builder, below: str) -> None:
    """A cache folder that is a file, or below one, is the user's mistake and named as such."""
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / below
    with pytest.raises(
        UserError, match=r"^cache_dir=.*file.* cannot be written to: .*; set another cache_dir$"
    ) as caught:
        Cache(root).get({"data": "x"}, build)
    assert "\n" not in str(caught.value)
    assert build.calls == 0


def test_root_that_takes_no_entry(build: Builder) -> None:
    """One that is there and cannot be written to, like a read-only one that others share."""
    with pytest.raises(UserError, match=r"^cache_dir=/proc cannot be written to: .*; set another cache_dir$"):
        Cache("/proc").get({"data": "x"}, build)
    assert build.calls == 0


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leading ~ means the home folder, and not a folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    make: Callable[[Path], None] = lambda folder: None  # noqa: E731
    assert Cache("~/mine").get({}, make).parent == tmp_path / "mine"
