"""Time to the first optimizer step with 1 and with more workers. Cold starts, on this machine's CPU.

Arguments: settings of the runs in place of `tracking=none`, such as `recipe=cola … tracking=mlflow`.
"""

from __future__ import annotations

import sys

from side_by_side import interleaved, report

if __name__ == "__main__":
    base = ["max_steps=3", *(sys.argv[1:] or ["tracking=none"])]
    report(interleaved({name: [*base, f"device={name}"] for name in ("cpu", "cpu2", "cpu8")}, 5), "first_step_s")
