"""One run from its composed configuration to its finished folder, as the parent process sees it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape

from runner.config.choices import TrackerName
from runner.config.compose import settings
from runner.config.plain import to_plain
from runner.config.schema import Tracking
from runner.folder.files import write_json
from runner.folder.lock import locked
from runner.launch.elastic import launch
from runner.launch.signals import handle_signals, signals_ignored
from runner.launch.torchrun import current_world, run_joined
from runner.launch.worker import Job, run_launched
from runner.plan.experiment import Experiment, prepare
from runner.plan.placement import threads_per_worker
from runner.plan.tables import certificate_table, plan_tables
from runner.run.books import Books
from runner.run.preflight import refuse_used_folder, used_folder
from runner.run.summary import FAILED, FINISHED, KILLED, Role, in_a_line, note_failure, objective, report
from runner.run.watch import Watch
from runner.track.card import card_of
from runner.track.secrets import masked, without_credentials
from runner.track.tracker import build_tracker


@dataclass
class Outcome:
    """What became of a run by itself, since Hydra would print an error of its own about one that is raised."""

    error: Exception | None = None


def run_single(cfg: DictConfig, started_at: float, outcome: Outcome) -> float | None:
    """Run the one job of a command; its objective. `started_at`: when the command started."""
    handle_signals()
    console = Console(highlight=False)
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        with _alone_in(folder):
            summary, how_to_open = _prepared_and_run(cfg, folder, started_at, console)
    except Exception as error:  # noqa: BLE001 - it is raised again where Hydra does not see it
        outcome.error = error
        return None
    console.print("\n".join(how_to_open), soft_wrap=True, markup=False)
    return objective(summary)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a run's folder. Raises UserError, and leaves the folder alone, if another run has begun there meanwhile."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except BlockingIOError:
            raise used_folder(folder) from None
        refuse_used_folder(folder)
        yield


def _prepared_and_run(
    cfg: DictConfig, folder: Path, started_at: float, console: Console
) -> tuple[dict[str, Any], Sequence[str]]:
    try:
        experiment = prepare(settings(cfg))
        _announce(experiment, console)
        return run(experiment, folder, started_at, console, Role())
    except Exception as error:
        note_failure(folder, error)
        raise


def run(
    experiment: Experiment, folder: Path, started_at: float, console: Console, role: Role
) -> tuple[dict[str, Any], Sequence[str]]:
    """Train; the content of `summary.json`, and lines that say how to look at the run."""
    config = experiment.config
    _write_plan(experiment, folder)
    threads = threads_per_worker(experiment.placement.local_workers * role.at_once)
    job = Job(
        # Workers need no tracker, and so no address with its credentials.
        config=dataclasses.replace(config, tracking=Tracking(TrackerName.none)),
        plan=experiment.plan,
        facts=experiment.facts,
        folder=folder.resolve(),
        device_type=experiment.placement.device_type,
        local_workers=experiment.placement.local_workers,
        threads=threads,
        started_at=started_at,
    )
    tracker = build_tracker(config.tracking, card_of(experiment, role.tags, role.parent_key), folder)
    books = Books(experiment, folder, started_at, console, role, tracker)
    status, result = FAILED, {}
    try:
        with Watch(folder, experiment, tracker, console, role.progress):
            result = _train(job, experiment)
        status = FINISHED
    except KeyboardInterrupt:
        status = KILLED
        raise
    except Exception as error:
        tracker.tag("error", masked(in_a_line(error)))
        raise
    finally:
        with signals_ignored():
            try:
                summary = books.close(status, result)
            except BaseException:
                tracker.finish(FAILED)  # the store would show it as running for ever
                raise
            tracker.finish(status)
    report(summary, experiment, folder, console)
    return summary, tracker.how_to_open()


def _train(job: Job, experiment: Experiment) -> dict[str, Any]:
    world = current_world()
    if world is not None:
        return run_joined(world, job.as_json())
    return launch(run_launched, job.as_json(), experiment.placement.workers)


def _write_plan(experiment: Experiment, folder: Path) -> None:
    plain = without_credentials(to_plain(experiment.config))
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    write_json(folder / "plan.json", experiment.plan.as_json())
    write_json(folder / "certificate.json", experiment.certificate.as_json())


def _announce(experiment: Experiment, console: Console) -> None:
    """Say in full what will be run."""
    if banner := experiment.placement.banner():
        console.print(banner)
    for note in experiment.notes:
        console.print(f"[bold yellow]note:[/] {escape(note)}", soft_wrap=True)
    console.print(plan_tables(experiment))
    console.print(certificate_table(experiment.certificate))
