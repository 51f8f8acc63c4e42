"""Profiles some optimizer steps with torch.profiler: for each worker a trace, and a table of costly operations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, schedule

from runner.config.schema import Profile
from runner.train.loop import Loop

FOLDER = "profile"
#: Operations in the table.
_SHOWN = 30


@contextmanager
def profiled(settings: Profile, loop: Loop, folder: Path) -> Iterator[None]:
    """Leave `profile/worker-<rank>.json.gz` and `.txt` in `folder`, if any steps are to be profiled.

    The trace is for ui.perfetto.dev or chrome://tracing, and has the phases of a step as well as its operations.
    """
    if settings.steps is None:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch prints when it starts and stops
    backend, activities = loop.backend, [ProfilerActivity.CPU]
    if backend.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)

    def write(profile: Any) -> None:
        into = folder / FOLDER
        into.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(into / f"worker-{backend.rank}.json.gz"))
        sort = f"self_{backend.device.type}_time_total"
        table = profile.key_averages().table(sort_by=sort, row_limit=_SHOWN, max_name_column_width=70)
        (into / f"worker-{backend.rank}.txt").write_text(table, encoding="utf-8")

    steps = schedule(skip_first=settings.skip - 1, wait=0, warmup=1, active=settings.steps, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=steps, on_trace_ready=write) as profiler:
        loop.meter.annotates, loop.on_step = True, profiler.step
        yield
        loop.meter.annotates, loop.on_step = False, None
