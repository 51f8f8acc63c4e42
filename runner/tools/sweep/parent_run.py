"""The run in the tracking store that is the parent of a sweep's jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from runner.config.choices import Goal
from runner.config.schema import Evaluation, Tracking
from runner.errors import UserError
from runner.folder.lock import is_locked
from runner.folder.record import FAILED, FINISHED, KILLED, PREEMPTED, STOPPED
from runner.tools.sweep.sweep import Sweep, attempts
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import TrackingRecord, user_tags
from runner.track.delivery import Delivery, deliver
from runner.track.description import NOTE_TAG, OBJECTIVE_TAG, VIEW_TAGS, first_chart
from runner.track.secrets import masked
from runner.track.store import error_summary, how_to_open, store_of


def parent_card(tracking: Tracking, folder: Path, recipe: str, varied: tuple[str, ...], metric: str) -> TrackingRecord:
    """The card of a sweep's parent run, from its folder or new; written there. `metric`: of the objective.

    Raises UserError if a sweep is resumed with another store than before.
    """
    uri = store_of(tracking)
    store = None if uri is None else masked(uri)
    over = " × ".join(varied) or "one job"
    name = f"sweep · {recipe} · {over}"
    tags = {
        **user_tags(),
        NOTE_TAG: f"- Sweep over {over}\n- To resume: the same command with `resume_sweep={folder.name}`",
        OBJECTIVE_TAG: f"eval/{metric}",
        "sweep.id": folder.name,
        "sweep.varied": ", ".join(varied),
    }
    if (folder / CARD_FILE).exists():
        card = TrackingRecord.read(folder)
        if card.store != store:
            raise UserError(
                f"the sweep {folder.name} was logged to {card.store or 'no store'}, but this command logs to "
                f"{store or 'none'}: resume it from the same folder, with the same tracking.uri=… (or tracking=none)"
            )
        return card.update(folder, run_name=name, tags=tags)
    card = TrackingRecord(experiment=tracking.experiment, run_name=name, params={}, tags=tags, store=store)
    card.write(folder)
    return card


class ParentRun:
    """A sweep's run in MLflow, opened before the first job and closed after the last one."""

    def __init__(self, card: TrackingRecord, sweep: Sweep, uri: str, evaluation: Evaluation) -> None:
        # `resumed`: the run of an earlier command is found by its key even if its id was never received.
        self._delivery = Delivery(card, Path(sweep.folder), uri, resumed=True)
        self._sweep, self._evaluation = sweep, evaluation
        self.uri = uri

    def open(self) -> str:
        """The run's id. Raises UserError if the store fails, before any job has started."""
        try:
            self._delivery.open()
            self._delivery.reopen()
            self._delivery.tag_experiment(f"{VIEW_TAGS}{self._view}", self._charts())
        except Exception as error:
            raise UserError(
                f"tracking.uri={masked(self.uri)} does not accept the sweep's parent run ({error_summary(error)}): "
                "repair the store, or use tracking=none"
            ) from error
        assert self._delivery.run_id is not None
        return self._delivery.run_id

    def close(self, status: str) -> None:
        """Record how the sweep ended, in its folder first, and send it. Raises any error of the store.

        `status`: of the command; a sweep that ran to its end is FAILED unless all jobs finished.
        """
        states = self._sweep.states()
        ends = (FINISHED, FAILED, KILLED, PREEMPTED, STOPPED)
        counts = {name: sum(state.status == name for state in states) for name in ends}
        missing = len(self._sweep.jobs or ()) > len(states)
        if status == FINISHED and (counts[FINISHED] + counts[STOPPED] < len(states) or missing):
            status = FAILED
        tags = {f"sweep.{name.lower()}": str(count) for name, count in counts.items()}
        self._delivery.mark_ended(status, {"sweep.jobs": str(sum(counts.values())), **tags})
        self._delivery.close()
        self._close_killed_jobs()
        self._delivery.require_card()

    def _close_killed_jobs(self) -> None:
        """Send the end of jobs whose process was killed before it had sent it."""
        for state in attempts(Path(self._sweep.folder)):
            if (state.folder / CARD_FILE).exists() and not is_locked(state.folder):
                card = TrackingRecord.read(state.folder)
                if card.store == masked(self.uri) and card.status is not None and not card.delivered:
                    deliver(state.folder, self.uri)

    @property
    def _view(self) -> str:
        """The key of the view of its jobs."""
        return f"sweep-{self._sweep.id}"

    def _charts(self) -> str:
        """A view of MLflow's charts: all jobs, the best first, and the objective's chart first."""
        metric = self._evaluation.metric
        view = {
            # The parent has no parameters. MLflow nests runs, and hides the nested ones, only if sorted by date.
            "searchFilter": f"tags.\"sweep.id\" = '{self._sweep.id}' and params.seed != ''",
            "orderByKey": f"metrics.`eval/{metric}`",
            "orderByAsc": self._evaluation.goal is Goal.min,
            **first_chart(f"eval/{metric}"),
        }
        return json.dumps(view)

    def how_to_open(self) -> Sequence[str]:
        """Lines that say how to open all jobs in MLflow's charts."""
        page = f"experiments/{self._delivery.experiment_id}/runs?compareRunsMode=CHART&viewStateShareKey={self._view}"
        return how_to_open(self.uri, page)
