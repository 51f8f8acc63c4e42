"""`python -m runner.track`: show MLflow's pages, or upload what a store does not have."""

from __future__ import annotations

import sys

from runner.cli import track_main

if __name__ == "__main__":
    sys.exit(track_main(sys.argv[1:]))
