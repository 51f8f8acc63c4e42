"""Finding an interrupted sweep again, and putting its books in order before it goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from runner.config.arguments import RESUME_SWEEP as KEY
from runner.errors import UserError, did_you_mean
from runner.folder.lock import held, is_held
from runner.run.summary import write_summary
from runner.sweep.states import KILLED, attempts, read_summary
from runner.sweep.sweep import FILE_NAME
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import RunCard, ending
from runner.track.mlflow_tracker import say


def find_sweep(identifier: str, sweeps: Path) -> Path:
    """The folder of the sweep with this id, or of the MLflow run with this id. Raises UserError.

    `sweeps`: the folder in which sweeps make theirs.
    """
    folders = [path.parent for path in sweeps.glob(f"*/{FILE_NAME}")]
    direct = Path(identifier)
    if (direct / FILE_NAME).exists():
        return direct
    for folder in folders:
        if identifier in (folder.name, _run_id(folder)):
            return folder
    names = [folder.name for folder in folders]
    hint = did_you_mean(identifier, names) if names else ": there are no sweeps"
    raise UserError(f"{KEY}={identifier} is no sweep in {sweeps}{hint}")


def _run_id(folder: Path) -> str | None:
    try:
        return RunCard.read(folder).run_id
    except UserError:  # a spoilt card must not hide the other sweeps
        return None


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold a sweep's folder for this process. Raises UserError if another one, or a job of its, works in it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(folder))
        except BlockingIOError as error:
            raise UserError(f"the sweep {folder.name} is still running: wait for it, or interrupt it first") from error
        going_on = [state.shown for state in attempts(folder) if is_held(state.folder)]
        if going_on:
            raise UserError(
                f"jobs of the sweep {folder.name} are still running ({'; '.join(going_on)}): wait for them, or end them"
            )
        yield


def close_books(folder: Path) -> None:
    """Close the books of every job whose process was killed before it had done so itself.

    One that said nothing is KILLED. One whose `summary.json` says how it ended, but not its card, was killed between
    the two, as a launcher may do that ends its processes on Ctrl-C.
    """
    for state in attempts(folder):
        if is_held(state.folder):
            continue
        status = read_summary(state.folder).get("status")  # read now: it may have ended since
        if status is None:
            write_summary(state.folder, {"status": KILLED, "error": "the process was killed", "eval": {}})
        if (state.folder / CARD_FILE).exists():
            _close_card(state.folder, status or KILLED)


def _close_card(folder: Path, status: str) -> None:
    try:
        card = RunCard.read(folder)
    except UserError as error:  # the sweep can go on without it
        say(f"the store will not know how this run ended: {error}")
        return
    if card.status is None:
        card.changed(folder, **ending(status, {}))
