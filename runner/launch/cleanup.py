"""Imported first by the forkserver, which ends after all of its workers, also if the parent was killed."""

from __future__ import annotations

import atexit
import os
import shutil

#: The variable with the temporary folder to remove then.
FOLDER = "RUNNER_TEMPORARY_FOLDER"

if FOLDER in os.environ:
    atexit.register(shutil.rmtree, os.environ.pop(FOLDER), ignore_errors=True)
