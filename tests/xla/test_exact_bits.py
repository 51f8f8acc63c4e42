"""The masks of exact dropout on XLA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "exact_bits.py"


def test_masks_have_the_cpus_bits() -> None:
    """Three million elements, in few and in many dimensions, with small and large dropout rates: none differs."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run([sys.executable, SCRIPT, "xla"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 of 3," in done.stdout
