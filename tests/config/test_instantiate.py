"""Building a recipe from its configuration: which code is trusted, and errors in arguments."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes.synthetic.acceptability import GrammarCorpus
from runner.config.instantiate import MOVED, build_recipe, recipe_code
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
    """A trusted package and one whose name begins like it; neither exists on disk."""
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
    """Code that a trusted module only imports."""
    SPRUNG.append(arguments)
    return Part()


def build(config: dict[str, Any], trusted: tuple[str, ...] = ("trusted_pkg",)) -> Any:
    return build_recipe(config, trusted)


def test_nested_parts_are_built() -> None:
    """Targets are built at any depth, in mappings and in lists; a target can be a function."""
    built = build(
        {
            "_target_": TOP,
            "data": {"_target_": PART, "size": 3, "inner": {"_target_": PART, "size": 4}},
            "model": {"plain": {"deep": {"_target_": "trusted_pkg.parts.make", "size": 1}}, "number": 5},
            "names": ["a", {"_target_": PART, "size": 7}, [1, 2]],
        }
    )
    assert built == Top(
        Part(3, Part(4)),
        {"plain": {"deep": Part(1)}, "number": 5},
        ["a", Part(7), [1, 2]],
    )


def test_experiment_keys_are_not_arguments() -> None:
    """Name, metric, goal and tuned values are not passed to the class, and the input is not changed."""
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


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"_target_": "os.system"}, "recipe"),
        ({"_target_": TOP, "data": {"_target_": "os.system"}}, "recipe.data"),
        ({"_target_": TOP, "data": {"_target_": PART, "inner": {"_target_": "os.system"}}}, "recipe.data.inner"),
        ({"_target_": TOP, "data": [[{"_target_": "os.system"}]]}, "recipe.data[0][0]"),
    ],
)
def test_untrusted_target_at_any_depth(config: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target outside the trusted packages is refused at any depth, with its path, and nothing is executed."""
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
    ["trusted_pkg_evil.parts.Top", "os", "", ".trusted_pkg.parts.Top", " trusted_pkg.x", "trusted_pkg"],
)
def test_names_that_only_resemble_a_trusted_one(target: str) -> None:
    """The first part of the name must be equal: a common beginning or a relative name is not enough."""
    with pytest.raises(UserError, match="is outside the trusted packages"):
        build({"_target_": target, "data": 1})


def test_trusted_packages_can_be_added() -> None:
    config = {"_target_": "trusted_pkg_evil.parts.Top", "data": 1}
    assert build(config, ("other", "trusted_pkg_evil", "trusted_pkg")) == Top(1)
    with pytest.raises(UserError, match=r"outside the trusted packages \(.*other\): add 'trusted_pkg' "):
        build({"_target_": TOP, "data": 1}, ("other",))


def test_the_runners_own_recipes_are_always_trusted() -> None:
    grammar = "recipes.synthetic.acceptability.GrammarCorpus"
    corpus = {"_target_": grammar, "seed": 1, "train_samples": 2, "eval_samples": 3}
    for trusted in ((), ("trusted_pkg",)):
        assert build_recipe(corpus, trusted) == GrammarCorpus(1, 2, 3)


def test_code_that_a_trusted_module_only_imports() -> None:
    """A name that a trusted module imports from elsewhere is not trusted."""
    with pytest.raises(UserError, match="trusted"):
        build({"_target_": TOP, "data": {"_target_": "trusted_pkg.parts.run"}})


@pytest.mark.parametrize("target", ["trusted_pkg.nope.X", "trusted_pkg.parts.Nope", "trusted_pkg.", "trusted_pkg..x"])
def test_a_target_that_does_not_exist(target: str) -> None:
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
        ({"name": "x", "data": 1}, r"^recipe\._target_ is missing"),
        ({"_target_": TOP, "dat": 1}, r"'recipe\.dat'; did you mean 'data'\?"),
        ({"_target_": TOP, "data": {"_target_": PART, "sise": 3}}, r"'recipe\.data\.sise'; did you mean 'size'\?"),
        ({"_target_": TOP}, "^recipe does not fit .*'data'"),
        ({"_target_": TOP, "data": {"_target_": "trusted_pkg.parts.make"}}, r"^recipe\.data does not fit .*'size'"),
    ],
)
def test_wrong_arguments(config: dict[str, Any], message: str) -> None:
    """A missing class, an unknown key and a missing argument are named with their path."""
    with pytest.raises(UserError, match=message):
        build(config)


@pytest.mark.parametrize("name", ["recipes/__init__.py", "recipes.py"])
def test_a_package_that_hides_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As in a folder with a package `recipes`, in which `python -m runner` is started: it is not executed."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise AssertionError")
    for module in [one for one in sys.modules if one.partition(".")[0] == "recipes"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))} "):
        build({"_target_": "recipes.synthetic.linear.LinearLayer"})


# --- the source of a recipe ------------------------------------------------------------------------------------

SOURCES = {
    "__init__.py": "",
    "top.py": "import json, torch\nfrom . import base\nfrom mine_pkg.deep.part import Part\nimport other_pkg.x\n",
    "base.py": "def f():\n    from .lazy import g\n    return g\n",
    "lazy.py": "g = 1\n",
    "unused.py": "raise RuntimeError('imported')\n",
    "deep/part.py": "from ..helper import h\nfrom recipes.tasks import classification\n",
    "helper.py": "h = 1\n",
}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `mine_pkg`, one of whose parts has no `__init__.py`."""
    for name, text in SOURCES.items():
        (tmp_path / "mine_pkg" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine_pkg" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "mine_pkg"


def code(*trusted: str) -> dict[str, str]:
    return recipe_code({"_target_": "mine_pkg.top.Top", "data": [{"_target_": "mine_pkg.deep.part.Part"}]}, trusted)


def test_all_modules_that_define_a_recipe_are_found(source: Path) -> None:
    """Those that they import, too, by any form of import; not other packages, and none is imported."""
    found = code("mine_pkg", "torch")
    own = {name for name in found if name.startswith("mine_pkg")}
    modules = ("top", "base", "lazy", "deep.part", "helper")
    assert own == {"mine_pkg", *(f"mine_pkg.{name}" for name in modules)}
    assert {"recipes.tasks.classification", "recipes.models.pretrained"} <= found.keys()
    assert {name.partition(".")[0] for name in found} == {"mine_pkg", "recipes"}
    assert "mine_pkg" not in sys.modules
    assert code() == {}  # nothing is trusted


@pytest.mark.parametrize("name", SOURCES)
def test_a_change_is_found_in_its_module(source: Path, name: str) -> None:
    before = code("mine_pkg")
    with (source / name).open("a") as file:
        file.write("# changed\n")
    after = code("mine_pkg")
    module = f"mine_pkg.{name.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")
    assert {key for key in after if after[key] != before[key]} == ({module} if name != "unused.py" else set())


def test_a_recipe_in_a_single_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "letters_alone.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert set(recipe_code({"_target_": "letters_alone.Letters"}, ["letters_alone"])) == {"letters_alone"}
