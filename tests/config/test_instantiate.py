"""Building a recipe from its configuration: what may be named, and where; and rows without targets."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.synthetic.acceptability import GrammarCorpus
from runner.config.instantiate import MOVED, build_recipe
from runner.data.recipe import IGNORED_LABEL, Prepared, label_counts, without_targets
from runner.data.table import write_table
from runner.errors import UserError

TOP = "trusted_pkg.parts.Top"
PART = "trusted_pkg.parts.Part"


@dataclass(frozen=True)
class Part:
    size: int = 1
    inner: Any = None


@dataclass(frozen=True)
class Top:
    data: Any
    model: Any = None
    names: Any = ()


def make(*, size: int) -> Part:
    return Part(size)


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trusted package, one whose name merely begins like it, and nothing of either on disk."""
    for package in ("trusted_pkg", "trusted_pkg_evil"):
        parts = types.ModuleType(f"{package}.parts")
        for item in (Top, Part, make):
            monkeypatch.setattr(item, "__module__", "trusted_pkg.parts")
            setattr(parts, item.__name__, item)
        monkeypatch.setattr(parts, "run", sprung, raising=False)
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        monkeypatch.setitem(sys.modules, f"{package}.parts", parts)


SPRUNG: list[object] = []


def sprung(**arguments: object) -> Part:
    """Stands for code that a trusted module only imports."""
    SPRUNG.append(arguments)
    return Part()


def build(config: dict[str, Any], trusted: tuple[str, ...] = ("trusted_pkg",)) -> Any:
    return build_recipe(config, trusted)


def test_nested_parts_are_built() -> None:
    """Targets are built from the inside out, at any depth, in mappings and in lists; plain values stay."""
    built = build(
        {
            "_target_": TOP,
            "data": {"_target_": PART, "size": 3, "inner": {"_target_": PART, "size": 4}},
            "model": {"plain": {"deep": {"_target_": PART}}, "number": 5},
            "names": ["a", {"_target_": PART, "size": 7}, [1, 2]],
        }
    )
    assert built == Top(
        Part(3, Part(4)),
        {"plain": {"deep": Part(1)}, "number": 5},
        ["a", Part(7), [1, 2]],
    )


def test_experiment_keys_are_no_arguments() -> None:
    """Name, metric, goal and what was tuned state the experiment and never reach the class, nor is input changed."""
    config = {
        "name": "x",
        "metric": "m",
        "goal": "max",
        "tuned": {"_target_": "os.system"},
        "_target_": TOP,
        "data": 1,
    }
    before = json.dumps(config)
    assert build(config) == Top(1)
    assert json.dumps(config) == before


