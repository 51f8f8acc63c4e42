"""What more hosts and other links would do, computed from measurements of two hosts.

    python -m benchmarks.slow_link.computed MEASUREMENTS.csv [--hosts 2,4] [--rates 100mbit,1gbit,10gbit]

Nothing here was run on that many hosts. A step of one worker, and what a step of two has in addition, are measured
(`--measured`: at which rate). A ring all-reduce sends 2 (n - 1) / n times the bytes of its vector, and the work that it
causes is taken to grow by this factor. Without overlap workers wait for as long as the link sends; with overlap, for
what that takes beyond the steps in flight. Not included: the slowest of four workers is slower than the slower of two.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.slow_link import records
from benchmarks.slow_link.network import bits_per_second
from benchmarks.slow_link.records import Row
from benchmarks.slow_link.table import BASE
from benchmarks.slow_link.variants import Variant, parse
from runner.cost.step import ring_bytes

#: Of a link's rate, what it carries besides headers.
_PAYLOAD = 0.95


def step_s(one_s: float, two: Row, variant: Variant, hosts: int, rate: str) -> float:
    """Seconds of an optimizer step of `hosts` workers. `one_s`: of one worker; `two`: as two workers were measured."""
    assert two.sync_bytes is not None, "gradients are averaged during the backward pass"
    # A fragment has a step for itself, all weights have k of them.
    period = 1 if variant.streaming else variant.k
    work = max(two.step_s - one_s - (two.stall_s or 0.0), 0.0) * ring_bytes(1, hosts) / ring_bytes(1, 2)
    link = ring_bytes(two.sync_bytes, hosts) * 8 / (bits_per_second(rate) * _PAYLOAD)
    hidden = variant.steps_in_flight * (one_s + work)
    return one_s + work + max(link - hidden, 0.0) / period


def ratio(rows: Sequence[Row], variant: Variant, hosts: int, rate: str) -> float:
    """Speed of `hosts` workers relative to one: median over repetitions."""
    one = {row.repetition: row.step_s for row in rows if row.variant == BASE}
    own = [row for row in rows if row.variant == variant.name and row.repetition in one]
    return statistics.median(
        hosts * one[row.repetition] / step_s(one[row.repetition], row, variant, hosts, rate) for row in own
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--measured", default="1gbit", help="the rate at which two hosts were measured")
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit")
    found = parser.parse_args()
    rows = records.read(found.measurements, found.measured)
    setups = [(int(hosts), rate) for hosts in found.hosts.split(",") for rate in found.rates.split(",")]
    print("| computed, of one worker |", " | ".join(f"{hosts} hosts, {rate}" for hosts, rate in setups), "|")
    print("| --- |", " | ".join("--:" for _ in setups), "|")
    for name in dict.fromkeys(row.variant for row in rows):
        variant = parse(name)
        if variant.workers > 1 and variant.k > 1 and not variant.local_sgd:
            cells = [f"{ratio(rows, variant, hosts, rate):.2f}" for hosts, rate in setups]
            print(f"| `{name}` |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
