"""`python -m benchmarks.faults EXPERIMENT …`: inject faults into small runs, and count what is not as it should be.

Trials go to `trials.jsonl` in `--out` as they are made; those that are there already are not made again, so that a
campaign can be stopped at any time and run in pieces. All are seeded. The tables are made from all trials.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.faults import records
from benchmarks.faults.kills import kills
from benchmarks.faults.records import Trial
from benchmarks.faults.runs import Place
from benchmarks.sync_table.train import commit, terminated_as_interrupted

ROOT = Path(__file__).parents[2]
