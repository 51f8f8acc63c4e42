"""`python -m runner.plan [overrides]`: print the plan and the certificate, and train nothing."""

from __future__ import annotations

import sys

from runner.cli import plan_main

if __name__ == "__main__":
    sys.exit(plan_main(sys.argv[1:]))
