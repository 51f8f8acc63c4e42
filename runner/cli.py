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
    "evidence": _Tool("runner.tools.evidence.command", "evidence", starts_workers=True),
    "plan": _Tool("runner.tools.plan.command", "plan"),
    "predict": _Tool("runner.tools.evaluate.command", "predict", starts_workers=True),
    "publish": _Tool("runner.tools.publish.command", "publish"),
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
            if is_external():
                raise UserError(f"runner.{name} starts its workers itself: call it without torchrun")
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
