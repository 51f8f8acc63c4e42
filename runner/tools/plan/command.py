"""The command `python -m runner.plan`: the plan and the certificate of a setup, or with `-m` a ranking of several."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from runner.config.arguments import HydraOptions
from runner.config.hydra_main import show
from runner.errors import UserError, require
from runner.log import LOG
from runner.measure.fitting import with_fitting_micro_batches
from runner.measure.predicted import Measuring, predicted, unsupported_reason
from runner.measure.tables import prediction_table
from runner.plan.tables import absent_notes, certificate_table, plan_tables
from runner.run.preflight import prepare_run_for_plan, reading_data
from runner.tools.plan.ranking import rank
from runner.tools.plan.report import is_predicted, print_ranking, write_csv
from runner.tools.plan.worth import worth_of, write_plot


def plan(arguments: Sequence[str], console: Console) -> int:
    """Run `python -m runner.plan` with these arguments; the exit code. Raises UserError."""
    started = time.monotonic()
    options = HydraOptions(arguments)
    if options.only_shows:
        return show(options)
    if options.multirun:
        return _rank(options, started, console)
    with reading_data() as progress:
        experiment = prepare_run_for_plan(options, progress)
        experiment = with_fitting_micro_batches(
            experiment, started, progress, LOG.info, measures=experiment.config.measure
        )
    reason, measures = unsupported_reason(experiment), experiment.config.measure
    asked = "measure=true" if measures else f"hardware={experiment.config.hardware.name}"
    if reason is not None and (measures or experiment.config.hardware.name is not None):
        raise UserError(f"{asked} is not possible: {reason}")
    for name in ("csv", "scale", "plot"):
        given = getattr(experiment.config.plan, name)
        require(given is None, f"plan.{name}", given, "it is for a ranking of several setups; add -m, or leave it out")
    prediction = predicted(experiment) if not measures else None
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
        if prediction.answer is not None:
            console.print(f"[bold]answer:[/] {escape(prediction.answer)}", soft_wrap=True)
    else:
        words = f"not predicted: {reason}" if reason else "not measured: add measure=true"
        console.print(f"Time and memory are {words}.", style="dim")
    return 0


def _rank(options: HydraOptions, started: float, console: Console) -> int:
    with reading_data() as progress:
        setups = rank(options, started, progress, console)
    worth, files = worth_of(setups), setups[0].experiment.config.plan
    print_ranking(setups, worth, console)
    if files.csv is not None:
        write_csv(setups, files.csv)
    if files.plot is not None and worth:
        write_plot(worth, is_predicted(setups), files.plot)
    elif files.plot is not None:
        console.print(f"No {escape(files.plot)}: fewer than two numbers of workers have a time to the same loss.")
    return 0
