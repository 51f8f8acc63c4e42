"""What a folder from somebody else can do to its reader: nothing but be refused in one sentence."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from runner.errors import UserError
from runner.folder.lock import is_locked, locked
from runner.folder.metrics_log import MetricsReader
from runner.folder.reading import JSON_LIMIT, files_below, folders_with, literal, opened, read_json, read_settings

BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 7))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "Expecting"),
        (b"[]", "not what the runner writes"),
        (b"\xff", "utf-8"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"a": "' + b"x" * JSON_LIMIT, "bytes"),
    ],
    ids=["cut off", "a list", "binary", "deep", "large"],
)
def test_json_that_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(UserError, match=why):
        read_json(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "content",
    [BOMB, "a: &a [*a]", "[" * 10_000, "- a", "a: !!python/object/apply:os.getcwd []", f"a: {'x' * 2**20}"],
    ids=["aliases", "a circle", "deep", "a list", "code", "large"],
)
def test_settings_that_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml does not hold the settings"):
        read_settings(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "text", ["${oc.env:HOME}", "a ${b} c", r"\${a}", r"\\${a}", "${", "${${a}}", r"a\b ${c}\ d", "$5"]
)
def test_text_among_settings_is_no_interpolation(text: str) -> None:
    content: Any = OmegaConf.create(literal({"a": text, "b": [{"c": text}]}))
    assert OmegaConf.to_container(content, resolve=True) == {"a": text, "b": [{"c": text}]}


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Neither to read nor to write: a lock is taken, and what the link leads to stays as it is."""
    run, secret = tmp_path / "run", tmp_path / "secret"
    run.mkdir()
    secret.write_text(json.dumps({"key": "a", "value": 1, "step": 1, "timestamp": 1}) + "\n")
    before = secret.read_bytes()
    for name in (".lock", "summary.json", "metrics.jsonl"):
        (run / name).symlink_to(secret)
    for action in (
        lambda: locked(run).__enter__(),
        lambda: is_locked(run),
        lambda: read_json(run / "summary.json"),
        lambda: MetricsReader(run).read(),
        lambda: files_below(run),
    ):
        with pytest.raises(UserError, match="is a link"):
            action()
    assert secret.read_bytes() == before


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)],
    ids=["pipe", "folder", "socket"],
)
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A pipe would block for ever."""
    make(tmp_path / ".lock")
    for action in (
        lambda: opened(tmp_path / ".lock"),
        lambda: read_json(tmp_path / ".lock"),
        lambda: locked(tmp_path).__enter__(),
        lambda: is_locked(tmp_path),
    ):
        with pytest.raises(UserError, match="not a regular file"):
            action()
    if not (tmp_path / ".lock").is_dir():
        with pytest.raises(UserError, match="not a regular file"):
            files_below(tmp_path)


def test_a_file_with_two_names_is_read_and_not_written(tmp_path: Path) -> None:
    """The other name may lie outside of the run's folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "other").write_text("kept")
    os.link(tmp_path / "other", tmp_path / "run" / ".lock")
    with opened(tmp_path / "run" / ".lock") as file:
        assert file.read() == b"kept"
    with pytest.raises(UserError, match="hard links"):
        locked(tmp_path / "run").__enter__()
    assert (tmp_path / "other").read_text() == "kept"


def test_files_below_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/b/x", "a/y", ".z"):
        (tmp_path / name).touch()
    assert files_below(tmp_path) == [tmp_path / name for name in (".z", "a/b/x", "a/y")]
    (tmp_path / "a" / "c").symlink_to(tmp_path / "a" / "b")
    with pytest.raises(UserError, match="a/c is a link"):
        files_below(tmp_path)


def test_links_that_wandb_makes_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "wandb" / "logs").mkdir(parents=True)
    (tmp_path / "wandb" / "logs" / "debug.log").symlink_to(tmp_path)
    assert files_below(tmp_path) == []
    with pytest.raises(UserError, match="is a link"):
        files_below(tmp_path / "wandb")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").symlink_to(tmp_path / "wandb")
    with pytest.raises(UserError, match="wandb is a link"):
        files_below(tmp_path / "run")


def test_folders_that_are_made_and_removed_meanwhile(tmp_path: Path) -> None:
    """As the jobs of a sweep do, while it looks at them."""
    jobs = [tmp_path / str(number) for number in range(3)]
    for job in jobs:
        job.mkdir()
        (job / "job.json").touch()
    ended = threading.Event()

    def train() -> None:
        while not ended.is_set():
            for job in jobs:
                (job / ".draft" / "below").mkdir(parents=True)
            for job in jobs:
                (job / ".draft" / "below").rmdir()
                (job / ".draft").rmdir()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(300):
            assert sorted(folders_with("job.json", tmp_path)) == jobs
    finally:
        ended.set()
        thread.join()
