"""Logs a run to Weights & Biases, in the run's folder unless WANDB_MODE says otherwise."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from runner.folder.metrics_log import MetricsReader
from runner.track.card import EVALUATED_TAG, TrackingRecord
from runner.track.description import NOTE_TAG

#: The x-axis of every chart. W&B's own step can only rise, and a metric may arrive for an earlier optimizer step.
STEP = "optimizer_step"
#: W&B's exit codes of runs that failed, or were killed.
_EXIT_CODES = {"FINISHED": 0, "FAILED": 1}
_KILLED = 255
#: Seconds that W&B has to upload the rest, where it is not offline.
_FINISH_TIMEOUT_S = 30.0


class WeightsAndBiases:
    """One W&B run. When a run is resumed, or goes back to a checkpoint, it is logged anew from `metrics.jsonl`.

    It keeps its id, for which W&B replaces what it had: each point is there once.
    """

    name = "W&B"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Any = None
        self._reader = MetricsReader(folder)
        self._started_service = False

    def begin(self) -> None:
        import wandb

        if self._run is not None:
            self._run.finish(exit_code=_KILLED)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder / "wandb")
        card, self._reader = TrackingRecord.read(self._folder), MetricsReader(self._folder)
        self._started_service |= _start_service(self._folder)
        tags = {name: value for name, value in card.tags.items() if not name.startswith("mlflow.")}
        self._run = wandb.init(
            id=card.key[:12],
            project=os.environ.get("WANDB_PROJECT") or card.experiment,
            name=card.run_name,
            notes=card.tags.get(NOTE_TAG),
            group=card.tags.get("sweep.id") or os.environ.get("WANDB_RUN_GROUP"),
            job_type="evaluation" if EVALUATED_TAG in card.tags else "training",
            tags=_labels(card),
            config={**tags, **card.typed_params()},
            dir=self._folder.absolute(),  # wherever W&B's own process was started
            mode=_mode(),
            reinit="create_new",  # the process may have another W&B run
            # Nothing is captured, watched or collected: the run's folder has all of that already, without secrets.
            settings=wandb.Settings(
                console="off",
                silent=True,
                symlink=False,
                disable_code=True,
                disable_git=True,
                save_code=False,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
                # A server that does not answer must not keep the command from ending.
                finish_timeout=_FINISH_TIMEOUT_S,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def send_metrics(self) -> None:
        new = self._reader.read()
        if self._run is None or self._reader.cut:
            self.begin()
            new = self._reader.read()
        run, self._run = self._run, None  # until all of it is logged: after a failure all is logged anew
        for (step, timestamp), row in groupby(new, key=lambda metric: (metric.step, metric.timestamp)):
            values = {metric.key: metric.value for metric in row}
            run.log({**values, STEP: step, "_timestamp": timestamp / 1000})
        self._run = run

    def close(self) -> None:
        import wandb

        card = TrackingRecord.read(self._folder)
        last = {name: value for name, value in card.last_tags.items() if not name.startswith("mlflow.")}
        self._run.notes = card.last_tags.get(NOTE_TAG) or card.tags.get(NOTE_TAG)
        self._run.tags = _labels(card)
        self._run.config.update(last, allow_val_change=True)
        self._run.summary["status"] = card.status
        self._run.finish(exit_code=_EXIT_CODES.get(card.status or "", _KILLED))
        if self._started_service:
            wandb.teardown()

    def how_to_open(self) -> Sequence[str]:
        if _mode() == "offline":
            return [f"  W&B: wandb sync {os.path.relpath(self._folder)}/wandb/offline-run-*"]
        return [f"  W&B: {self._run.url}"] if self._run is not None and self._run.url else []


def _start_service(folder: Path) -> bool:
    """Start W&B's own process, which writes its files; False if this process has one.

    It keeps its log in `wandb/` in `folder`, reports nothing to its makers, prints nothing and, where it needs a key
    that it does not have, asks for none. W&B's hooks, which would outlive it, are removed.
    """
    import wandb

    if "WANDB_SERVICE" in os.environ:
        return False
    variables = {"WANDB_CACHE_DIR": str(folder.absolute()), "WANDB_ERROR_REPORTING": "false"}
    variables = {name: value for name, value in variables.items() if name not in os.environ}
    hooks = sys.exit, sys.excepthook
    os.environ.update(variables)
    try:
        wandb.setup(wandb.Settings(silent=True))
    finally:
        for name in variables:
            del os.environ[name]
        sys.exit, sys.excepthook = hooks
    return True


def _mode() -> Any:
    return os.environ.get("WANDB_MODE") or "offline"


def _labels(card: TrackingRecord) -> list[str]:
    """W&B's tags are words, not names with values: the device, whether it was rehearsed, and the certificate."""
    tags = {**card.tags, **card.last_tags}
    rehearsed = ["rehearsed"] if tags.get("device.rehearsed") == "true" else []
    return [*(tags[name] for name in ("device", "certificate") if name in tags), *rehearsed]
