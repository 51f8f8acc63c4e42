"""The command `python -m runner.evidence`: make a bundle, or check one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from runner.config.arguments import ArgumentParser, config_dirs
from runner.config.compose import parsed
from runner.errors import UserError
from runner.folder.files import check_output, strict_json
from runner.launch.signals import handle_signals
from runner.plan.tables import plain_table
from runner.tools.evidence.bundle import make_bundle, unpack
from runner.tools.evidence.claims import CLAIMED, DIFFERENT, VERIFIED, Finding, Recorded, arithmetic, only_recorded
from runner.tools.evidence.recomputed import recomputed

#: As of `runner.verify`.
EXIT_HOLDS, EXIT_DIFFERENT = 0, 3
_STYLES = {VERIFIED: "green", DIFFERENT: "bold red", CLAIMED: "yellow"}
#: Settings that say where something is, and not what was done.
_PLACES = ("device", "recipe.data", "cache_dir", "trusted_packages")


def evidence(arguments: Sequence[str], console: Console) -> int:
    """Run the command with these arguments; the exit code. Raises UserError."""
    if arguments[:1] == ["verify"]:
        return _verify(arguments[1:], console)
    return _make(arguments, console)


def _make(arguments: Sequence[str], console: Console) -> int:
    parser = ArgumentParser(
        prog="python -m runner.evidence",
        description="Pack what runs have recorded into one file to hand over: settings, plan, certificate, ledger, "
        "metrics, environment, and the digests of data and weights, under one digest.",
        epilog="To check a bundle: python -m runner.evidence verify bundle.zip (see its --help).",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="a .zip file")
    parser.add_argument("--with-models", action="store_true", help="with the models, and not only their digests")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file if it exists")
    options = parser.parse_intermixed_args(list(arguments))
    output: Path = options.output
    check_output("--output", output, options.overwrite, (".zip",))
    digest = make_bundle(options.runs, output, options.with_models)
    runs = f"{len(options.runs)} run{'s' * (len(options.runs) > 1)}"
    console.print(f"{escape(str(output))}: {runs}, {output.stat().st_size:,} bytes", soft_wrap=True)
    console.print(f"  digest {digest}", soft_wrap=True)
    console.print(f"  to check it: python -m runner.evidence verify {escape(str(output))}", soft_wrap=True)
    return EXIT_HOLDS


def _verify(arguments: Sequence[str], console: Console) -> int:
    parser = ArgumentParser(
        prog="python -m runner.evidence verify",
        description="Recompute what a bundle claims, as far as that is possible here, and say what was verified and "
        "what is only claimed. Exit code 0: nothing differs; 3: something does; 2: no bundle, or it was changed.",
        epilog="example: python -m runner.evidence verify bundle.zip recipe.data.train=train.tsv "
        "recipe.data.eval=dev.tsv",
        allow_abbrev=False,
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a file that runner.evidence has made")
    where = "where the data are, such as recipe.data.train=…"
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=where)
    parser.add_argument(
        "--model", action="append", type=Path, default=[], metavar="FOLDER", help="of a run; repeatable"
    )
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with additional config choices")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings to this file")
    options = parser.parse_intermixed_args(list(arguments))
    if options.json is not None:
        check_output("--json", options.json)
    for override in parsed(options.overrides):
        if not any(f"{override.key_or_group}.".startswith(f"{place}.") for place in _PLACES):
            allowed = ", ".join(_PLACES)
            raise UserError(f"{override.input_line} would make it another run: only {allowed} can be given")
    dirs = config_dirs(options.config_dir)
    handle_signals()
    found: dict[str, list[Finding]] = {}
    with tempfile.TemporaryDirectory(prefix="runner-evidence-") as folder:
        bundle = unpack(options.bundle, Path(folder))
        console.print(f"{escape(str(options.bundle))}: unchanged, digest {bundle.digest}", soft_wrap=True)
        for path in bundle.runs:
            run = Recorded.read(path)
            here = recomputed(run, bundle.weights[path.name], options.model, options.overrides, dirs)
            found[path.name] = [*arithmetic(run), *here, *only_recorded(run)]
            _show(path.name, found[path.name], console)
    if options.json is not None:
        runs = {name: [vars(one) for one in findings] for name, findings in found.items()}
        options.json.write_text(strict_json({"digest": bundle.digest, "runs": runs}, indent=1), encoding="utf-8")
    differs = any(one.outcome == DIFFERENT for findings in found.values() for one in findings)
    return EXIT_DIFFERENT if differs else EXIT_HOLDS


def _show(name: str, findings: Sequence[Finding], console: Console) -> None:
    table = plain_table(name)
    for column in ("claim", "", "why"):
        table.add_column(column, overflow="fold")
    for one in findings:
        table.add_row(one.claim, Text(one.outcome, style=_STYLES[one.outcome]), Text(one.why))
    console.print(table)
