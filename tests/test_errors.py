"""Nearest valid names for misspelt ones."""

from __future__ import annotations

import pytest

from runner.errors import did_you_mean, first_line, nearest

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
