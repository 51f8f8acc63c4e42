"""Workers as processes: their result, and the exception for every way in which they can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from runner.errors import Preempted, UserError
from runner.launch import signals
from runner.launch.local import WorkerFailed, WorkerLost, _own_folder, launch, start_forkserver, workers_see
from runner.launch.signals import PREEMPTIONS, handle_signals
from tests.launch import entries
from tests.processes import children, wait_until


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test leaves no worker and no rendezvous folder, and the process's own signal handlers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, *PREEMPTIONS)}
    start_forkserver()
    others = set(workers())  # of other tests in this process
    yield
    vars(signals.requests).update(vars(signals.Requests()))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    wait_until(lambda: set(workers()) <= others, "workers are left", 10)
    assert list(_own_folder(os.getpid()).glob("tmp*")) == []


def workers() -> list[int]:
    pid = forkserver._forkserver._forkserver_pid
    return children(pid) if pid is not None and Path(f"/proc/{pid}").exists() else []


def in_background(action) -> None:  # type: ignore[no-untyped-def]
    """Run `action` as soon as two workers wait for what happens to them, and the parent knows."""

    def wait_and_act() -> None:
        wait_until(lambda: len(list(_own_folder(os.getpid()).glob("tmp*/waits-*"))) == 2, "no workers", 60)
        time.sleep(0.2)
        action()

    threading.Thread(target=wait_and_act, daemon=True).start()


def test_the_result_of_rank_0() -> None:
    job, rank, size, local_rank, text = launch(entries.rank_and_size, {"a": 1}, 3)
    assert (job, rank, size, local_rank, len(text)) == ({"a": 1}, 0, 3, "0", 1_000_000)


def test_workers_see_the_gpus_that_they_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of this process, and of later workers, stays as it is."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    before = launch(entries.visible_gpus, None, 1)
    with workers_see(["2", "GPU-a"]):
        assert launch(entries.visible_gpus, None, 1) == "2,GPU-a"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    assert launch(entries.visible_gpus, None, 1) == before


def test_a_launch_stays_in_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers write to relative paths meanwhile, in threads and processes of their own."""
    visited: list[object] = []
    monkeypatch.setattr(os, "chdir", visited.append)
    launch(entries.rank_and_size, None, 1)
    assert visited == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["ours", "the user's", "the user's policy"],
)
def test_threads_of_workers_spin_briefly(environment: dict[str, str], expected: str | None) -> None:
    """Unless the user says otherwise. In a process that has no forkserver yet."""
    script = "from runner.launch.local import launch\nfrom tests.launch import entries\n"
    script += "if __name__ == '__main__': print(launch(entries.spins, None, 1))"
    known = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=known | environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == str(expected)


def test_workers_collect_garbage_though_their_forkserver_does_not() -> None:
    assert launch(entries.collects_garbage, None, 1) == (True, True)


@pytest.mark.parametrize("killed", [0, 1])
def test_the_worker_that_was_killed_is_named(killed: int) -> None:
    """Not one of those that lose their connection to it, and are seen to fail before."""
    with pytest.raises(WorkerLost, match=f"worker {killed} ended with signal 9"):
        launch(entries.kill_itself, killed, 3)


def test_errors_of_workers() -> None:
    """A user's mistake first, then the error that was no consequence of another."""
    with pytest.raises(UserError, match="a mistake"):
        launch(entries.fail, "user error", 2)
    with pytest.raises(WorkerFailed, match=r"(?s)worker 1 failed.*Traceback.*ValueError: broken"):
        launch(entries.fail, "error", 2)


def test_a_killed_forkserver() -> None:
    """Its children are not left to themselves, and the next launch starts another."""
    pid = forkserver._forkserver._forkserver_pid
    assert pid is not None
    in_background(lambda: os.kill(pid, signal.SIGKILL))
    with pytest.raises(WorkerLost, match="forkserver"):
        launch(entries.wait, None, 2)
    assert launch(entries.rank_and_size, 1, 1)[1] == 0


def test_a_signal_to_the_forkserver() -> None:
    """Which passes it on to the parent, in a launch and before."""
    handle_signals()
    pid = forkserver._forkserver._forkserver_pid
    assert pid is not None
    in_background(lambda: os.kill(pid, signal.SIGTERM))
    with pytest.raises(Preempted) as caught:
        launch(entries.save_when_asked, 0.1, 2, grace_s=30)
    assert caught.value.step == 7
    os.kill(pid, signal.SIGKILL)  # or the signal would stay pending for the next launch
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    vars(signals.requests).update(vars(signals.Requests()))
    start_forkserver()
    pid = forkserver._forkserver._forkserver_pid
    assert pid is not None
    os.kill(pid, signal.SIGUSR1)
    with pytest.raises(Preempted):
        time.sleep(5)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted)])
def test_signals_end_workers_that_cannot_save(number: signal.Signals, error: type[BaseException]) -> None:
    handle_signals()
    in_background(lambda: os.kill(os.getpid(), number))
    with pytest.raises(error) as caught:
        launch(entries.wait, None, 2, grace_s=30)
    assert isinstance(caught.value, Preempted) == (number is signal.SIGTERM)


@pytest.mark.parametrize("number", PREEMPTIONS)
def test_a_preempted_parent_lets_its_workers_save(number: signal.Signals) -> None:
    handle_signals()
    in_background(lambda: os.kill(os.getpid(), number))
    with pytest.raises(Preempted) as caught:
        launch(entries.save_when_asked, 0.5, 2, grace_s=30)
    assert caught.value.step == 7


def test_a_preempted_worker() -> None:
    handle_signals()
    with pytest.raises(Preempted) as caught:
        launch(entries.save_because_of_worker_1, None, 2, grace_s=30)
    assert caught.value.step == 3


def test_the_grace_period_ends() -> None:
    handle_signals()
    in_background(lambda: os.kill(os.getpid(), signal.SIGTERM))
    started = time.monotonic()
    with pytest.raises(Preempted) as caught:
        launch(entries.save_when_asked, 60.0, 2, grace_s=1)
    assert caught.value.step is None
    assert time.monotonic() - started < 15


def test_a_second_signal_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_SAME_REQUEST_S", 1.0)
    handle_signals()

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.2)
        os.kill(os.getpid(), signal.SIGTERM)

    in_background(twice)
    started = time.monotonic()
    with pytest.raises(Preempted):
        launch(entries.save_when_asked, 60.0, 2, grace_s=60)
    assert time.monotonic() - started < 15
