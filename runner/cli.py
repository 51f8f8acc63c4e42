"""The command line: preflight, Hydra, and what every kind of error comes to."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status

from runner.errors import UserError
from runner.paths import config_dirs
from runner.tracking.secrets import masked, names_a_secret

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from runner.sweep.command import SweepRequest
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
        from runner.launch import start_forkserver

        start_forkserver()
        from runner.verify.command import verify

        return verify(arguments, Console(highlight=False))

    return guarded(action)


def track_main(arguments: Sequence[str]) -> int:
    """Run `python -m runner.track` with these arguments; the exit code."""

    def action() -> int:
        from runner.track import track

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

    from runner.compose import composition_error
    from runner.launch import WorkerFailed

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
    from runner.world import is_external

    _quiet_libraries()
    if is_external():
        from runner.torchrun import run_as_rank

        return run_as_rank(arguments, lambda options: _run_one(options, started_at))
    from runner.launch import start_forkserver

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


class HydraOptions:
    """What Hydra's own parser makes of the arguments. Raises UserError for an option it does not know."""

    def __init__(self, arguments: Sequence[str]) -> None:
        from hydra._internal.utils import get_args_parser

        from runner.sweep.resume import KEY, take_resume

        parser = get_args_parser()
        parser.error = _refuse_option  # argparse exits after printing usage
        parsed = parser.parse_intermixed_args(list(arguments))
        #: The id of the sweep that goes on, which is no setting of a run and nothing that Hydra knows.
        self.overrides, self.resumed = take_resume(parsed.overrides)
        #: The same arguments, options first: Hydra's parser would refuse overrides on both sides of `-m`.
        self.ordered = list(arguments)
        for override in parsed.overrides:
            self.ordered.remove(override)
        self.ordered += self.overrides
        self.multirun: bool = parsed.multirun
        if self.resumed and not self.multirun:
            raise UserError(f"{KEY}={self.resumed} goes on with a sweep of several jobs: add -m")
        #: Help, completion and printing of the configuration: nothing is run.
        self.only_shows = bool(parsed.help or parsed.hydra_help or parsed.cfg or parsed.info or parsed.shell_completion)
        if parsed.experimental_rerun:
            raise UserError(
                "--experimental-rerun would unpickle a file, which can run any code: give the overrides again"
            )
        if parsed.config_path or parsed.config_name:
            raise UserError(
                "--config-path and --config-name would replace the runner's own configuration: use --config-dir=FOLDER "
                "to add choices of your own"
            )
        self.config_dirs = config_dirs(parsed.config_dir)

    def add(self, override: str) -> None:
        """One override more, as if it had been given last."""
        self.overrides.append(override)
        self.ordered.append(override)


def _refuse_option(message: str) -> None:
    raise UserError(f"{message}; runner --hydra-help lists the options")


def preflight(options: HydraOptions) -> None:
    """Find everything that a user can have got wrong about a run before a folder is made. Raises UserError."""
    from runner.compose import compose, settings
    from runner.experiment import prepare
    from runner.tracking.preflight import check_tracking

    cfg = compose(options.overrides, options.config_dirs)
    _refuse_sweeper_params(cfg, "add -m")
    config = settings(cfg)
    _check_folder("cache_dir", config.cache_dir)
    with _reading():
        prepare(config)
    _check_folder("hydra.run.dir", cfg.hydra.run.dir)
    if (Path(cfg.hydra.run.dir) / "config.yaml").exists():
        raise UserError(f"hydra.run.dir={cfg.hydra.run.dir} holds a run already: choose another folder")
    check_tracking(config.tracking)


def _refuse_sweeper_params(cfg: DictConfig, mend: str) -> None:
    if cfg.hydra.sweeper.params:
        raise UserError(f"hydra.sweeper.params is set (by sweep=…?), so this is a sweep of several jobs: {mend}")


def _reading() -> Status:
    """Seen in a terminal, where large data may have to be tokenised before their rows can be counted."""
    return Console(stderr=True).status("reading the data")


