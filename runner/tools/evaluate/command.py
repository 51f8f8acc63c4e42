"""The commands `python -m runner.evaluate` and `python -m runner.predict`."""

from __future__ import annotations

import dataclasses
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from runner.backends.machine import threads_per_worker
from runner.config.arguments import ArgumentParser, config_dirs
from runner.config.schema import Tracking
from runner.data.cache import Cache
from runner.data.recipe import Prepared
from runner.errors import require
from runner.folder.files import check_output, strict_json
from runner.folder.phase_progress import phase_under_way
from runner.launch.local import launch, temporary_folder
from runner.launch.signals import handle_signals, signals_ignored
from runner.run.progress import live_status
from runner.run.report import print_sentence
from runner.tools.evaluate.prepared import Evaluation, prepare
from runner.tools.evaluate.result import EvaluationRecord, card_of, write_result
from runner.tools.evaluate.worker import PREDICTIONS, EvaluationJob, run_launched

_FORMATS = (".csv", ".jsonl")
#: How a text begins that a spreadsheet takes for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def evaluate(arguments: Sequence[str], console: Console) -> int:
    """Run `python -m runner.evaluate` with these arguments; the exit code. Raises UserError."""
    parser = _parser("runner.evaluate", "Evaluate a saved model as a training run does, and log the result.")
    return _run(parser.parse_intermixed_args(list(arguments)), console)


def predict(arguments: Sequence[str], console: Console) -> int:
    """Run `python -m runner.predict` with these arguments; the exit code. Raises UserError."""
    parser = _parser("runner.predict", "Write what a saved model predicts for each sample, in the order of the file.")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="a .csv or .jsonl file")
    parser.add_argument("--input", metavar="FILE", help="predict for this file, whose samples need no labels")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file if it exists")
    spreadsheet = "put a ' before texts of a .csv file that a spreadsheet would take for formulas"
    parser.add_argument("--spreadsheet", action="store_true", help=spreadsheet)
    options = parser.parse_intermixed_args(list(arguments))
    check_output("--output", options.output, options.overwrite, _FORMATS)
    csv = options.output.suffix.lower() == ".csv"
    require(csv or not options.spreadsheet, "--spreadsheet", options.output, "no spreadsheet opens it; use a .csv file")
    return _run(options, console, options.output, options.input)


def _parser(program: str, description: str) -> ArgumentParser:
    output = " -o predictions.csv" if program == "runner.predict" else ""
    parser = ArgumentParser(
        prog=f"python -m {program}",
        description=f"{description} Samples are batched as in a training run, on any device and number of workers.",
        epilog=f"examples: python -m {program} outputs/acceptability/2026-11-21_11-35-02-ad47 device=cpu2{output}; "
        f"python -m {program} ./my-model recipe=cola recipe.data.eval=dev.tsv{output}",
        allow_abbrev=False,
    )
    parser.add_argument(
        "target",
        metavar="MODEL_OR_RUN",
        help="a run's folder or MLflow run id, whose settings are used; or a model's folder or name on the Hub, which "
        "needs recipe=… and its data",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="settings, such as device=cpu2, precision=bf16, evaluation.micro_batch=128, recipe.data.eval=test.tsv or "
        "tracking=none",
    )
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with additional config choices")
    return parser


def _run(options: Namespace, console: Console, output: Path | None = None, file: str | None = None) -> int:
    started_at = time.time()
    dirs, predicts = config_dirs(options.config_dir), output is not None
    evaluation = prepare(options.target, options.overrides, dirs, file, predicts)
    handle_signals()
    card = card_of(evaluation, "runner.evaluate" if output is None else "runner.predict")
    if banner := evaluation.placement.banner():
        console.print(banner)
    with temporary_folder() as work:
        with live_status(console, "starting", lambda: _progress(Path(work))):
            result = launch_evaluation(evaluation, Path(work), output)
        with signals_ignored():
            if output is not None:
                table = _table(evaluation, np.load(Path(work) / PREDICTIONS))
                if (formulas := _write_predictions(table, output, options.spreadsheet)) and not options.spreadsheet:
                    texts = f"{formulas:,} texts begin" if formulas > 1 else "1 text begins"
                    note = f"{texts} like a formula, which a spreadsheet runs: --spreadsheet quotes them"
                    print_sentence(console, f"[bold yellow]note:[/] {note}")
            record, how_to_open = write_result(evaluation, card, result, output, started_at)
    _report(evaluation, card.run_name, record, output, console)
    console.print("\n".join(how_to_open), soft_wrap=True, markup=False)
    return 0


