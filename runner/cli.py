"""The commands, and what every kind of error comes to."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from runner.config.hydra_options import HydraOptions
from runner.errors import UserError
from runner.run.preflight import preflight, reading_data, refuse_sweeper_params, sweep_preflight
from runner.track.secrets import masked

if TYPE_CHECKING:
    from runner.sweep.sweep import Sweep

EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130
#: Columns of `runner.compare` where the output is no terminal.
PIPED_WIDTH = 120


def main(arguments: Sequence[str], started_at: float) -> int:
    """Run `python -m runner` with these arguments; the exit code."""
    return guarded(lambda: _run(list(arguments), started_at))


def plan_main(arguments: Sequence[str]) -> int:
    """Run `python -m runner.plan` with these overrides; the exit code."""
    return guarded(lambda: _plan(list(arguments)))


def verify_main(arguments: Sequence[str]) -> int:
    """Run `python -m runner.verify` with these arguments; the exit code."""

    def action() -> int:
        _quiet_libraries()
        from runner.launch.elastic import start_forkserver

        start_forkserver()
        from runner.verify.command import verify

        return verify(arguments, Console(highlight=False))

    return guarded(action)


def track_main(arguments: Sequence[str]) -> int:
    """Run `python -m runner.track` with these arguments; the exit code."""

    def action() -> int:
        from runner.track.command import track

        return track(arguments, Console(highlight=False))

    return guarded(action)


def compare_main(arguments: Sequence[str]) -> int:
    """Run `python -m runner.compare` with these arguments; the exit code."""

    def action() -> int:
        from runner.compare.command import compare

        # Nothing but a table is wide: a pipe has no width of its own, and rich would take 80 columns.
        piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        return compare(arguments, Console(highlight=False, width=PIPED_WIDTH if piped else None))

    return guarded(action)


def guarded(action: Callable[[], int]) -> int:
    """Run `action`; turn what it raises into a message on the error stream and an exit code."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        return action()
    except UserError as error:
        errors.print(f"[bold red]error:[/] {_escaped(error)}")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        errors.print("[bold]interrupted[/]")
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost handler of the program
        return _report_failure(error, errors)


def _report_failure(error: Exception, errors: Console) -> int:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from runner.config.compose import composition_error
    from runner.launch.elastic import WorkerFailed

    if isinstance(error, WorkerFailed):
        errors.print(f"[bold red]error:[/] {_escaped(error)}")
        return EXIT_FAILED
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        errors.print(f"[bold red]error:[/] {_escaped(composition_error(error))}")
        return EXIT_USER_ERROR
    sys.stderr.write(masked("".join(traceback.format_exception(error))))
    return EXIT_FAILED


def _escaped(error: Exception | str) -> str:
    from rich.markup import escape

    return escape(masked(str(error)))


def _run(arguments: list[str], started_at: float) -> int:
    from runner.config.environment import is_external

    _quiet_libraries()
    if is_external():
        from runner.launch.torchrun import run_as_rank

        return run_as_rank(arguments, lambda options: _run_one(options, started_at))
    from runner.launch.elastic import start_forkserver

    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise UserError(
            "srun started several tasks, and each would be a run of its own: let it start one torchrun per node, "
            "which sets RANK and WORLD_SIZE"
        )
    options = HydraOptions(arguments)
    if options.only_shows:
        return _show(options)
    start_forkserver()
    if options.multirun:
        from runner.sweep.command import run_sweep

        return run_sweep(sweep_preflight(options, started_at), functools.partial(_run_jobs, options))
    preflight(options)
    return _run_one(options, started_at)


def _quiet_libraries() -> None:
    # One progress bar is enough. Set before the libraries are imported, here and in the workers that inherit it.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _run_one(options: HydraOptions, started_at: float) -> int:
    from runner.run.job import Outcome, run_single

    outcome = Outcome()
    _enter_hydra(options.ordered, functools.partial(run_single, started_at=started_at, outcome=outcome))
    if outcome.error is not None:
        raise outcome.error
    return 0


def _run_jobs(options: HydraOptions, sweep: Sweep) -> None:
    from runner.sweep.job import run_in_sweep

    # Hydra would name a folder by its own clock; this one has been opened already.
    quoted = sweep.folder.replace("'", r"\'")
    arguments = [*options.ordered, f"hydra.sweep.dir='{quoted}'"]
    _enter_hydra(arguments, functools.partial(run_in_sweep, sweep=sweep))


def _show(options: HydraOptions) -> int:
    """Help, completion and printing of the configuration: Hydra's own, and no job."""
    _enter_hydra(options.ordered, lambda cfg: None)
    return 0


def _enter_hydra(arguments: Sequence[str], job: Callable[[Any], float | None]) -> None:
    import hydra

    from runner.config.compose import CONFIG_NAME, register
    from runner.config.paths import conf_dir

    register()
    # Hydra would print its own report and exit with 1; here every error goes to the one outer handler.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [sys.argv[0], *arguments]

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)
    def hydra_main(cfg: Any) -> float | None:
        return job(cfg)

    hydra_main()


def _plan(arguments: list[str]) -> int:
    from runner.config.compose import compose, settings
    from runner.plan.experiment import foresee
    from runner.plan.tables import absent_notes, certificate_table, plan_tables

    options = HydraOptions(arguments)
    if options.only_shows:
        return _show(options)
    if options.multirun:
        raise UserError("-m is for runs: python -m runner.plan shows the plan of one setup at a time")
    cfg = compose(options.overrides, options.config_dirs)
    refuse_sweeper_params(cfg, "give one of its jobs instead, such as batch=per_device setup=k4")
    with reading_data():
        experiment = foresee(settings(cfg))
    console = Console()
    console.print(plan_tables(experiment))
    if notes := absent_notes(experiment):
        console.print(notes)
    console.print(certificate_table(experiment.certificate))
    return 0
