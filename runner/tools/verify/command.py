"""The command `python -m runner.verify`: options, replay and report."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.text import Text

from runner.backends.machine import threads_per_worker
from runner.config.arguments import ArgumentParser, config_dirs
from runner.config.choices import AccumulationMode, LedgerMode
from runner.config.compose import compose, settings
from runner.config.schema import Tracking
from runner.errors import UserError, require
from runner.folder.files import check_output, strict_json
from runner.launch.local import launch
from runner.launch.signals import handle_signals
from runner.plan.certificate import certify
from runner.plan.experiment import Experiment, prepare
from runner.plan.tables import certificate_table, plain_table
from runner.run.progress import live_status
from runner.tools.verify.lockstep import frames_compared, run_launched
from runner.tools.verify.mismatch import Mismatch
from runner.track.secrets import masked_override
from runner.train.job import Job

#: 1 is a crash and 2 a wrong setting, as of every command.
EXIT_SAME, EXIT_DIFFERENT = 0, 3


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m runner.verify",
        description="Replay two setups in lockstep, and report the first step and tensor that differ by more than "
        "rounding error. Exit code 0: the same; 3: different; 2: wrong settings; 1: the replay crashed.",
        epilog='example: python -m runner.verify precision=fp64 equivalence=exact --a "device=cpu" --b "device=cpu2"',
        allow_abbrev=False,
    )
    parser.add_argument("common", nargs="*", metavar="OVERRIDE", help="overrides for both setups")
    parser.add_argument("--a", required=True, metavar="OVERRIDES", help="further overrides for the first setup")
    parser.add_argument("--b", required=True, metavar="OVERRIDES", help="further overrides for the second setup")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to replay (default: 20)")
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with additional config choices")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the report to this file")
    return parser


def verify(arguments: Sequence[str], console: Console) -> int:
    """Run the command with these arguments and return its exit code. Raises UserError."""
    options = _parser().parse_intermixed_args(list(arguments))
    require(options.steps >= 1, "--steps", options.steps, "use at least 1 optimizer step")
    if options.json is not None:
        check_output("--json", options.json)
    dirs = config_dirs(options.config_dir)
    a, b = (_experiment(name, [*options.common, *_split(name, getattr(options, name))], dirs) for name in ("a", "b"))
    if all(experiment.placement.device_type == "xla" and not experiment.placement.rehearsed for experiment in (a, b)):
        raise UserError(
            "--a and --b both use the TPU, which can run only one setup at a time: compare each with device=cpu"
        )
    certificate = certify(b.setup, a.setup)
    steps = min(options.steps, a.plan.optimizer_steps, b.plan.optimizer_steps)
    for name, experiment in (("a", a), ("b", b)):
        recipe = experiment.config.recipe["name"]
        console.print(f"[bold]{name}[/]  {escape(f'{recipe} · {experiment.setup_name}')}")
    console.print("", certificate_table(certificate, "b", "a", "a"), "", sep="\n")
    started_at = time.time()
    handle_signals()
    result = _replay(a, b, steps, console)
    ends = a.plan.optimizer_steps, b.plan.optimizer_steps
    if result["finding"] is None and ends[0] != ends[1] and options.steps > min(ends):
        sentence = f"a has {ends[0]:,} optimizer steps, b has {ends[1]:,}"
        result["finding"] = dataclasses.asdict(Mismatch(min(ends), "length", sentence))
    console.print(_report(result, time.time() - started_at))
    if options.json is not None:
        given = {name: " ".join(map(masked_override, _split(name, getattr(options, name)))) for name in ("a", "b")}
        common = [masked_override(one) for one in options.common]
        content = {"common": common, **given, "certificate": certificate.as_json()}
        options.json.write_text(strict_json({**content, **result}, indent=1))
    return EXIT_DIFFERENT if result["finding"] else EXIT_SAME


def _experiment(name: str, overrides: Sequence[str], config_dirs: Sequence[str]) -> Experiment:
    try:
        cfg = compose(overrides, config_dirs)
        if cfg.hydra.sweeper.params:
            raise UserError(
                "hydra.sweeper.params (of sweep=…) defines a sweep, but runner.verify needs a single run: remove it"
            )
        config = settings(cfg)
        mode = config.accumulation.mode
        require(
            mode is not AccumulationMode.fit, "accumulation", mode, "a replay measures no memory: use fixed or auto"
        )
        return prepare(config)
    except UserError as error:
        raise UserError(f"setup {name}: {error}") from error


def _split(name: str, overrides: str) -> list[str]:
    try:
        return shlex.split(overrides)
    except ValueError as error:
        raise UserError(f"--{name}={overrides} cannot be split into overrides: {error}") from error


def _replay(a: Experiment, b: Experiment, steps: int, console: Console) -> dict[str, Any]:
    workers = a.placement.workers + b.placement.workers
    with tempfile.TemporaryDirectory(prefix="runner-verify-") as folder:
        jobs = {name: replay_job(experiment, Path(folder), workers) for name, experiment in (("a", a), ("b", b))}
        with _status(Path(folder), steps, console):
            pair = {**{name: job.as_json() for name, job in jobs.items()}, "steps": steps, "folder": folder}
            return launch(run_launched, pair, workers)


def replay_job(experiment: Experiment, folder: Path, workers: int) -> Job:
    """A job that trains the same without evaluations. `workers`: that share this machine's cores."""
    config = dataclasses.replace(
        experiment.config,
        tracking=Tracking(),
        ledger=LedgerMode.fail,  # to report what it finds
        # Evaluation changes no weights and takes time.
        evaluation=dataclasses.replace(experiment.config.evaluation, every_steps=sys.maxsize, patience=None),
    )
    return Job(
        config=config,
        plan=experiment.plan,
        facts=experiment.facts,
        folder=folder,
        device_type=experiment.placement.device_type,
        local_workers=experiment.placement.local_workers,
        threads=threads_per_worker(workers, config.equivalence.threads),
        started_at=time.time(),
    )


