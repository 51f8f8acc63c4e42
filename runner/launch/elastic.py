"""Start the workers of a job on this machine and wait for them, with torch's elastic launcher."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from runner.errors import UserError

#: What every worker imports; the forkserver imports it once, before it is known what will be trained.
PRELOADED = [
    "runner.launch.worker",
    "sklearn.metrics",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "torch.optim.adamw",
]


#: Signals that the elastic launcher handles while it runs.
_ELASTIC_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class WorkerFailed(Exception):
    """A worker ended with an error of its own. The message holds its traceback."""


def start_forkserver() -> None:
    """Start the process that workers are forked from, once for all jobs of this command.

    It imports torch and the model code while the parent composes the configuration, so that a worker starts with
    everything imported. It never runs a kernel: a process that has run one cannot be forked safely.
    """
    # Not torch_xla: importing it changes layers and functions of torch for workers on the CPU, too.
    multiprocessing.set_forkserver_preload(PRELOADED)
    # Ctrl-C is the parent's to answer: a server interrupted in the middle of its imports would print where it was.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


def launch(entry: Callable[[dict[str, Any], str], Any], job: dict[str, Any], workers: int) -> dict[str, Any]:
    """Run `entry(job, meeting)` in `workers` processes that meet in the folder `meeting`; rank 0's result.

    Raises UserError for a mistake that only a worker could find, WorkerFailed for any other error in one, and
    KeyboardInterrupt when the launch is interrupted.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_elastic()
    with tempfile.TemporaryDirectory(prefix="runner-") as meeting, _no_open_port():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            # Workers of one machine meet in files: nothing listens on the network.
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(meeting) / "rendezvous"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.05,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=meeting),  # or it leaves a folder in the temporary one
        )
        # The launcher puts handlers of its own in place of these, and leaves them there.
        handlers = {number: signal.getsignal(number) for number in _ELASTIC_SIGNALS}
        if hasattr(config, "signals_to_handle"):  # not in torch 2.9; what is ignored, as nohup has it, is to stay so
            heard = [number.name for number, handler in handlers.items() if handler is not signal.SIG_IGN]
            config.signals_to_handle = ",".join(heard)
        try:
            results = elastic_launch(config, entry)(job, meeting)
        except SignalException as error:
            raise KeyboardInterrupt from error
        except ChildFailedError as error:
            raise _failure(error, Path(meeting)) from None
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler)
    result: dict[str, Any] = results[0]
    return result


def _failure(error: Any, meeting: Path) -> BaseException:
    """What to raise for failed workers: the mistake of a user if there is one, else the error that came first.

    When one worker fails, the collectives of the others fail as well, and the launcher may see one of these first.
    """
    from runner.launch.worker import ERROR_PREFIX

    said = [json.loads(path.read_text()) for path in meeting.glob(f"{ERROR_PREFIX}*.json")]
    said.sort(key=lambda one: (not one["user_error"], one["time_ns"]))
    if said and said[0]["user_error"]:
        return UserError(said[0]["message"])
    if said:
        return WorkerFailed(f"worker {said[0]['rank']} failed\n{said[0]['trace']}")
    rank, failure = error.get_first_failure()
    if failure.exitcode == 128 + signal.SIGINT:
        return KeyboardInterrupt()
    ending = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return WorkerFailed(f"worker {rank} ended with {ending} and said nothing (out of memory?)")


@contextlib.contextmanager
def _no_open_port() -> Iterator[None]:
    """Keep the launcher from opening a port while workers of one machine are started."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _quiet_elastic() -> None:
    # Its reports span a screen and name internals; `_failure` says the same in a few lines.
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