def test_functions_can_be_targets() -> None:
    """A target may be a function with arguments of its own."""
    assert build({"_target_": TOP, "data": {"_target_": "trusted_pkg.parts.make", "size": 9}}).data == Part(9)


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"_target_": "os.system"}, "recipe"),
        ({"_target_": TOP, "data": {"_target_": "os.system"}}, "recipe.data"),
        ({"_target_": TOP, "data": {"a": {"b": {"_target_": "os.system"}}}}, "recipe.data.a.b"),
        ({"_target_": TOP, "data": [1, {"_target_": "os.system"}]}, "recipe.data[1]"),
        ({"_target_": TOP, "data": {"_target_": PART, "inner": {"_target_": "os.system"}}}, "recipe.data.inner"),
        ({"_target_": TOP, "data": [[{"_target_": "os.system"}]]}, "recipe.data[0][0]"),
    ],
)
def test_untrusted_target_at_any_depth(config: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target outside the trusted packages is refused wherever it stands, with its place, and nothing is run."""
    import os

    monkeypatch.setattr(os, "system", sprung)
    SPRUNG.clear()
    with pytest.raises(UserError) as caught:
        build(config)
    message = str(caught.value)
    assert message.startswith(f"{path}._target_=os.system is outside the trusted packages (")
    assert "trusted_pkg)" in message
    assert "add 'os' to trusted_packages" in message
    assert SPRUNG == []


@pytest.mark.parametrize(
    "target",
    [
        "trusted_pkg_evil.parts.Top",
        "os",
        "",
        ".trusted_pkg.parts.Top",
        "builtins.eval",
        " trusted_pkg.x",
        "trusted_pkg",
    ],
)
def test_names_that_only_resemble_a_trusted_one(target: str) -> None:
    """The whole first part of the name counts: not its beginning, and nothing relative."""
    with pytest.raises(UserError, match="is outside the trusted packages"):
        build({"_target_": target, "data": 1})


def test_trusted_packages_can_be_added() -> None:
    """A further package is trusted once it is listed, and the first one no longer if it is not."""
    config = {"_target_": "trusted_pkg_evil.parts.Top", "data": 1}
    assert build(config, ("other", "trusted_pkg_evil", "trusted_pkg")) == Top(1)
    with pytest.raises(UserError, match=r"outside the trusted packages \(.*other\): add 'trusted_pkg' "):
        build({"_target_": TOP, "data": 1}, ("other",))


def test_the_runners_own_recipes_are_always_trusted() -> None:
    """What comes with the runner needs no permission, whichever packages are added to it."""
    grammar = "recipes.synthetic.acceptability.GrammarCorpus"
    corpus = {"_target_": grammar, "seed": 1, "train_samples": 2, "eval_samples": 3}
    for trusted in ((), ("trusted_pkg",)):
        assert build_recipe(corpus, trusted) == GrammarCorpus(1, 2, 3)


def test_code_that_a_trusted_module_only_imports() -> None:
    """A name imported into a trusted module is still foreign code (write_table in a task)."""
    with pytest.raises(UserError, match="trusted"):
        build({"_target_": TOP, "data": {"_target_": "trusted_pkg.parts.run"}})


@pytest.mark.parametrize(
    "target", ["trusted_pkg.nope.X", "trusted_pkg.parts.Nope", "trusted_pkg.", "trusted_pkg..parts"]
)
def test_target_that_is_not_there(target: str) -> None:
    """A trusted name that cannot be imported is refused by its place and name."""
    with pytest.raises(UserError) as caught:
        build({"_target_": TOP, "data": {"_target_": target}})
    assert str(caught.value).startswith(f"recipe.data._target_={target} cannot be imported")


@pytest.mark.parametrize("old", sorted(MOVED))
def test_moved_target(old: str) -> None:
    """The old path of a recipe's module is refused with the new one, which exists."""
    importlib.import_module(MOVED[old])
    with pytest.raises(UserError, match=re.escape(f"use {MOVED[old]}.X")):
        build({"_target_": TOP, "data": {"_target_": f"{old}.X"}})


def test_missing_target() -> None:
    """A recipe without a class is refused."""
    with pytest.raises(UserError, match=r"^recipe\._target_ is missing"):
        build({"name": "x", "data": 1})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"_target_": TOP, "data": {"_target_": PART, "sise": 3}},
            "there is no setting 'recipe.data.sise'; did you mean 'size'?",
        ),
        ({"_target_": TOP, "dat": 1}, "there is no setting 'recipe.dat'; did you mean 'data'?"),
    ],
)
def test_unknown_key(config: dict[str, Any], message: str) -> None:
    """A key that a part does not have is refused by its whole path, with the nearest one."""
    with pytest.raises(UserError) as caught:
        build(config)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("config", "path"),
    [({"_target_": TOP}, "recipe"), ({"_target_": TOP, "data": {"_target_": "trusted_pkg.parts.make"}}, "recipe.data")],
)
def test_missing_argument(config: dict[str, Any], path: str) -> None:
    """A part that lacks an argument is refused by its place and the argument's name."""
    with pytest.raises(UserError, match=r"'data'|'size'") as caught:
        build(config)
    assert str(caught.value).startswith(f"{path} does not fit ")


# --- rows without targets, and prepared data ----------------------------------------------------------------


@pytest.mark.parametrize("rows", [[True, True, True], [False, True, True], [True, False, False]])
@pytest.mark.parametrize("labels", [torch.tensor([1, 0, 2]), torch.tensor([[3, -100, 2], [1, 1, -100], [0, 0, 7]])])
def test_rows_lose_their_targets(labels: torch.Tensor, rows: list[bool]) -> None:
    """The rows named lose every target, of tokens too, the others keep theirs; inputs and the given batch stay."""
    batch = {"input_ids": torch.tensor([[5, 6], [7, 8], [9, 9]]), "labels": labels}
    before = labels.clone()
    without = without_targets(batch, np.array(rows))
    assert without["labels"].dtype == labels.dtype
    for row, expected in enumerate(before):
        assert torch.equal(without["labels"][row], torch.full_like(expected, IGNORED_LABEL) if rows[row] else expected)
    assert IGNORED_LABEL == -100  # what torch's cross_entropy leaves out by default
    assert without["input_ids"] is batch["input_ids"]
    assert torch.equal(batch["labels"], before)


def test_a_batch_without_fillers_is_not_copied() -> None:
    """Where no row is named the batch is handed on as it is."""
    batch = {"labels": torch.tensor([1, 0])}
    assert without_targets(batch, np.zeros(2, dtype=bool)) is batch


def test_prepared_data_are_mapped(tmp_path: Path) -> None:
    """A cache entry is loaded with both tables, each its own, its properties and its folder."""
    for part, lengths in (("train", [3, 4, 5]), ("eval", [1])):
        write_table(tmp_path / part, {"length": lengths, "label_count": [2] * len(lengths)})
    (tmp_path / "properties.json").write_text('{"classes": 2}')
    prepared = Prepared.load(tmp_path)
    assert prepared.train.column("length").tolist() == [3, 4, 5]
    assert prepared.eval.column("length").tolist() == [1]
    assert prepared.properties == {"classes": 2}
    assert prepared.folder == tmp_path
    counts = label_counts(prepared.train)
    assert counts.tolist() == [2, 2, 2]
    assert counts.dtype == np.int64
