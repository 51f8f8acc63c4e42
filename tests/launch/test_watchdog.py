"""Who the others wait for, by their signs of life; stopped and hanging workers in a real run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from runner.launch.watchdog import Heartbeat, waited_for
from tests.processes import TIMEOUT_S, children, output, start, wait_for, wait_until
from tests.runs import TRACKED, only_folder, read


def signs(*rows: tuple[int, int, int, str]) -> dict[int, Heartbeat]:
    return {rank: Heartbeat(*row) for rank, row in enumerate(rows)}


EARLIER = signs((1, 50, 4, "communication"), (1, 48, 4, "forward"), (1, 50, 4, "communication"))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (
            signs((4, 50, 4, "communication"), (1, 48, 4, "forward"), (4, 50, 4, "communication")),
            "worker 1 did not answer",
        ),
        (signs((4, 50, 4, "communication"), (4, 48, 4, "forward"), (4, 50, 4, "backward")), "worker 1 did not come"),
        (signs((4, 50, 4, "communication"), (4, 49, 4, "forward"), (4, 50, 4, "communication")), None),
        ({0: Heartbeat(4, 50, 4, "communication")}, "workers 1, 2 did not answer"),
        (signs((4, 50, 4, "forward"), (4, 48, 4, "forward"), (4, 50, 4, "forward")), None),
    ],
)
def test_who_is_waited_for(now: dict[int, Heartbeat], expected: str | None) -> None:
    """One without a new sign is gone, one that computes is late; one that makes progress takes its time."""
    found = waited_for(EARLIER, now, 3)
    assert found is None if expected is None else found is not None and found.startswith(expected)


@pytest.mark.long
def test_a_stopped_worker_is_named_and_replaced(tmp_path: Path) -> None:
    """First a warning, then an end within the time-out, and a new start from the newest checkpoint."""
    limits = ["launch.timeout_s=20", "launch.max_restarts=1", "checkpoint.every_steps=5"]
    process = start(tmp_path, "-m", "runner", *TRACKED, *limits, "device=cpu2", "epochs=200", "tracking=none")
    wait_for(tmp_path, "outputs/*/*/checkpoints/step-*/complete.json", process)
    (forkserver,) = [pid for pid in children(process.pid) if "forkserver" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(children(forkserver)[1], signal.SIGSTOP)
    wait_until(lambda: "warning: worker 1 did not answer" in output(tmp_path), "no warning")
    wait_until(lambda: "restart 1 of 1" in output(tmp_path), "no restart")
    assert process.wait(timeout=TIMEOUT_S) == 0, output(tmp_path)
    summary = read(only_folder(tmp_path), "summary.json")
    assert summary["status"] == "FINISHED"
    assert any("worker 1 did not answer" in note for note in summary["notes"])
    assert 20 <= summary["speed"]["restart_share"] * summary["wall_s"] <= summary["wall_s"]


#: A worker whose step takes a second of its own time, and which waits for another then.
WATCHED = """
import os, sys, time
from types import SimpleNamespace
import torch.distributed as dist
from runner.launch.watchdog import Watchdog
def give_up(why):
    print(why, flush=True)
    os._exit(1)
loop = SimpleNamespace(
    backend=SimpleNamespace(rank=0, world_size=2),
    meter=SimpleNamespace(timer=SimpleNamespace(progress_count=0, phase="backward")),
    policy=SimpleNamespace(collective_forward=False),
    optimizer_step=3,
)
with Watchdog(loop, dist.HashStore(), 5.0, give_up):
    print("watching", flush=True)
    for _ in range(10):
        time.sleep(0.1)
    loop.meter.timer.progress_count += 1
    print("a step", flush=True)
    time.sleep(60)
"""


def test_a_pause_of_the_process_does_not_count(tmp_path: Path) -> None:
    """As by Ctrl-Z or a suspended job, for longer than the time-out, which then counts as before."""
    process = start(tmp_path, "-c", WATCHED)
    wait_for(tmp_path, "output.txt", process)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(6)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(timeout=TIMEOUT_S) == 1
    lines = output(tmp_path).splitlines()
    assert lines[:2] == ["watching", "a step"]
    assert lines[-1].startswith("worker 1 did not answer in step 4")
