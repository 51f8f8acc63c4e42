"""`python -m runner.compare RUN…`: compare setups by metric and speed, over seeds."""

from __future__ import annotations

import sys

from runner.cli import compare_main

if __name__ == "__main__":
    sys.exit(compare_main(sys.argv[1:]))
