"""GPUs and cores that jobs take, with names that no GPU has, in processes of their own."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.backends.machine import visible_gpus
from runner.config.choices import DeviceKind, Rehearse
from runner.launch.local import start_forkserver
from runner.plan.placement import Placement
from runner.tools.sweep import slots as module
from runner.tools.sweep.slots import Needed, in_use, needed, smallest_job, taken
from tests.configured import configured
from tests.processes import wait_until
from tests.runs import read

#: Of this process: tests that run at the same time do not wait for each other.
GPUS = tuple(f"GPU-{os.getpid()}-{number}" for number in range(3))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs and eight cores."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS))
    monkeypatch.setattr(module, "available_cores", lambda: 8)


def on(device_type: str, workers: int, rehearsed: bool = False) -> Placement:
    kind = {"cuda": "gpu", "xla": "tpu"}.get(device_type, device_type)
    return Placement(kind, kind, device_type, workers, workers, rehearsed)


@pytest.mark.parametrize(
    ("placement", "threads", "count", "jobs", "text"),
    [
        (on("cuda", 1), 2, 1, 3, "3 GPUs"),
        (on("cuda", 2), 2, 2, 1, "3 GPUs"),
        (on("cpu", 1), 1, 1, 8, "8 cores"),
        (on("cpu", 2), 2, 4, 2, "8 cores"),
        (on("cpu", 16), 1, 8, 1, "8 cores"),  # more workers than cores
        (on("xla", 8), 1, 1, 1, "1 TPU"),
        (on("xla", 4, rehearsed=True), 1, 4, 2, "8 cores"),
    ],
)
def test_what_a_job_needs(placement: Placement, threads: int, count: int, jobs: int, text: str, machine: None) -> None:
    own = needed(placement, threads)
    assert (own.count, own.jobs, str(own)) == (count, jobs, text)


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 2, ["0", "1"]),
        ("5,2", 2, ["5", "2"]),
        ("3,-1,4", 1, ["3"]),  # CUDA stops at a name that it does not know
        ("", 0, []),
    ],
)
def test_gpus_are_those_that_the_user_or_scheduler_gives(
    visible: str | None, count: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == names


def test_the_smallest_job_decides_how_many_fit(machine: None) -> None:
    """A job that is rehearsed, since it wants more GPUs than there are, takes cores."""
    cpu4, cpu2 = configured("device=cpu4"), configured("device=cpu2")
    assert smallest_job([cpu4]).jobs == 2
    assert smallest_job([cpu4, cpu2]).jobs == 4
    gpu4 = configured("device=gpu4")
    assert gpu4.device.kind is DeviceKind.gpu
    assert gpu4.device.rehearse is Rehearse.auto
    assert str(smallest_job([gpu4])) == "8 cores"
    assert str(smallest_job([gpu4, configured("device=gpu")])) == "3 GPUs"


# --- Several processes ---------------------------------------------------------------------------------------


def run_job(own: Needed, folder: Path, job: int, seconds: float) -> None:
    """Hold what a job needs for some time, and note what it was, from when and until when."""
    with taken(own, folder) as names:
        start = time.monotonic()
        (folder / f"running-{job}").touch()
        time.sleep(seconds)
        (folder / f"{job}.json").write_text(json.dumps([names, start, time.monotonic()]))


def start_jobs(folder: Path, counts: Sequence[int], seconds: float) -> list[Any]:
    start_forkserver()
    context = multiprocessing.get_context("forkserver")
    own = [Needed(module.GPU, GPUS, count) for count in counts]
    jobs = [context.Process(target=run_job, args=(one, folder, job, seconds)) for job, one in enumerate(own)]
    for job in jobs:
        job.start()
    return jobs


def test_no_gpu_is_used_by_two_jobs(tmp_path: Path) -> None:
    """Large jobs get their turn, too, and two of them do not wait for each other."""
    counts = [1, 2, 3, 1, 2, 1]
    for job in start_jobs(tmp_path, counts, seconds=0.3):
        job.join(60)
        assert job.exitcode == 0
    found = [read(tmp_path, f"{job}.json") for job in range(len(counts))]
    assert [len(set(names)) for names, _, _ in found] == counts
    for (names, start, end), (others, other_start, other_end) in itertools.combinations(found, 2):
        assert end <= other_start or other_end <= start or not set(names) & set(others)
    assert in_use(Needed(module.GPU, GPUS, 1)) == []


def test_a_killed_job_frees_its_gpus(tmp_path: Path) -> None:
    own = Needed(module.GPU, GPUS, 3)
    (job,) = start_jobs(tmp_path, [3], seconds=60)
    wait_until((tmp_path / "running-0").exists, "the job does not start", 60)
    assert in_use(own) == list(GPUS)
    job.kill()
    with taken(own, tmp_path) as names:
        assert names == list(GPUS)
