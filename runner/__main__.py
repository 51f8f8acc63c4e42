"""`python -m runner`, and the console script `runner`."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

# The first thing done, so that the time to the first optimizer step includes every import.
STARTED_AT = time.time()


def _leave_at_once(signum: int, frame: FrameType | None) -> None:
    # Until a job starts there is nothing to clean up, and an interrupt that is raised inside the imports of torch or
    # NumPy can be swallowed there. A job puts Python's own handler back.
    os.write(2, b"\ninterrupted\n")
    os._exit(128 + signum)


def main() -> None:
    signal.signal(signal.SIGINT, _leave_at_once)
    # Imported here: worker processes import this module again and need none of the command line.
    from runner.cli import main as run

    sys.exit(run(sys.argv[1:], STARTED_AT))


if __name__ == "__main__":
    main()
