"""Command lines of the runner's own tools."""

from __future__ import annotations

import pytest

from runner.config.arguments import ArgumentParser
from runner.errors import UserError


def parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m runner.track")
    commands = parser.add_subparsers(dest="command", required=True)
    sync = commands.add_parser("sync", allow_abbrev=False)
    sync.add_argument("folders", nargs="+")
    sync.add_argument("--port", type=int)
    return parser


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ([], "command"),
        (["sink"], "'sink'"),
        (["sync"], "folders"),
        (["sync", "x", "--killd"], "--killd"),
        (["sync", "x", "--port", "many"], "'many'"),
        (["sync", "x", "--port"], "--port"),
        (["sync", "x", "--po", "3"], "--po"),
    ],
)
def test_a_mistake_is_one_sentence(typed: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No usage on the screen and no exit: an error that names what was typed and the program's help."""
    with pytest.raises(UserError) as caught:
        parser().parse_args(typed)
    message = str(caught.value)
    assert named in message
    assert "python -m runner.track --help" in message
    assert "\n" not in message
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_what_is_right_is_parsed() -> None:
    """It is argparse in all else."""
    options = parser().parse_args(["sync", "a", "b", "--port", "3"])
    assert (options.command, options.folders, options.port) == ("sync", ["a", "b"], 3)


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` is no mistake."""
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["--help"])
    assert caught.value.code == 0
    assert "usage: python -m runner.track" in capsys.readouterr().out
