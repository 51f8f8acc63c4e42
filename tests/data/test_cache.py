"""The cache: an entry is built once, completely or not at all, also when several build it at once."""

from __future__ import annotations

import json
import mmap
import os
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


class Builder:
    """Writes two files and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        assert not any(folder.iterdir())
        (folder / "data.txt").write_text("words")
        (folder / "part").mkdir()
        (folder / "part" / "more.txt").write_text("more")


@pytest.fixture
def build() -> Builder:
    return Builder()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_entries_are_built_once_per_key(tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another key or layout version is another entry; an entry holds its own key."""
    root = tmp_path / "new" / "cache"
    first = Cache(root).get({"data": "x", "max_length": 5}, build)
    assert names(first) == ["checksums.json", "data.txt", "key.json", "part"]
    assert Cache(root).get({"max_length": 5, "data": "x"}, build) == first
    assert build.calls == 1
    assert json.loads((first / "key.json").read_text()).items() >= {"data": "x", "max_length": 5}.items()
    others: list[dict[str, Any]] = [{"data": "x"}, {"data": ["x"], "max_length": 5}, {}]
    entries = {first, *(Cache(root).get(other, build) for other in others)}
    monkeypatch.setattr(cache_module, "LAYOUT_VERSION", cache_module.LAYOUT_VERSION + 1)
    entries.add(Cache(root).get({"data": "x", "max_length": 5}, build))
    assert len(entries) == len(names(root)) == build.calls == 5


@pytest.mark.parametrize("error", [OSError("disk full"), UserError("bad line"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing(tmp_path: Path, build: Builder, error: BaseException) -> None:
    def fail(folder: Path) -> None:
        (folder / "half.txt").write_text("half")
        assert [name for name in names(tmp_path) if not name.startswith(".")] == []  # nothing looks like an entry
        raise error

    with pytest.raises(type(error)):
        Cache(tmp_path).get({"data": "x"}, fail)
    assert names(tmp_path) == []
    assert (Cache(tmp_path).get({"data": "x"}, build) / "data.txt").exists()


def test_drafts_of_killed_processes_are_removed(tmp_path: Path, build: Builder) -> None:
    """After a day: another process may still write a fresh one. So are damaged entries, which others may still read."""
    for name, age in ((".draft-old", 25), (".draft-fresh", 0), (".damaged-old", 25), (".damaged-fresh", 0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age * 3600,) * 2)
    entry = Cache(tmp_path).get({"data": "x"}, build)
    assert set(names(tmp_path)) == {".draft-fresh", ".damaged-fresh", entry.name}


def test_several_build_the_same_entry(tmp_path: Path) -> None:
    """Four threads, all in the middle of building, get one complete entry and leave no draft."""
    all_building = threading.Barrier(4, timeout=20)

    def build(folder: Path) -> None:
        (folder / "a.txt").write_text("a" * 1000)
        all_building.wait()
        (folder / "b.txt").write_text("b" * 1000)

    with ThreadPoolExecutor(4) as threads:
        entries = list(threads.map(lambda _: Cache(tmp_path).get({"data": "x"}, build), range(4)))
    assert names(tmp_path) == [entries[0].name]
    assert set(entries) == {entries[0]}
    assert names(entries[0]) == ["a.txt", "b.txt", "checksums.json", "key.json"]


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("harm", [zeroed, truncated, Path.unlink])
@pytest.mark.parametrize("name", ["data.txt", "part/more.txt", "checksums.json"])
def test_a_damaged_entry_is_rebuilt(
    tmp_path: Path,
    build: Builder,
    harm: Callable[[Path], None],
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One warning says which file; a run that has mapped the old files keeps them, and the next run finds new ones."""
    entry = Cache(tmp_path).get({"data": "x"}, build)
    harm(entry / name)
    assert capsys.readouterr().err == ""
    with (entry / "key.json").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert Cache(tmp_path).get({"data": "x"}, build) == entry
        assert b'"data": "x"' in mapped[:]
    (warning,) = capsys.readouterr().err.splitlines()
    assert name in warning
    assert ((entry / "data.txt").read_text(), (entry / "part" / "more.txt").read_text()) == ("words", "more")
    assert Cache(tmp_path).get({"data": "x"}, build) == entry
    assert build.calls == 2
    assert capsys.readouterr().err == ""


def test_several_rebuild_a_damaged_entry(tmp_path: Path, build: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    """Four threads that all found the damage: the first replaces the entry, and the others keep that one."""
    zeroed(Cache(tmp_path).get({"data": "x"}, build) / "data.txt")
    all_building = threading.Barrier(4, timeout=20)

    def rebuild(folder: Path) -> None:
        build(folder)
        all_building.wait()

    with ThreadPoolExecutor(4) as threads:
        entries = set(threads.map(lambda _: Cache(tmp_path).get({"data": "x"}, rebuild), range(4)))
    (entry,) = entries
    assert (entry / "data.txt").read_text() == "words"
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert len(list(tmp_path.glob(".damaged-*"))) == 1
    assert not list(tmp_path.glob(".draft-*"))


def test_folders_that_cannot_be_written(tmp_path: Path, build: Builder) -> None:
    (tmp_path / "file").write_text("")
    for root in ("/proc", tmp_path / "file", tmp_path / "file" / "sub"):
        with pytest.raises(UserError, match=f"^cache_dir={root} is not writable"):
            Cache(root).get({"data": "x"}, build)
    assert build.calls == 0


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Builder) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache("~/mine").get({}, build).parent == tmp_path / "mine"


def test_a_full_disk_is_a_sentence(small_disk: Path) -> None:
    """It names the setting, and leaves no part of an entry."""

    def build(folder: Path) -> None:
        (folder / "rows").write_bytes(bytes(2**23))

    with pytest.raises(UserError, match="cache_dir="):
        Cache(small_disk).get({"x": 1}, build)
    assert list(small_disk.iterdir()) == []