def launch_evaluation(evaluation: Evaluation, work: Path, output: Path | None = None) -> dict[str, Any]:
    """Evaluate with the workers: `metrics` and `seconds`.

    `work`: a folder for files of the workers. `output`: of predictions, if they are to be kept.
    """
    placement = evaluation.placement
    job = EvaluationJob(
        # Workers need no tracker, and so no address with its credentials.
        config=dataclasses.replace(evaluation.config, tracking=Tracking()),
        facts=evaluation.facts,
        folder=work,
        device_type=placement.device_type,
        local_workers=placement.local_workers,
        threads=threads_per_worker(placement.local_workers, evaluation.config.equivalence.threads),
        model=evaluation.target.model,
        file=evaluation.file,
        keeps_predictions=output is not None,
    )
    found: dict[str, Any] = launch(run_launched, job.as_json(), placement.workers)
    return found


def _progress(work: Path) -> str | None:
    phase = phase_under_way(work)
    return None if phase is None else f"{phase.name} {phase.done:,}/{phase.total:,} {phase.unit}"


def _table(evaluation: Evaluation, predictions: np.ndarray) -> Any:
    """A row for each sample, as a data frame."""
    import pandas

    recipe, cache = evaluation.recipe, Cache(evaluation.config.cache_dir)
    prepared = Prepared.load(recipe.prepare(cache, evaluation.facts))
    return pandas.DataFrame(recipe.prediction_columns(torch.from_numpy(predictions), prepared.eval))


def _write_predictions(table: Any, output: Path, quotes_formulas: bool) -> int:
    """Write the file, all of it or nothing; how many texts of a .csv file a spreadsheet takes for formulas."""
    formulas = 0

    def cell_of_csv(cell: Any) -> Any:
        nonlocal formulas
        if isinstance(cell, list):
            return strict_json(cell, ensure_ascii=False)
        if not (isinstance(cell, str) and cell.startswith(_FORMULA)):
            return cell
        formulas += 1
        return f"'{cell}" if quotes_formulas else cell

    draft = output.with_name(f".{output.name}-{os.getpid()}")
    try:
        if output.suffix.lower() == ".csv":
            table.map(cell_of_csv).to_csv(draft, index=False, float_format="%.6g")
        else:
            lines = (strict_json(row, ensure_ascii=False) + "\n" for row in table.to_dict("records"))
            draft.write_text("".join(lines), encoding="utf-8")
        draft.rename(output)
    finally:
        draft.unlink(missing_ok=True)
    return formulas


def _report(evaluation: Evaluation, name: str, record: EvaluationRecord, output: Path | None, console: Console) -> None:
    facts = evaluation.facts
    metrics = "  ".join(f"{name} [bold]{value:.4g}[/]" for name, value in record.eval.items())
    groups = "" if facts.eval_groups is None else f" of {facts.eval_groups:,} {facts.groups}"
    console.print(f"[bold green]finished[/] {escape(name)}   {metrics}", soft_wrap=True)
    console.print(
        f"  {facts.eval_samples:,} {facts.unit}{groups}, {record.samples_per_s:,.0f} {facts.unit}/s, "
        f"{record.wall_s:.1f} s in total",
        soft_wrap=True,
    )
    for note in record.notes:
        console.print(f"  [bold yellow]note:[/] {escape(note)}", soft_wrap=True)
    if output is not None:
        console.print(f"  predictions in {escape(str(output))}", soft_wrap=True)
    console.print(f"  saved to {escape(os.path.relpath(evaluation.folder))}", soft_wrap=True)
