"""Resuming a sweep: finding its folder, locking it, and recording the end of jobs whose process was killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from runner.config.arguments import RESUME_SWEEP as KEY
from runner.errors import RunFailed, UserError, did_you_mean
from runner.folder.lock import is_locked, locked
from runner.folder.record import KILLED, RunRecord
from runner.log import LOG
from runner.tools.sweep.sweep import FILE_NAME, attempts
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import TrackingRecord


def find_sweep(identifier: str, sweeps: Path) -> Path:
    """The folder of a sweep, given its folder, id or MLflow run id. `sweeps`: contains all sweeps. Raises UserError."""
    if (Path(identifier) / FILE_NAME).exists():
        return Path(identifier)
    folders = [path.parent for path in sweeps.glob(f"*/{FILE_NAME}")]
    for folder in folders:
        if identifier in (folder.name, _run_id(folder)):
            return folder
    names = [folder.name for folder in folders]
    hint = did_you_mean(identifier, names) if names else ", which contains no sweeps"
    raise UserError(f"{KEY}={identifier} is not a sweep in {sweeps}{hint}")


def _run_id(folder: Path) -> str | None:
    try:
        return TrackingRecord.read(folder).run_id
    except UserError:  # this sweep is not tracked, or its card is invalid: others can still be found
        return None


@contextlib.contextmanager
def sweep_lock(folder: Path) -> Iterator[None]:
    """Lock a sweep's folder for this process. Raises UserError while another process or a job works in it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError as error:
            raise UserError(f"the sweep {folder.name} is still running: wait for it, or interrupt it first") from error
        running = [state.shown for state in attempts(folder) if is_locked(state.folder)]
        if running:
            raise UserError(
                f"jobs of the sweep {folder.name} are still running ({'; '.join(running)}): wait for them, or end them"
            )
        yield


def mark_killed_jobs(folder: Path) -> None:
    """Record in `summary.json` and `tracking.json` the end of every job whose process was killed before it could.

    A job without a summary is KILLED. If only the card has no status, it gets that of the summary.
    """
    for state in attempts(folder):
        if is_locked(state.folder):
            continue
        record = RunRecord.read_if_valid(state.folder)  # read now: the job may have ended in the meantime
        try:
            if record is None:
                record = RunRecord(KILLED, error="the process was killed")
                record.write(state.folder)
            if (state.folder / CARD_FILE).exists():
                card = TrackingRecord.read(state.folder)
                if card.status is None:
                    card.mark_ended(state.folder, record.status)
        except (UserError, RunFailed) as error:  # the sweep can continue without it
            LOG.warning(f"folder and tracking store will not show how this run ended: {error}")
