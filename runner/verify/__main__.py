"""`python -m runner.verify --a "<overrides>" --b "<overrides>"`: replay two setups in lockstep and compare them."""

from __future__ import annotations

import sys

from runner.cli import verify_main

if __name__ == "__main__":
    sys.exit(verify_main(sys.argv[1:]))
