"""`python -m runner.evidence RUN … -o bundle.zip`, and `python -m runner.evidence verify bundle.zip`."""

from __future__ import annotations

import sys

from runner.cli import evidence_main

if __name__ == "__main__":
    sys.exit(evidence_main(sys.argv[1:]))
