"""Checkpoints as files: complete or not there, checked, limited in number, and never the end of a run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from runner.backends import Backend
from runner.config.choices import SyncPolicyName
from runner.config.schema import Checkpoint, Sharding, Sync
from runner.folder.files import write_json
from runner.folder.reading import read_json
from runner.train import checkpoint
from runner.train.checkpoint import (
    FOLDER,
    Checkpoints,
    load,
    newest,
    read_manifest,
    remove_drafts,
    saved_folders,
    set_aside,
    sync_digest,
)
from tests.faulty_recipes import fill
from tests.resumed import same

STATE = {
    "model": {"weight": torch.randn(4, 3).t(), "tied": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer": {0: {"step": torch.tensor(3.0), "momentum_buffer": None}},
    "policy": {"queue": torch.zeros((0, 3), dtype=torch.int64)},
    "random": (3, [2**32 - 1, 7], None),
    "evaluation": (True, 5, {"loss": 0.1 + 0.2, "worst": math.inf, "none": math.nan}),
}


SYNC = Sync(SyncPolicyName.periodic, k=1)
IDENTITY = {"data": "x", "sync": sync_digest(SYNC, Sharding()), "experiment": {"settings": {"lr": 1e-05}}}
#: Whether each worker was asked to save and end.
PREEMPTED = {0: False, 1: False}


def checkpoints_of(run: Path, rank: int = 0, workers: int = 1, **settings: Any) -> Checkpoints:
    """Alone with its requests: it asks no other worker."""
    alone = SimpleNamespace(
        rank=rank, world_size=workers, start_host_sum=lambda numbers, async_op: lambda: [float(one) for one in numbers]
    )
    return Checkpoints(run, Checkpoint(**settings), cast(Backend, alone), IDENTITY, lambda: PREEMPTED[rank])


def save(run: Path, *steps: int, **settings: Any) -> Checkpoints:
    checkpoints = checkpoints_of(run, **settings)
    for step in steps:
        checkpoints.save(step, lambda: STATE, ())
    checkpoints.wait()
    return checkpoints


def steps_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / FOLDER).iterdir())


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """Types of keys and sequences, numbers to the last bit, and tensors of every shape; nothing is pickled."""
    save(tmp_path, 7)
    saved, _ = newest(tmp_path)
    assert saved is not None
    assert (saved.step, saved.workers, saved.identity) == (7, 1, IDENTITY)
    assert same(load(saved, 0, 1, SYNC, Sharding()), STATE)
    suffixes = {path.suffix for path in saved.folder.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_the_state_is_copied_before_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(3)
    write = checkpoint._write_tensors
    monkeypatch.setattr(checkpoint, "_write_tensors", lambda *own: (weight.add_(1), write(*own)))
    checkpoints = checkpoints_of(tmp_path)
    stalled = checkpoints.save(1, lambda: {"model": {"weight": weight}}, ())
    checkpoints.wait()
    saved, _ = newest(tmp_path)
    assert saved is not None
    assert load(saved, 0, 1, SYNC, Sharding())["model"]["weight"].tolist() == [0, 0, 0]
    assert stalled == checkpoints.stall_seconds > 0


def test_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 5, 10, 100, 15, keep=2)
    assert steps_in(tmp_path) == ["step-00000015", "step-00000100"]


def test_what_is_not_complete_does_not_count(tmp_path: Path) -> None:
    """A save that was cut off has no name that counts, and is removed by the next run or the next save."""
    save(tmp_path, 5)
    shutil.copytree(tmp_path / FOLDER / "step-00000005", tmp_path / FOLDER / ".step-00000009")
    (tmp_path / FOLDER / "step-00000009").mkdir()
    assert [path.name for path in saved_folders(tmp_path)] == ["step-00000005"]
    save(tmp_path, 10)
    assert ".step-00000009" not in steps_in(tmp_path)
    (tmp_path / FOLDER / ".step-00000020" / "worker-0").mkdir(parents=True)
    remove_drafts(tmp_path)
    save(tmp_path, 20)
    assert saved_folders(tmp_path)[0].name == "step-00000020"


def _truncate(folder: Path) -> None:
    path = folder / "worker-0" / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit(folder: Path) -> None:
    path = folder / "worker-0" / "model-00001-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "bytes": _truncate,
    "changed": _flip_a_bit,
    "missing": lambda folder: (folder / "worker-0" / "state.json").unlink(),
    "complete.json": lambda folder: (folder / "complete.json").write_text("{"),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_checkpoint_is_left_out(tmp_path: Path, words: str) -> None:
    """The one before is taken, and what is wrong is known; once set aside, it takes nobody's place."""
    save(tmp_path, 5, 10)
    DAMAGE[words](tmp_path / FOLDER / "step-00000010")
    saved, damaged = newest(tmp_path)
    assert saved is not None
    assert saved.step == 5
    ((folder, problem),) = damaged.items()
    assert folder.name == "step-00000010"
    assert words in problem
    set_aside(folder)
    save(tmp_path, 7, keep=1)
    assert [path.name for path in saved_folders(tmp_path)] == ["step-00000007"]
    save(tmp_path, 10)
    assert newest(tmp_path)[1] == {}


def test_no_bit_of_the_manifest_can_change(tmp_path: Path) -> None:
    """Each one-bit flip of `complete.json` is noticed, or changes no value, such as that of an exponent's e.

    Every seventh is tried: of each byte another bit.
    """
    save(tmp_path, 5)
    (folder,) = saved_folders(tmp_path)
    before, content = read_manifest(folder), (folder / "complete.json").read_bytes()
    for bit in range(0, 8 * len(content), 7):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (folder / "complete.json").write_bytes(changed)
        saved, damaged = newest(tmp_path)
        assert saved == before or list(damaged) == [folder], bytes(changed)


