"""The argument parser of the runner's tools."""

from __future__ import annotations

import pytest

from runner.config.arguments import ArgumentParser
from runner.errors import UserError


@pytest.mark.parametrize(("typed", "named"), [(["--port", "many"], "'many'"), (["--killd"], "--killd")])
def test_a_mistake_is_one_sentence(typed: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It names what was typed and how to get help; argparse prints nothing and does not exit."""
    parser = ArgumentParser(prog="python -m runner.track")
    parser.add_argument("--port", type=int)
    with pytest.raises(UserError, match=rf"^[^\n]*{named}[^\n]*python -m runner\.track --help[^\n]*$"):
        parser.parse_args(typed)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
