"""The commands, and the exit code and message of every kind of error."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console
from rich.markup import escape

from runner.config.arguments import HydraOptions
from runner.config.environment import is_external
from runner.config.hydra_main import show
from runner.errors import Preempted, RunFailed, Terminal, UserError, printable
from runner.launch.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED
from runner.track.secrets import masked

if TYPE_CHECKING:
    from runner.launch.torchrun import ExternalWorld

# Packages are imported inside the commands: a command pays only for what it needs, and the forkserver imports torch
# while the parent imports Hydra.

EXIT_FAILED, EXIT_USER_ERROR = 1, 2
#: Columns if the output of a tool is not a terminal; rich would use 80, too few for its tables.
PIPED_WIDTH = 120


def main(arguments: Sequence[str], started_at: float) -> int:
    """Run `python -m runner` with these arguments; the exit code. `started_at`: in seconds since the epoch."""
    return guarded(lambda: _run(list(arguments), started_at))


@dataclass(frozen=True)
class _Tool:
    """A command that does not train by itself: `run(arguments, console)` of a module, which returns the exit code.

    `starts_workers`: it may, so that their forkserver is started first; `several_jobs`: of more than one job.
    """

    module: str
    run: str
    starts_workers: bool = False
    several_jobs: bool = False


_TOOLS = {
    "compare": _Tool("runner.tools.compare.command", "compare"),
    "evaluate": _Tool("runner.tools.evaluate.command", "evaluate", starts_workers=True),
    "evidence": _Tool("runner.tools.evidence.command", "evidence"),
    "plan": _Tool("runner.tools.plan.command", "plan"),
    "predict": _Tool("runner.tools.evaluate.command", "predict", starts_workers=True),
    "scale": _Tool("runner.tools.scale.command", "scale", starts_workers=True, several_jobs=True),
    "track": _Tool("runner.track.command", "track"),
    "verify": _Tool("runner.tools.verify.command", "verify", starts_workers=True),
}


def run_tool(name: str, arguments: Sequence[str]) -> int:
    """Run `python -m runner.<name>` with these arguments; the exit code."""
    tool = _TOOLS[name]

    def action() -> int:
        silence_libraries()
        if tool.starts_workers:
            _start_forkserver(tool.several_jobs)
        module = importlib.import_module(tool.module)  # after the forkserver has started
        piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        code: int = getattr(module, tool.run)(
            arguments, Terminal(highlight=False, width=PIPED_WIDTH if piped else None)
        )
        return code

    return guarded(action)


def tool_main(name: str) -> NoReturn:
    """The process of `python -m runner.<name>`."""
    sys.exit(run_tool(name, sys.argv[1:]))


def guarded(action: Callable[[], int]) -> int:
    """Run `action`; print the exception that it raises and return the exit code."""
    errors = Terminal(stderr=True, highlight=False, soft_wrap=True)
    try:
        return action()
    except UserError as error:
        errors.print(f"[bold red]error:[/] {escape(masked(str(error)))}")
        return EXIT_USER_ERROR
    except Preempted:
        errors.print("[bold]preempted[/]")
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        errors.print("[bold]interrupted[/]")
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost handler of the program
        return _report_failure(error, errors)


def _report_failure(error: Exception, errors: Console) -> int:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from runner.config.compose import composition_error  # imports Hydra
    from runner.launch.local import WorkerFailed  # as above

    if isinstance(error, (RunFailed, WorkerFailed)):
        errors.print(f"[bold red]error:[/] {escape(masked(str(error)))}")
        return EXIT_FAILED
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        errors.print(f"[bold red]error:[/] {escape(masked(str(composition_error(error))))}")
        return EXIT_USER_ERROR
    sys.stderr.write(printable(masked("".join(traceback.format_exception(error)))))
    return EXIT_FAILED


def _run(arguments: list[str], started_at: float) -> int:
    silence_libraries()
    if is_external():
        from runner.launch.torchrun import run_as_rank  # imports torch

        return run_as_rank(lambda world: _run_as_rank_0(arguments, started_at, world))
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise UserError(
            "srun started several tasks, each of which would be a separate run: let srun start one torchrun per node"
        )
    options = HydraOptions(arguments)
    if options.only_shows:
        return show(options)
    _start_forkserver(several_jobs=options.multirun)
    if options.multirun:
        from runner.tools.sweep.command import run_sweep  # after the forkserver has started
        from runner.tools.sweep.preflight import prepare_sweep  # as above

        return run_sweep(prepare_sweep(options, started_at), options)
    from runner.run.job import run_single  # after the forkserver has started

    run_single(options, started_at, Terminal(highlight=False))
    return 0


def _run_as_rank_0(arguments: list[str], started_at: float, world: ExternalWorld) -> int:
    from runner.run.job import run_single  # imports torch

    options = HydraOptions(arguments)
    if options.multirun:
        raise UserError("-m cannot be used under torchrun: python -m runner -m starts the workers of its jobs itself")
    if options.only_shows:
        return show(options)
    run_single(options, started_at, Terminal(highlight=False), world)
    return 0


def silence_libraries() -> None:
    """Only the runner shows progress and warnings."""
    # One progress bar is enough. Set before the libraries are imported, here and in the workers that inherit it.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _start_forkserver(several_jobs: bool = False) -> None:
    from runner.launch.local import start_forkserver  # not needed to show help

    start_forkserver(several_jobs)


def run_jobs(options: HydraOptions, sweep: Sweep) -> None:
    """Let Hydra's sweeper run the jobs of a sweep, with the options of its command."""
    from runner.config.compose import hydra_quoted  # imports Hydra
    from runner.tools.sweep.job import run_in_sweep  # after the forkserver has started

    # Hydra would derive the folder's name from the clock again.
    folder = f"hydra.sweep.dir={hydra_quoted(sweep.folder)}"
    _hydra_main([*options.for_hydra, folder], functools.partial(run_in_sweep, sweep=sweep))