def sweep_preflight(options: HydraOptions, started_at: float) -> SweepRequest:
    """The same about a sweep; which jobs it has, and where. Raises UserError.

    Only the composition is checked, over every value that is swept: a combination that cannot be run is a failed job
    among others.
    """
    from runner.compose import compose, parsed, settings, sweep_points, with_sweeper_params
    from runner.sweep.command import SweepRequest
    from runner.sweep.grid import grid_of, sweeper_overrides
    from runner.sweep.resume import KEY, find_sweep
    from runner.sweep.sweep import FILE_NAME as SWEEP_FILE
    from runner.tracking.preflight import check_tracking

    for override in options.overrides:
        _refuse_written_secret(override)
    first = compose(next(sweep_points(options.overrides)), options.config_dirs)
    overrides = with_sweeper_params(options.overrides, first.hydra)
    points = [compose(point, options.config_dirs) for point in sweep_points(overrides)]
    _check_folder("hydra.sweep.dir", points[0].hydra.sweep.dir)
    first_settings = settings(points[0])
    tracking = first_settings.tracking
    for override in sweeper_overrides(points[0].hydra, first_settings.evaluation.goal, options.overrides):
        options.add(override)
    check_tracking(tracking)
    if "MLFLOW_RUN_ID" in os.environ:
        raise UserError("MLFLOW_RUN_ID is set, and the jobs of a sweep cannot all be that run: unset it")
    folder = Path(points[0].hydra.sweep.dir)
    if options.resumed:
        folder = find_sweep(options.resumed, folder.parent)
    elif (folder / SWEEP_FILE).exists():
        raise UserError(f"hydra.sweep.dir={folder} holds a sweep already: go on with {KEY}={folder}, or choose another")
    return SweepRequest(
        command=tuple(options.overrides),
        grid=grid_of(parsed(overrides), points[0].hydra),
        hydra=points[0].hydra,
        tracking=tracking,
        evaluation=first_settings.evaluation,
        folder=folder,
        started_at=started_at,
    )


def _refuse_written_secret(override: str) -> None:
    """Of a sweep every override is written down: by Hydra, in `sweep.json`, and in the tracking store."""
    written = "and a sweep's overrides are written to files"
    if masked(override) != override:
        raise UserError(f"{masked(override)} holds credentials, {written}: put the address into MLFLOW_TRACKING_URI")
    key, _, value = override.partition("=")
    from_outside = value.strip("'\"").startswith("${")
    if names_a_secret(key.rpartition(".")[2]) and value not in ("", "null") and not from_outside:
        raise UserError(f"{key}=*** names a credential, {written}: take it from outside, {key}='${{oc.env:NAME}}'")


def _check_folder(setting: str, folder: str) -> None:
    """Refuse a folder that cannot be made, without making it."""
    existing = Path(folder).expanduser().absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    shown = f"{setting}={folder} cannot be made"
    if not existing.is_dir():
        raise UserError(f"{shown}: {existing} is a file; choose another folder")
    if not os.access(existing, os.W_OK):
        raise UserError(f"{shown}: {existing} cannot be written to; choose another folder")


def _run_one(options: HydraOptions, started_at: float) -> int:
    from runner.job import Outcome, run_single

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

    from runner.compose import CONFIG_NAME, register
    from runner.paths import conf_dir

    register()
    # Hydra would print its own report and exit with 1; here every error goes to the one outer handler.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [sys.argv[0], *arguments]

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)
    def hydra_main(cfg: Any) -> float | None:
        return job(cfg)

    hydra_main()


def _plan(arguments: list[str]) -> int:
    from runner.compose import compose, settings
    from runner.experiment import foresee
    from runner.plan_tables import absent_notes, certificate_table, plan_tables

    options = HydraOptions(arguments)
    if options.only_shows:
        return _show(options)
    if options.multirun:
        raise UserError("-m is for runs: python -m runner.plan shows the plan of one setup at a time")
    cfg = compose(options.overrides, options.config_dirs)
    _refuse_sweeper_params(cfg, "give one of its jobs instead, such as batch=per_device setup=k4")
    with _reading():
        experiment = foresee(settings(cfg))
    console = Console()
    console.print(plan_tables(experiment))
    if notes := absent_notes(experiment):
        console.print(notes)
    console.print(certificate_table(experiment.certificate))
    return 0
