"""The run in the tracking store under which the jobs of a sweep are found."""

from __future__ import annotations

from pathlib import Path

from runner.errors import UserError
from runner.schema import Tracking
from runner.sweep.sweep import Sweep
from runner.tracking.card import FILE_NAME as CARD_FILE
from runner.tracking.card import RunCard, user_tags
from runner.tracking.delivery import Delivery
from runner.tracking.secrets import masked
from runner.tracking.tracker import store_of


def parent_card(tracking: Tracking, folder: Path, varied: tuple[str, ...]) -> RunCard:
    """The card of a sweep's parent run: the one that lies in its folder, or a new one, which is written there."""
    if (folder / CARD_FILE).exists():
        return RunCard.read(folder)
    store = store_of(tracking)
    card = RunCard(
        experiment=tracking.experiment,
        run_name=f"sweep · {' × '.join(varied) or 'one job'}",
        params={},
        tags={**user_tags(), "sweep.id": folder.name, "sweep.varied": ", ".join(varied)},
        store=None if store is None else masked(store),
    )
    card.write(folder)
    return card


class ParentRun:
    """A sweep's run in MLflow, opened before the first job and closed after the last."""

    def __init__(self, card: RunCard, sweep: Sweep, uri: str) -> None:
        self._delivery = Delivery(card, Path(sweep.folder), uri, resumed=card.run_id is not None)
        self._sweep = sweep
        self._uri = uri

    def open(self) -> str:
        """The run's id. Raises UserError if the store takes nothing, before any job has begun."""
        from mlflow.exceptions import MlflowException

        try:
            self._delivery.open()
            self._delivery.reopen()
        except (MlflowException, OSError) as error:
            raise UserError(
                f"tracking.uri={masked(self._uri)} does not take the sweep's parent run ({masked(str(error))}): "
                "mend the store, or use tracking=none"
            ) from error
        assert self._delivery.run_id is not None
        return self._delivery.run_id

    def settle(self, status: str, counts: dict[str, int]) -> None:
        """Note what became of the jobs, in the sweep's folder first. `counts`: jobs by status."""
        tags = {f"sweep.{name.lower()}": str(count) for name, count in counts.items()}
        self._delivery.settle(status, {"sweep.jobs": str(sum(counts.values())), **tags})

    def close(self) -> None:
        """Tell the store. Raises what it is in trouble with."""
        self._delivery.close()
