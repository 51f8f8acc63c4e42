"""The run in the tracking store under which the jobs of a sweep are found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlencode

from runner.config.choices import Goal
from runner.config.schema import Evaluation, Tracking
from runner.errors import UserError
from runner.sweep.sweep import Sweep
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import RunCard, user_tags
from runner.track.delivery import Delivery
from runner.track.mlflow_tracker import how_to_open, short
from runner.track.secrets import masked
from runner.track.tracker import store_of


def parent_card(tracking: Tracking, folder: Path, varied: tuple[str, ...]) -> RunCard:
    """The card of a sweep's parent run: the one that lies in its folder, or a new one; written there.

    Raises UserError for a sweep that goes on with another store than before.
    """
    uri = store_of(tracking)
    store = None if uri is None else masked(uri)
    name = f"sweep · {' × '.join(varied) or 'one job'}"
    tags = {**user_tags(), "sweep.id": folder.name, "sweep.varied": ", ".join(varied)}
    if (folder / CARD_FILE).exists():
        card = RunCard.read(folder)
        if card.store != store:
            raise UserError(
                f"the sweep {folder.name} was logged to {card.store or 'no store'}, and this command logs to "
                f"{store or 'none'}: start it where it was started, or give tracking.uri=… (or tracking=none) as before"
            )
        return card.changed(folder, run_name=name, tags=tags)
    card = RunCard(experiment=tracking.experiment, run_name=name, params={}, tags=tags, store=store)
    card.write(folder)
    return card


class ParentRun:
    """A sweep's run in MLflow, opened before the first job and closed after the last."""

    def __init__(self, card: RunCard, sweep: Sweep, uri: str) -> None:
        # A sweep that goes on has a run, even where the store took it and could not say so.
        self._delivery = Delivery(card, Path(sweep.folder), uri, resumed=True)
        self._sweep = sweep
        self._uri = uri

    def open(self) -> str:
        """The run's id. Raises UserError if the store takes nothing, before any job has begun."""
        try:
            self._delivery.open()
            self._delivery.reopen()
        except Exception as error:
            raise UserError(
                f"tracking.uri={masked(self._uri)} does not take the sweep's parent run ({short(error)}): "
                "mend the store, or use tracking=none"
            ) from error
        assert self._delivery.run_id is not None
        return self._delivery.run_id

    def how_to_open(self, evaluation: Evaluation) -> Sequence[str]:
        """Lines that say how to see all jobs side by side in MLflow's charts, the best first."""
        # Sorted by anything but their date runs are not nested, and so all drawn; the parent has no parameters.
        query = {
            "compareRunsMode": "CHART",
            "searchFilter": f"tags.\"sweep.id\" = '{self._sweep.id}' and params.seed != ''",
            "orderByKey": f"metrics.`eval/{evaluation.metric}`",
            "orderByAsc": str(evaluation.goal is Goal.min).lower(),
        }
        page = f"experiments/{self._delivery.experiment_id}/runs?{urlencode(query, quote_via=quote)}"
        return how_to_open(self._uri, page)

    def settle(self, status: str, counts: dict[str, int]) -> None:
        """Note what became of the jobs, in the sweep's folder first. `counts`: jobs by status."""
        tags = {f"sweep.{name.lower()}": str(count) for name, count in counts.items()}
        self._delivery.settle(status, {"sweep.jobs": str(sum(counts.values())), **tags})

    def close(self) -> None:
        """Tell the store. Raises what it is in trouble with."""
        self._delivery.close()
