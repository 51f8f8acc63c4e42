"""Imported first by the forkserver, which ends after all of its workers, also if the parent was killed."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
from functools import partial

from runner.launch.signals import PREEMPTIONS

#: The variable with the temporary folder to remove then.
FOLDER = "RUNNER_TEMPORARY_FOLDER"
_COMMAND = os.getppid()


def _pass_on(number: int, frame: object) -> None:
    """Send a signal to the command that has started the forkserver: a scheduler may signal any process of a job."""
    if os.getppid() == _COMMAND:  # if it was killed, its number may be another process's
        os.kill(_COMMAND, number)


def _collect_garbage_again() -> None:
    gc.freeze()  # imported objects are not garbage, and their memory stays shared with the forkserver
    gc.enable()


if FOLDER in os.environ:
    atexit.register(shutil.rmtree, os.environ.pop(FOLDER), ignore_errors=True)
    # A fifth of the time of its imports would be spent on looking for garbage among them.
    gc.disable()
    for _number in PREEMPTIONS:
        signal.signal(_number, _pass_on)
    _block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, PREEMPTIONS)
    _unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, PREEMPTIONS)
    _unblock()
    # A worker answers its signals itself, once it can.
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_collect_garbage_again)
