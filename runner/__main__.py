"""`python -m runner`, and the console script `runner`."""

from __future__ import annotations

import sys
import time

# The first thing done, so that the time to the first optimizer step includes every import.
STARTED_AT = time.time()


def main() -> None:
    # Imported here: worker processes import this module again and need none of the command line.
    from runner.cli import main as run

    sys.exit(run(sys.argv[1:], STARTED_AT))


if __name__ == "__main__":
    main()
