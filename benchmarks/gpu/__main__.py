"""`python -m benchmarks.gpu --minutes 9 --out FOLDER`: does the runner work on this GPU, and how fast is it?

Needs torch, transformers, accelerate and the runner's pure-Python dependencies, no network and no data. Each check is
written to `results.jsonl` as it ends; those that are there already are not repeated. `table.md` lists what passed, what
failed and what was not reached. `--device cpu` tries the checks themselves, with a tiny model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import json_lines
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.material import write_material
from benchmarks.gpu.runs import Bench, Failed, NotReached

#: Seconds in which no further check is begun.
_RESERVE_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="end after this time (default: 9)")
    parser.add_argument("--out", type=Path, required=True, help="folder of results.jsonl and table.md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=[check.__name__ for check in CHECKS], help="some of the checks")
    found = parser.parse_args()
    deadline = time.monotonic() + 60 * found.minutes
    found.out.mkdir(parents=True, exist_ok=True)
    results = found.out / "results.jsonl"
    done = {row["check"] for row in json_lines.read(results)}
    wanted = [check for check in CHECKS if found.only is None or check.__name__ in found.only]
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(Path(work), found.device, deadline - _RESERVE_S)
        write_material(bench.work, tiny=not bench.on_gpu)
        for check in wanted:
            if check.__name__ in done:
                continue
            start = time.monotonic()
            try:
                if bench.left_s() <= 0:
                    raise NotReached("the time was over")
                result, seen = "passed", check(bench)
            except NotReached as reason:
                result, seen = "not reached", str(reason)
            except Failed as reason:
                result, seen = "failed", str(reason)
            seconds = round(time.monotonic() - start, 1)
            print(f"{result}: {check.__name__} ({seconds} s): {seen}", flush=True)
            if result != "not reached":
                json_lines.append(
                    results, {"check": check.__name__, "result": result, "seen": seen, "seconds": seconds}
                )
    return _report(results, [check.__name__ for check in wanted], found.out / "table.md")


def _report(results: Path, wanted: list[str], table: Path) -> int:
    rows = {row["check"]: row for row in json_lines.read(results)}
    lines = ["| check | result | seconds | what was seen |", "| --- | --- | --: | --- |"]
    below = []
    for name in wanted:
        row = rows.get(name, {"result": "not reached", "seconds": "", "seen": ""})
        seen = row["seen"]
        if "\n" in seen:
            below.append(f"\n{name}:\n\n{seen}")
            seen = "below"
        lines.append(f"| `{name}` | {row['result']} | {row['seconds']} | {seen} |".replace("\n", " "))
    text = "\n".join([*lines, *below]) + "\n"
    table.write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(row["result"] == "failed" for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
