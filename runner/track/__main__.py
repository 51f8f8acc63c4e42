"""`python -m runner.track`: show MLflow's pages of the runs, or upload what a store has missed."""

from __future__ import annotations

import sys

from runner.cli import track_main

if __name__ == "__main__":
    sys.exit(track_main(sys.argv[1:]))
