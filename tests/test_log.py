"""Lines on the error stream."""

from __future__ import annotations

import contextlib
import io

import pytest
from rich.console import Console
from rich.status import Status

from runner.log import LOG


def test_a_warning_shows_no_credentials_and_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line however long, on the error stream of the moment, which a job of a sweep leads into a file."""
    LOG.warning(f"50% of http://me:secret@host/[x] \x1b[2J{'and more ' * 30}end")
    printed = capsys.readouterr().err
    assert printed == f"warning: 50% of http://***@host/[x] [2J{'and more ' * 30}end\n"
    with contextlib.redirect_stderr(io.StringIO()) as file:
        LOG.info("reading data")
    assert file.getvalue() == "reading data\n"
    assert capsys.readouterr().err == ""


def test_a_warning_is_printed_above_what_shows_progress() -> None:
    """Not at the end of its line."""
    screen = io.StringIO()
    with Status("2 of 8 jobs done", console=Console(file=screen, force_terminal=True)):
        LOG.warning("a process was killed")
    assert "warning: a process was killed\n" in screen.getvalue()
