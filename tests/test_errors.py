"""Nearest valid names for misspelt ones, and what reaches the terminal."""

from __future__ import annotations

import ast
import io
from pathlib import Path
from typing import Any

import pytest
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runner.errors import Terminal, did_you_mean, first_line, nearest, printable

KEYS = ["seed", "epochs", "max_steps", "optimizer", "optimizer.lr", "sync.k", "device.kind", "batch.global_batch"]


@pytest.mark.parametrize(
    ("word", "best"),
    [
        ("epoch", "epochs"),
        ("max_step", "max_steps"),
        ("optimiser", "optimizer"),
        ("optimizer.lrr", "optimizer.lr"),
        ("k", "sync.k"),  # the right last part without its group
        ("lr", "optimizer.lr"),
        ("batch.k", "sync.k"),  # the right last part in another group
        ("global_batch", "batch.global_batch"),
        ("sead", "seed"),
    ],
)
def test_nearest_comes_first(word: str, best: str) -> None:
    """A slip of the pen, a missing group and a wrong group are each answered with the name that was meant."""
    assert nearest(word, KEYS)[0] == best


def test_right_last_part_beats_a_similar_word() -> None:
    """A setting without its group is the commonest slip, so it is proposed before words that only look alike."""
    assert nearest("lr", ["lrs", "optimizer.lr"]) == ["optimizer.lr", "lrs"]


def test_no_more_than_asked_for_and_none_twice() -> None:
    """At most `count` names come back, each once."""
    choices = ["cpu2", "cpu4", "cpu8", "cpu", "cpu2"]
    assert len(nearest("cpu3", choices)) == 3
    assert len(nearest("cpu3", choices, count=2)) == 2
    found = nearest("cpu3", choices, count=9)
    assert sorted(found) == ["cpu", "cpu2", "cpu4", "cpu8"]


def test_nothing_near() -> None:
    """A word that reads like none of them is answered with nothing."""
    assert nearest("xyz", KEYS) == []


@pytest.mark.parametrize(
    ("word", "choices", "clause"),
    [
        ("epoch", ["seed", "epochs"], "; did you mean 'epochs'?"),
        ("cpu3", ["gpu", "cpu2"], "; did you mean 'cpu2' or 'gpu'?"),
        ("xyz", ["b", "a", "b"], "; there are: a, b"),
        ("xyz", [], ""),
        ("xyz", [f"choice{i}" for i in range(17)], ""),
    ],
)
def test_clause(word: str, choices: list[str], clause: str) -> None:
    """The clause names what is near, or all there is if that is short, or nothing."""
    assert did_you_mean(word, choices) == clause


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one"), "one"),
        (ValueError("\n  one\ntwo"), "one"),
        (ValueError(), "ValueError"),
        (KeyError("x"), "'x'"),
    ],
)
def test_first_line(error: BaseException, line: str) -> None:
    """An exception is told in its first line, or by its name if it says nothing."""
    assert first_line(error) == line


EVIL = "a\x1b]0;evil\x07b\x9b31mc\rd\x7f\u202e\u2066\u00e9"  # the last ones turn the direction of the text
CLEAN = "a]0;evilb31mcd\u00e9"


def row(text: str) -> Table:
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    return table


@pytest.mark.parametrize("shown", [escape, Text, Panel.fit, row], ids=["markup", "text", "panel", "table"])
@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_do_not_reach_the_terminal(shown: Any, terminal: bool) -> None:
    """Printed at once, as a rule, or in a display that is updated; rich's own styles and movements stay."""
    file = io.StringIO()
    console = Terminal(file=file, force_terminal=terminal, width=100, highlight=False)
    console.print(shown(EVIL), style="bold")
    console.print(EVIL, markup=False, soft_wrap=True)
    console.rule(escape(EVIL))
    with Live(shown(EVIL), console=console, auto_refresh=False) as live:
        live.update(shown(EVIL), refresh=True)
    text = file.getvalue()
    assert text.count(CLEAN) >= 4
    assert ("\x1b[1m" in text) == terminal
    assert not any(part in text for part in ("\x1b]", "\x07", "\x9b", "\x7f", "\u202e"))


def test_lines_and_tabs_are_printable() -> None:
    assert printable(f"{EVIL}\n\tx") == f"{CLEAN}\n\tx"


def test_every_command_prints_on_that_terminal() -> None:
    """rich's own console removes no escape sequences, and neither does Python."""
    for path in (Path(__file__).parents[1] / "runner").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("Console", "print"), f"{path}:{node.lineno}"
                if called in ("sys.stderr.write", "sys.stdout.write"):
                    written = ast.unparse(node.args[0])
                    # What such a terminal has printed is safe as well.
                    assert "printable(" in written or written == "printed.get()", f"{path}:{node.lineno}"
