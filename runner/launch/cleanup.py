"""Imported first by the forkserver, which ends after all of its workers, also if the parent was killed."""

from __future__ import annotations

import atexit
import gc
import os
import shutil

#: The variable with the temporary folder to remove then.
FOLDER = "RUNNER_TEMPORARY_FOLDER"


def _collect_garbage_again() -> None:
    gc.freeze()  # imported objects are not garbage, and their memory stays shared with the forkserver
    gc.enable()


if FOLDER in os.environ:
    atexit.register(shutil.rmtree, os.environ.pop(FOLDER), ignore_errors=True)
    # A fifth of the time of its imports would be spent on looking for garbage among them.
    gc.disable()
    os.register_at_fork(after_in_child=_collect_garbage_again)