@contextlib.contextmanager
def _status(folder: Path, steps: int, console: Console) -> Iterator[None]:
    """Show the progress of the replay on a terminal."""

    def text() -> str | None:
        frames = frames_compared(folder)  # the start and the end are frames, too
        return None if frames is None else f"comparing optimizer step {min(frames, steps)} of {steps}"

    with live_status(console, "starting the workers of both setups", text):
        yield


def _report(result: dict[str, Any], seconds: float) -> RenderableType:
    table = plain_table("Replay: largest differences")
    for name in ("what", "relative", "tolerance", "absolute", "at step", "tensor"):
        table.add_column(name, justify="left" if name in ("what", "tensor") else "right", overflow="fold")
    for one in result["largest"]:
        share, largest = float(one["share"]), float(one["largest"])
        tolerance = f"{one['tolerance']:.0e}" if one["tolerance"] else "none"
        numbers = f"{share:.2g}", tolerance, f"{largest:.2g}", str(one["step"])
        table.add_row(one["what"], *numbers, one["tensor"])
    compared = ", ".join(f"{what} {times}" for what, times in result["compared"].items())
    table.caption, table.caption_justify = f"Number of comparisons: {compared}.", "left"
    parts: list[RenderableType] = [table] if result["largest"] else []
    if result["without_gradient"]:
        largest = max(map(float, result["without_gradient"].values()))
        names = ", ".join(result["without_gradient"])
        text = f"Not compared (gradient is only rounding error; weights differ by up to {largest:.2g}): {names}."
        parts.append(Text(text, style="dim"))
    finding = result["finding"]
    if finding is None:
        rule = "the same bits" if result["of_bits"] else "no difference beyond rounding error"
        verdict = f"{rule} in {result['steps']} optimizer steps"
        parts.append(Text.assemble(("the same: ", "bold green"), verdict, f" ({seconds:.0f} s)"))
        if not result["compared"]["gradient"]:
            parts.append(
                "Gradients were not compared: between synchronisations they are computed on different samples."
            )
    else:
        where = "before the first step" if finding["step"] == 0 else f"at optimizer step {finding['step']}"
        parts.append(Text.assemble(("different: ", "bold red"), f"{finding['what']}, {where}: {finding['sentence']}"))
    return Group(*parts)
