"""Profiles some optimizer steps with torch.profiler: for each worker a trace, and a table of costly operations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, schedule

from runner.backends import Backend
from runner.config.schema import Profile
from runner.train.hooks import Training

FOLDER = "profile"
#: Operations in the table.
_SHOWN = 30


class Profiler:
    """Leaves `profile/worker-<rank>.json.gz` and `.txt` in the run's folder. A hook, and the context of training.

    The trace is for ui.perfetto.dev or chrome://tracing, and has the phases of a step as well as its operations.
    """

    def __init__(self, settings: Profile, folder: Path, backend: Backend) -> None:
        assert settings.steps is not None
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch prints when it starts and stops
        self._folder, self._rank, self._device = folder / FOLDER, backend.rank, backend.device.type
        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        steps = schedule(skip_first=settings.skip - 1, wait=0, warmup=1, active=settings.steps, repeat=1)
        self._profile = torch.profiler.profile(activities=activities, schedule=steps, on_trace_ready=self._write)

    def __enter__(self) -> Profiler:
        self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._profile.stop()

    def after_step(self, training: Training) -> None:
        self._profile.step()

    def _write(self, profile: Any) -> None:
        self._folder.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(self._folder / f"worker-{self._rank}.json.gz"))
        sort = f"self_{self._device}_time_total"
        table = profile.key_averages().table(sort_by=sort, row_limit=_SHOWN, max_name_column_width=70)
        (self._folder / f"worker-{self._rank}.txt").write_text(table, encoding="utf-8")
