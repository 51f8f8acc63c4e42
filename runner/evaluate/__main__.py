"""`python -m runner.evaluate MODEL_OR_RUN`: the metrics of a saved model."""

from __future__ import annotations

import sys

from runner.cli import evaluate_main

if __name__ == "__main__":
    sys.exit(evaluate_main(sys.argv[1:]))
