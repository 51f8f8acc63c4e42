"""Predictions as tables for a terminal."""

from __future__ import annotations

import time

from rich.console import RenderableType

from runner.cost.prediction import Prediction
from runner.cost.quantity import Quantity
from runner.plan.experiment import Experiment
from runner.plan.tables import plain_table

_GIB = 2**30


def prediction_table(prediction: Prediction, experiment: Experiment) -> RenderableType:
    """What a run will need: time, memory and, with `plan.price_per_hour`, money."""
    table = plain_table("Prediction")
    table.add_column("what", style="bold")
    table.add_column("value", justify="right")
    table.add_column("interval", justify="right")
    table.add_column("consists of", style="dim", overflow="fold")
    step, price = sum(prediction.step_s.values()), experiment.config.plan.price_per_hour
    phases = ", ".join(
        f"{name} {seconds_words(seconds)}" for name, seconds in prediction.step_s.items() if seconds >= 5e-4 * step
    )
    times = f"{prediction.evaluations} evaluation{'s' * (prediction.evaluations != 1)}"
    rest = (
        f"start-up {seconds_words(prediction.start_s)}, {times} {seconds_words(prediction.evaluation_s)}, "
        f"end {seconds_words(prediction.ending_s)}"
    )
    training, total = prediction.training, prediction.total
    steps = f"{experiment.plan.optimizer_steps:,} optimizer steps"
    table.add_row("training", seconds_words(training.value), interval_words(training), steps)
    if prediction.measured_at is not None:
        table.add_row("in total", seconds_words(total.value), interval_words(total), f"training, {rest}")
    table.add_row("a step", seconds_words(step), "", phases)
    table.add_row(
        "communication", f"{prediction.communication_share:.0%}", "", "of a step, with waiting for other workers"
    )
    table.add_row("padding", f"{prediction.padding_share:.0%}", "", "of the tokens that are computed")
    table.add_row("peak memory", gib(prediction.memory_bytes), "", memory_words(prediction))
    if price is not None:
        cost = prediction.money(price)
        table.add_row("price", f"{cost.value:.3g}", f"{cost.low:.3g} to {cost.high:.3g}", f"at {price:g} per hour")
    table.caption = _origin(prediction, experiment)
    table.caption_justify = "left"
    return table


def _origin(prediction: Prediction, experiment: Experiment) -> str:
    if prediction.measured_at is None:
        hardware = experiment.config.hardware
        return (
            f"From published figures of {hardware.name}, {hardware.link}; without start-up, evaluation and activations"
        )
    age = time.strftime("%Y-%m-%d %H:%M", time.localtime(prediction.measured_at))
    outside = f"; micro-batches are {prediction.outside:.1f} × outside of what was measured"
    return f"From steps measured on {age}{outside if prediction.outside > 1 else ''}"


def interval_words(quantity: Quantity) -> str:
    """Words such as `340 ms to 1.2 s`."""
    return f"{seconds_words(quantity.low)} to {seconds_words(quantity.high)}"


def seconds_words(seconds: float) -> str:
    """Words such as `340 ms`, `41 s`, `4 min 10 s`, `3 h 20 min`."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{int(seconds) // 3600:,} h {int(seconds) % 3600 // 60} min"


def gib(size: float) -> str:
    return f"{size / _GIB:.3g} GiB"


def memory_words(prediction: Prediction) -> str:
    """Whether a worker's memory suffices."""
    if prediction.available_bytes is None:
        return "per worker"
    return f"per worker, which has {gib(prediction.available_bytes)}: {'fits' if prediction.fits else 'does not fit'}"
