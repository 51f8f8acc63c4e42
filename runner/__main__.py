"""`python -m runner`, and the console script `runner`."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from types import FrameType

# The first thing done, so that the time to the first optimizer step includes every import.
STARTED_AT = time.time()


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    # Until a job starts there is nothing to clean up, and an interrupt that is raised inside the imports of torch or
    # NumPy can be swallowed there. A job sets its own handlers.
    local = sys.modules.get("runner.launch.local")
    if local is not None and hasattr(local, "cleanup_process"):  # its import may not have come to an end
        local.cleanup_process()
    interrupted = number == signal.SIGINT
    os.write(2, b"\ninterrupted\n" if interrupted else b"\npreempted before the run had begun\n")
    os._exit(130 if interrupted else 75)  # runner.launch.signals, which is not imported yet


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _leave_at_once)
    # Python looks for garbage after every 700 new objects; imports create about a million, none of them garbage.
    gc.set_threshold(50_000)
    # A recipe in the current folder is found, as with `python -m runner`; but last: it hides no installed package.
    here = os.getcwd()
    if here not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.append(here)
    # Imported here: worker processes import this module again and need none of the command line.
    from runner.cli import main as run

    code = run(sys.argv[1:], STARTED_AT)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(
            number, signal.SIG_IGN
        )  # the interpreter would restore the defaults before it exits with this code
    sys.exit(code)


if __name__ == "__main__":
    main()
