"""Start the workers of a job on this machine with torch's elastic launcher, and wait for them."""

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

from runner.errors import Diverged, RunFailed, UserError

#: What every worker imports. The forkserver imports it once, while the parent composes the configuration.
PRELOADED = [
    "runner.launch.worker",
    "sklearn.metrics",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "torch.optim.adamw",
]

#: A worker that fails leaves `<prefix><rank>.json` in the rendezvous folder.
ERROR_PREFIX = "error-"

#: Signals that the elastic launcher handles while it runs.
_ELASTIC_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class WorkerFailed(Exception):
    """A worker ended with an unexpected error. The message holds its traceback."""


def start_forkserver() -> None:
    """Start the process that workers are forked from. All jobs of a command share it.

    It imports torch and the model code while the parent composes the configuration, so that a worker starts with
    everything imported. It never runs a kernel: a process that has run one cannot be forked safely.
    """
    # Not torch_xla: importing it replaces layers and functions of torch, for workers on the CPU as well.
    multiprocessing.set_forkserver_preload(PRELOADED)
    # The parent handles Ctrl-C. A server that is interrupted during its imports would print a traceback.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The server imports from its current folder first, where a user's `runner.py` would take the place of this package.
    # Workers change back to this process's folder.
    here = os.getcwd()
    os.chdir(Path(__file__).parents[2])
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)
        signal.signal(signal.SIGINT, handler)


def launch(entry: Callable[[dict[str, Any], str], Any], job: dict[str, Any], workers: int) -> Any:
    """Run `entry(job, rendezvous)` in `workers` processes; rank 0's result. `rendezvous`: a folder for this launch.

    Raises UserError for a mistake that only a worker could find, RunFailed for a known reason, WorkerFailed for any
    other error in one, and KeyboardInterrupt when the launch is interrupted.
    """
    # Imported here because torch takes seconds, in which the forkserver should be at work already.
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_elastic()
    with tempfile.TemporaryDirectory(prefix="runner-") as rendezvous, _no_open_port():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            # Workers of one machine find each other through files: nothing listens on the network.
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(rendezvous) / "rendezvous"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.05,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=rendezvous),  # or it leaves a log folder behind
        )
        # The launcher replaces these handlers and does not restore them.
        handlers = {number: signal.getsignal(number) for number in _ELASTIC_SIGNALS}
        if hasattr(config, "signals_to_handle"):  # not in torch 2.9; a signal that nohup ignores stays ignored
            handled = [number.name for number, handler in handlers.items() if handler is not signal.SIG_IGN]
            config.signals_to_handle = ",".join(handled)
        try:
            results = elastic_launch(config, entry)(job, rendezvous)
        except SignalException as error:
            raise KeyboardInterrupt from error
        except ChildFailedError as error:
            raise _failure(error, Path(rendezvous)) from None
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler)
    return results[0]


def _failure(error: Any, rendezvous: Path) -> BaseException:
    """The exception for failed workers: a user's mistake or a known reason if there is one, else the first error.

    When one worker fails, the collectives of the others fail as well, and the launcher may see those first.
    """
    failures = [json.loads(path.read_text()) for path in rendezvous.glob(f"{ERROR_PREFIX}*.json")]
    failures.sort(key=lambda one: (not one["user_error"], not one["run_failed"], one["time_ns"]))
    if failures and failures[0]["user_error"]:
        return UserError(failures[0]["message"])
    if failures and failures[0]["run_failed"]:
        kind = Diverged if failures[0]["diverged"] else RunFailed
        return kind(failures[0]["message"])
    if failures:
        return WorkerFailed(f"worker {failures[0]['rank']} failed\n{failures[0]['trace']}")
    rank, failure = error.get_first_failure()
    if failure.exitcode == 128 + signal.SIGINT:
        return KeyboardInterrupt()
    ending = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return WorkerFailed(f"worker {rank} ended with {ending} and without a message (out of memory?)")


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
    # Its reports span a screen and name internals; `_failure` reports the same in a few lines.
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
