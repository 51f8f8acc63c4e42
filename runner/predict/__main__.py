"""`python -m runner.predict MODEL_OR_RUN -o FILE`: the predictions of a saved model."""

from __future__ import annotations

import sys

from runner.cli import predict_main

if __name__ == "__main__":
    sys.exit(predict_main(sys.argv[1:]))
