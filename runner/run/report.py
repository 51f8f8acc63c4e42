"""The last lines of a run on the terminal."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from runner.folder.record import NoiseScale, RunRecord
from runner.measure.scores import prediction_words
from runner.plan.experiment import Experiment
from runner.speed.figures import efficiency_words, utilization_words


def print_sentence(console: Console, markup: str) -> None:
    """Print text that is wrapped at words on a terminal, and is one line in a log."""
    console.print(markup, soft_wrap=not console.is_terminal)


def report(record: RunRecord, experiment: Experiment, folder: Path, console: Console) -> None:
    """Print how a finished run ended, and how fast it was."""
    result, facts, plan = record.result, experiment.facts, experiment.plan
    metrics = "  ".join(f"{name} [bold]{value:.4g}[/]" for name, value in result.eval.items())
    over = f"  over {facts.eval_groups:,} {facts.groups}" if facts.eval_groups is not None else ""
    lines = [_progress_made(record, facts.unit)]
    if result.weights_digest:
        lines.append(f"weights {result.weights_digest}: the same on any number of workers (equivalence=identical)")
    lines += filter(None, [utilization_words(record)])
    lines += [escape(words) for words in (efficiency_words(record, plan.world_size, folder),) if words]
    lines += filter(None, [prediction_words(record)])
    if result.noise is not None:
        lines.append(noise_words(result.noise, plan.global_batch))
    trained, total = result.trained_parameters, result.parameters
    if trained != total and trained and total:
        lines.append(f"{trained:,} of {total:,} parameters trained ({100 * trained / total:.2g}%)")
    if record.diagnosis is not None:
        lines.append(f"[bold]diagnosis:[/] {escape(record.diagnosis)}")
    if compiled := result.compilations:
        lines.append(
            f"{compiled.count} compilations in {compiled.seconds:.1f} s, {compiled.from_cache} loaded from the cache"
        )
    lines += [f"[bold yellow]note:[/] {escape(note)}" for note in record.notes]
    lines += [f"[bold yellow]warning:[/] {escape(warning)}" for warning in result.warnings]
    console.print()
    print_sentence(console, f"[bold green]{record.status.lower()}[/] {escape(experiment.setup_name)}   {metrics}{over}")
    for line in lines:
        print_sentence(console, f"  {line}")
    console.print(f"  saved to {escape(os.path.relpath(folder))}", soft_wrap=True)


def _progress_made(record: RunRecord, unit: str) -> str:
    result = record.result
    skipped = f", of which fp16 skipped {result.skipped_steps:,}" if result.skipped_steps else ""
    speed = f"{result.samples_per_s:,.0f} samples/s" if result.samples_per_s else "too short to measure"
    compiling = result.first_step_compile_s
    compiled_first = f" ({compiling:.1f} s of them compiling)" if compiling else ""
    return (
        f"{result.optimizer_steps:,} optimizer steps{skipped}, {result.samples_seen:,} {unit}, "
        f"{speed}, {record.wall_s:.1f} s in total, first step after {result.first_step_s:.1f} s{compiled_first}"
    )


def noise_words(noise: NoiseScale, global_batch: int) -> str:
    """The gradient's noise scale, and how the global batch compares."""
    if noise.scale is None:
        few = f"too few or too noisy measurements ({noise.measurements})"
        return f"gradient noise scale unknown: {few}; use a smaller noise.every_steps"
    return (
        f"gradient noise scale {noise.scale:,.0f} ± {noise.standard_error:,.0f} samples, "
        f"{noise.scale / global_batch:.2g} times the global batch: "
        "above about this batch size, a larger batch saves few steps"
    )