def _show(options: HydraOptions) -> int:
    """Help, completion and printing of the configuration: done by Hydra, without running a job."""
    if not options.completes:
        from runner.config.compose import compose  # imports Hydra

        compose(options.overrides, options.config_dirs)  # Hydra sets up the logging that the files ask for
    try:
        _hydra_main(options.for_hydra, lambda cfg: None)
        sys.stdout.flush()
    except BrokenPipeError:  # `runner --help | head`; Python flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _hydra_main(arguments: Sequence[str], job: Callable[[Any], float | None]) -> None:
    """Hydra's own command line, which reads `sys.argv`."""
    import hydra

    from runner.config.compose import CONFIG_NAME, conf_dir, register  # imports Hydra

    register()
    # Hydra would print its own report and exit with 1; here `guarded` handles every error.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [sys.argv[0], *arguments]
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)(job)()


def _plan(arguments: list[str]) -> int:
    from runner.measure.fitting import with_fitting_micro_batches  # imports torch
    from runner.measure.predicted import Measuring, hardware_estimate, predicted, unsupported_reason  # as above
    from runner.measure.tables import prediction_table  # this command only
    from runner.plan.tables import absent_notes, certificate_table, plan_tables  # this command only
    from runner.run.preflight import prepare_run_for_plan, reading_data, print_to_stderr  # this command only

    started = time.monotonic()
    silence_libraries()
    options = HydraOptions(arguments)
    if options.only_shows:
        return _show(options)
    if options.multirun:
        return _rank(options, started)
    with reading_data() as progress:
        experiment = prepare_run_for_plan(options, progress)
        experiment = with_fitting_micro_batches(
            experiment, started, progress, print_to_stderr, measures=experiment.config.measure
        )
    reason, measures = unsupported_reason(experiment), experiment.config.measure
    asked = "measure=true" if measures else f"hardware={experiment.config.hardware.name}"
    if reason is not None and (measures or experiment.config.hardware.name is not None):
        raise UserError(f"{asked} is not possible: {reason}")
    for name in ("csv", "scale", "plot"):
        given = getattr(experiment.config.plan, name)
        require(given is None, f"plan.{name}", given, "it is for a ranking of several setups; add -m, or leave it out")
    prediction = predicted(experiment) if not measures else None
    console = Terminal()
    console.print(plan_tables(experiment))
    if notes := absent_notes(experiment):
        console.print(notes)
    for note in experiment.notes:
        console.print(f"[bold yellow]note:[/] {escape(note)}", soft_wrap=True)
    console.print(certificate_table(experiment.certificate))
    if measures:
        measuring = Measuring(time.monotonic() - started, progress)
        measuring.announce([experiment])
        console.print(f"measuring {escape(experiment.setup_name)} …", style="dim")
        prediction = measuring.predicted(experiment)
    if prediction is not None:
        console.print(prediction_table(prediction, experiment))
        if experiment.config.hardware.name is not None and (words := hardware_estimate(experiment).answer) is not None:
            console.print(f"[bold]answer:[/] {escape(words)}", soft_wrap=True)
    else:
        words = f"not predicted: {reason}" if reason else "not measured: add measure=true"
        console.print(f"Time and memory are {words}.", style="dim")
    return 0


def _rank(options: HydraOptions, started: float) -> int:
    from runner.run.preflight import reading_data  # this command only, like the following
    from runner.sweep.ranking import is_predicted, print_ranking, rank, worth_of, write_csv  # as above
    from runner.sweep.worth import write_plot  # as above

    console = Terminal(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH)
    with reading_data() as progress:
        setups = rank(options, started, progress, console)
    worth = worth_of(setups)
    print_ranking(setups, worth, console)
    if (path := setups[0].experiment.config.plan.csv) is not None:
        write_csv(setups, path)
    if (path := setups[0].experiment.config.plan.plot) is not None:
        if worth:
            write_plot(worth, is_predicted(setups), path)
        else:
            console.print(f"No {escape(path)}: fewer than two numbers of workers have a time to the same loss.")
    return 0