def test_folders_that_are_swapped(tmp_path: Path) -> None:
    """Neither is taken for the other."""
    save(tmp_path, 5, 10)
    newer, older = saved_folders(tmp_path)
    newer.rename(tmp_path / "aside")
    older.rename(newer)
    (tmp_path / "aside").rename(older)
    saved, damaged = newest(tmp_path)
    assert saved is None
    assert [problem.partition("(it ")[2][:-1] for problem in damaged.values()] == ["is of step 5", "is of step 10"]


def test_a_manifest_without_its_digest(tmp_path: Path) -> None:
    """It could have been edited."""
    save(tmp_path, 5)
    (folder,) = saved_folders(tmp_path)
    content = read_json(folder / "complete.json")
    del content["digest"]
    write_json(folder / "complete.json", content)
    assert newest(tmp_path)[0] is None


def test_a_save_that_fails_is_reported_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    checkpoints = save(tmp_path, 5, 10)
    assert "training continues" in capsys.readouterr().err
    assert "2 checkpoint(s)" in (checkpoints.warning() or "")
    (tmp_path / FOLDER).unlink()
    checkpoints.save(15, lambda: STATE, ())
    checkpoints.wait()
    assert steps_in(tmp_path) == ["step-00000015"]


def test_all_workers_have_to_write(tmp_path: Path) -> None:
    """Worker 0 completes a checkpoint once all files are there; what all share is in its own."""
    first, second = (checkpoints_of(tmp_path, rank, workers=2) for rank in range(2))
    first.save(5, lambda: STATE, ("model",))
    assert saved_folders(tmp_path) == []
    second.save(5, lambda: {**STATE, "random": "other"}, ("model",))
    for one in (first, second):
        one.wait()
    saved, _ = newest(tmp_path)
    assert saved is not None
    assert same(load(saved, 0, 2, SYNC, Sharding()), STATE)
    assert same(load(saved, 1, 2, SYNC, Sharding()), {**STATE, "random": "other"})
    assert saved.for_any_workers


def test_a_worker_that_fails_ends_the_save_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (checkpoints_of(tmp_path, rank, workers=2) for rank in range(2))
    for one in (first, second):
        one.save(5, lambda: STATE, ())
    first.wait()
    write = checkpoint._write_tensors

    def full(folder: Path, tensors: Any) -> None:
        if folder.name == "worker-1":
            raise OSError(28, "No space left on device")
        write(folder, tensors)

    monkeypatch.setattr(checkpoint, "_write_tensors", full)
    first.save(10, lambda: STATE, ())
    second.save(10, lambda: STATE, ())
    for one in (first, second):
        one.wait()
        assert one.warning() is not None
    assert [path.name for path in saved_folders(tmp_path)] == ["step-00000005"]


def test_how_often_workers_ask_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About once a second by worker 0's clock, at first in each step."""
    checkpoints, clock = checkpoints_of(tmp_path, on_preemption=True), [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock[0])
    checkpoints._agreed_at = clock[0]
    asked = []
    for step in range(40):
        before = checkpoints._agreed_at
        clock[0] += 0.1
        checkpoints.agree(wait=True)
        if checkpoints._agreed_at != before:
            asked.append(step)
    assert asked == [0, 2, 6, 14, 24, 34]


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_weights_that_are_not_finite_replace_nothing(tmp_path: Path, part: str) -> None:
    bad = {**STATE, part: {"a": torch.tensor([1.0, math.nan])}}
    checkpoints = save(tmp_path, 5)
    checkpoints.save(10, lambda: bad, ())
    checkpoints.wait()
    assert f"{part}/a is not finite" in (checkpoints.warning() or "")
    assert [path.name for path in saved_folders(tmp_path)] == ["step-00000005"]


@pytest.mark.parametrize("checked", [True, False])
def test_a_full_disk_keeps_the_last_checkpoint(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checked: bool
) -> None:
    """One line with the reason: the numbers, or, if the disk fills after they were checked, that of the disk."""
    checkpoints = save(small_disk, 5)
    fill(small_disk)
    if not checked:
        monkeypatch.setattr(checkpoint, "require_space", lambda *_: None)
    checkpoints.save(10, lambda: STATE, ())
    checkpoints.wait()
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 10" in line
    assert (" bytes" in line) is checked
    assert checkpoints.warning() is not None
    assert [path.name for path in saved_folders(small_disk)] == ["step-00000005"]


def test_when_a_checkpoint_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps, by worker 0's clock, or when a worker must end; it stays due until it can be saved."""
    by_steps = checkpoints_of(tmp_path, every_steps=4)
    due = []
    for step in (3, 4, 5):
        by_steps.count(step)
        due.append(by_steps.due)
    assert due == [False, True, True]
    by_steps.save(5, lambda: STATE, ())
    by_steps.count(6)
    assert not by_steps.due
    by_steps.wait()

    def asked(checkpoints: Checkpoints, wait: bool = True) -> tuple[bool, bool]:
        checkpoints.agree(wait)
        return checkpoints.due, checkpoints.ending

    monkeypatch.setattr(checkpoint, "_AGREE_EVERY_S", 0.0)
    both = [checkpoints_of(tmp_path, rank, 2, every_minutes=1, on_preemption=True) for rank in range(2)]
    never = checkpoints_of(tmp_path)
    now = checkpoint.time.monotonic()
    assert [asked(one) for one in both] == [(False, False)] * 2
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now + 61)
    assert [asked(one) for one in both] == [(True, False), (False, False)]
    monkeypatch.setitem(PREEMPTED, 1, True)
    assert asked(both[1], wait=False) == (False, False)
    assert asked(both[1], wait=False) == (False, True)
    assert asked(never) == (False, False)
