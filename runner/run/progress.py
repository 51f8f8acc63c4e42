"""Show a run's progress while its workers train, by reading the files they write."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from runner.folder.metrics_log import Metric, MetricsReader
from runner.folder.phase_progress import Phase, phase_under_way
from runner.plan.experiment import Experiment

#: Seconds between two reads of the metrics file, and between two lines where the output is not a terminal.
_READ_EVERY, _LINE_EVERY = 0.25, 5.0
#: Seconds between two reads of the folders of a sweep's jobs.
_SWEEP_EVERY = 2.0


class Background:
    """Runs `work` in a thread while a `with` block runs. `work` is given the event that is set when the block ends."""

    def __init__(self, name: str, work: Callable[[threading.Event], None]) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=work, args=(self._done,), name=name, daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


@contextlib.contextmanager
def progress_shown(
    folder: Path, experiment: Experiment, console: Console, sweep: Callable[[], str] | None = None
) -> Iterator[None]:
    """Show the progress of the run in `folder` while the block runs, by a thread that reads `metrics.jsonl`.

    `sweep`: describes the state of the sweep that the run is a job of.
    """
    reader = MetricsReader(folder)
    reader.read()  # what a resumed run had logged before
    display = Bar(experiment, console, sweep) if console.is_terminal else Lines(experiment, console)

    def follow(ended: threading.Event) -> None:
        with display:
            done = False
            while not done:
                done, new = ended.wait(_READ_EVERY), reader.read()
                display.show(new if not reader.cut else [], phase_under_way(folder))

    with Background("progress", follow):
        yield


class _Latest:
    """The newest value of each metric."""

    def __init__(self) -> None:
        self.step = 0
        self.values: dict[str, float] = {}

    def update(self, metrics: list[Metric]) -> None:
        for metric in metrics:
            self.values[metric.key] = metric.value
            if metric.key == "train/loss":
                self.step = metric.step

    def text(self) -> str:
        if "train/loss" not in self.values:
            return ""
        parts = [f"loss {self.values['train/loss']:.4f}", f"lr {self.values['train/lr']:.2e}"]
        if "train/samples_per_s" in self.values:
            parts.append(f"{self.values['train/samples_per_s']:,.0f} samples/s")
        return "  ".join(parts)


def _evaluation_text(metrics: list[Metric]) -> str:
    shown = {m.key.removeprefix("eval/"): m.value for m in metrics if m.key.startswith("eval/")}
    step = next((m.step for m in metrics if m.key.startswith("eval/")), 0)
    return f"step {step:>6,}  evaluation  " + "  ".join(f"{k} {v:.4g}" for k, v in shown.items()) if shown else ""


def progress_bar(console: Console) -> Progress:
    """An empty bar, gone when it stops; its tasks need a field `numbers`. Shows nothing where there is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # rich would print an empty line
    )


class Bar:
    """A progress bar, for terminals; below it a line about the sweep, if the run is part of one."""

    def __init__(self, experiment: Experiment, console: Console, sweep: Callable[[], str] | None) -> None:
        self._console = console
        self._sweep = sweep
        self._sweep_read_at = 0.0
        self._total = experiment.plan.optimizer_steps
        self._latest = _Latest()
        self._progress = progress_bar(console)
        self._overall = Text()
        self._live = Live(Group(self._progress, self._overall), console=console, transient=True, refresh_per_second=10)
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        self._live.start()
        self._task = self._progress.add_task("starting", total=None, numbers="")
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, metrics: list[Metric], phase: Phase | None) -> None:
        if self._sweep is not None and time.monotonic() - self._sweep_read_at > _SWEEP_EVERY:
            self._overall.plain = f"sweep  {self._sweep()}"
            self._sweep_read_at = time.monotonic()
        if text := _evaluation_text(metrics):
            self._console.print(text)
        self._latest.update(metrics)
        step = self._latest.step
        if phase is not None:
            after = f" (step {step:,})" if step else ""
            self._update(phase.name, phase.done, phase.total, f" {phase.unit}{after}")
        elif step:
            self._update("training", step, self._total, f"  {self._latest.text()}")

    def _update(self, description: str, done: int, total: int, text: str) -> None:
        assert self._task is not None
        numbers = f"{done:,}/{total:,}{text}"
        self._progress.update(self._task, description=description, completed=done, total=total, numbers=numbers)


class Lines:
    """Prints a line every few seconds, for logs."""

    def __init__(self, experiment: Experiment, console: Console) -> None:
        self._console = console
        self._total = experiment.plan.optimizer_steps
        self._latest = _Latest()
        self._next = time.monotonic() + _LINE_EVERY
        self._shown = 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, metrics: list[Metric], phase: Phase | None) -> None:
        self._latest.update(metrics)
        if text := _evaluation_text(metrics):
            self._console.print(text, soft_wrap=True)
        if time.monotonic() < self._next:
            return
        if phase is not None:
            self._print(f"step {self._latest.step:>6,}  {phase.name}  {phase.done:,} of {phase.total:,} {phase.unit}")
        elif self._latest.step != self._shown:  # less, after a restart
            self._shown = self._latest.step
            self._print(f"step {self._shown:>6,} of {self._total:,}  {self._latest.text()}")

    def _print(self, line: str) -> None:
        self._next = time.monotonic() + _LINE_EVERY
        self._console.print(line, soft_wrap=True)


@contextlib.contextmanager
def live_status(console: Console, first: str, text: Callable[[], str | None]) -> Iterator[None]:
    """Show a line on a terminal that a thread renews: `first`, then what `text` returns unless that is None."""
    with console.status(first) as status:

        def follow(done: threading.Event) -> None:
            while not done.wait(_READ_EVERY):
                if (line := text()) is not None:
                    status.update(line)

        with Background("status", follow):
            yield
