"""What `runner.plan -m` says about the setups that it has ranked."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from runner.measure.tables import gib, interval_words, seconds_words
from runner.plan.levels import NOT_COMPARABLE
from runner.plan.tables import plain_table
from runner.tools.compare.runs import grouped
from runner.tools.plan.ranking import RankedSetup
from runner.tools.plan.worth import Worth, worth_words

#: Columns of the CSV file.
_COLUMNS = (
    *("setup", "overrides", "workers", "accumulation_steps", "k", "certificate"),
    *("training_s", "training_s_low", "training_s_high", "total_s", "step_s", "communication_share", "padding_share"),
    *("peak_memory_bytes", "available_memory_bytes", "fits", "price"),
    *("more_samples", "same_loss_s", "same_loss_s_low", "same_loss_s_high", "reason"),
)


def print_ranking(setups: Sequence[RankedSetup], worth: Sequence[Worth], console: Console) -> None:
    """A table with a line per setup, and which is the fastest at each level of the certificate."""
    table = plain_table("Setups by predicted time")
    table.add_column("setup", style="bold", overflow="fold")
    columns = ["in total", "training", "interval", "communication", "memory"]
    columns += ["price"] * any(one.price is not None for one in setups)
    columns += ["samples", "to the same loss"] * any(one.sample_cost is not None for one in setups)
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("certificate")
    for one in setups:
        cells = _cells(one)
        table.add_row(Text(one.name), *(cells.get(column, "–") for column in columns), one.level)
    console.print(table)
    for reason, members in grouped(setups, lambda one: one.reason).items():
        if reason is not None:
            console.print(Text(f"{', '.join(one.name for one in members)}: {reason}", style="dim"))
    console.print(Text(best_words(setups)))
    if words := worth_words(worth, is_predicted(setups)):
        console.print(Text(words, style="bold"))


def is_predicted(setups: Sequence[RankedSetup]) -> bool:
    """Whether times come from published figures, not from measurements on this machine."""
    return any(one.experiment.config.hardware.name is not None for one in setups)


def _cells(one: RankedSetup) -> dict[str, str]:
    """What is known about a setup, by column."""
    found, more, same_loss = one.prediction, one.more_samples, one.same_loss
    if found is None:
        return {}
    cells = {
        "in total": seconds_words(found.total.value),
        "training": seconds_words(found.training.value),
        "interval": interval_words(found.training),
        "communication": f"{found.communication_share:.0%}",
        "memory": gib(found.memory_bytes) + ("" if one.may_fit else " (does not fit)"),
    }
    if one.price is not None:
        cells["price"] = f"{one.price:.3g}"
    if more is not None and same_loss is not None:
        known = math.isfinite(same_loss.value)
        cells["samples"] = f"× {more.value:.2g}"
        cells["to the same loss"] = seconds_words(same_loss.value) if known else "more than tried"
    return cells


def best_words(setups: Sequence[RankedSetup]) -> str:
    """The fastest setup at each level of the certificate, of those that fit; its metric is the experiment's."""
    best: dict[str, RankedSetup] = {}
    for one in setups:
        if one.may_fit and one.level != NOT_COMPARABLE:
            best.setdefault(one.level, one)
    if not best:
        return "No setup has a prediction."
    parts = [f"{level} to one fp32 worker: {one.name} ({_total(one)})" for level, one in best.items()]
    return f"Fastest setup that is {'; '.join(parts)}."


def _total(one: RankedSetup) -> str:
    same_loss, total = one.seconds
    if one.same_loss is not None and math.isfinite(same_loss):
        return f"{seconds_words(same_loss)} to the same loss"
    return seconds_words(total)


def write_csv(setups: Sequence[RankedSetup], path: str) -> None:
    """Write a row for each setup; empty: unknown."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        writer.writerows(one.row() for one in setups)
