"""Build a recipe from its configuration: from trusted code only, with settings of the right type."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.errors import UserError, did_you_mean, require

#: Keys of a recipe that describe the experiment and are not arguments of its class.
EXPERIMENT_KEYS = ("name", "metric", "goal", "tuned")
#: Keys of a recipe on which training does not depend; of the data the content counts, by its digest.
NOT_TRAINED_WITH = ("tuned", "metric", "goal", "data", "metrics_shown")
#: Keys of `recipe.tuned`, from which conf/ takes the defaults of settings.
TUNED_KEYS = (
    "lr",
    "reference_batch",
    "epochs",
    "warmup_share",
    "global_batch",
    "micro_batch",
    "evaluation_micro_batch",
)

#: Too large to be read, and they have versions.
_LIBRARIES = ("datasets", "numpy", "tokenizers", "torch", "transformers")

#: Modules of recipes that moved -> where they are now.
MOVED = {
    "recipes.acceptability": "recipes.synthetic.acceptability",
    "recipes.classification": "recipes.tasks.classification",
    "recipes.language_model": "recipes.tasks.language_model",
    "recipes.linear": "recipes.synthetic.linear",
    "recipes.plain_text": "recipes.sources.plain_text",
    "recipes.pretrained": "recipes.models.pretrained",
    "recipes.question_answering": "recipes.tasks.question_answering",
    "recipes.squad_files": "recipes.sources.squad_files",
    "recipes.text_files": "recipes.sources.text_files",
}

#: The runner's own package of recipes, next to this one in a checkout and when installed.
_OWN_RECIPES = Path(__file__).resolve().parents[2] / "recipes"

_PLAIN = (str, int, float, bool)
_DESCRIPTIONS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def build_recipe(config: Mapping[str, Any], trusted_packages: Sequence[str]) -> Any:
    """Build the recipe that a plain configuration describes.

    `_target_` may appear at any depth, and is resolved only inside `recipes` and `trusted_packages`. Raises UserError.
    """
    if config.get("_target_") is None:
        raise UserError("recipe._target_ is missing: name the class that implements the recipe")
    arguments = {key: value for key, value in config.items() if key not in EXPERIMENT_KEYS}
    return _build(arguments, _trusted(trusted_packages), "recipe")


def recipe_code(config: Mapping[str, Any], trusted_packages: Sequence[str]) -> dict[str, str]:
    """SHA-256 of the source of each module that defines a recipe.

    Those are the modules of its `_target_`s, and all that they import from `recipes` and the trusted packages, also in
    functions, except large libraries. Only the files are read.
    """
    packages = [name for name in _trusted(trusted_packages) if name not in _LIBRARIES]
    waiting = [target.rpartition(".")[0] for target in _targets(config)]
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        file = _source(name) if name not in found and name.partition(".")[0] in packages else None
        if file is not None:
            content = file.read_bytes()
            found[name] = hashlib.sha256(content).hexdigest()
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            waiting += [name.rpartition(".")[0], *_imported(content, package)]
    return dict(sorted(found.items()))


def _trusted(packages: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(("recipes", *packages)))


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield str(node["_target_"])
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        for value in node:
            yield from _targets(value)


def _source(module: str) -> Path | None:
    """The Python file of a module or package, found without importing its parents."""
    top, *names = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    files = [Path(spec.origin or "")]
    if names:
        folders = [Path(folder, *names) for folder in spec.submodule_search_locations or ()]
        files = [file for folder in folders for file in (folder / "__init__.py", folder.with_suffix(".py"))]
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Everything that a module of `package` imports, which may be modules or names in them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
            base = base if node.level else node.module or ""
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _build(node: Any, trusted: tuple[str, ...], path: str) -> Any:
    if isinstance(node, Mapping):
        built = {key: _build(value, trusted, f"{path}.{key}") for key, value in node.items() if key != "_target_"}
        return _call(node["_target_"], built, trusted, path) if "_target_" in node else built
    if isinstance(node, (list, tuple)):
        return [_build(value, trusted, f"{path}[{i}]") for i, value in enumerate(node)]
    return node


def _call(target: Any, arguments: dict[str, Any], trusted: tuple[str, ...], path: str) -> Any:
    factory = _resolve(str(target), trusted, f"{path}._target_={target}")
    fields = getattr(factory, "__dataclass_fields__", None)
    if fields is not None:
        hints = _hints(factory)
        for key, value in arguments.items():
            if key not in fields:
                raise UserError(f"there is no setting '{path}.{key}'{did_you_mean(key, fields)}")
            _check_type(value, hints.get(key, Any), f"{path}.{key}")
    try:
        return factory(**arguments)
    except TypeError as error:
        raise UserError(f"{path} does not fit {target}: {error}") from error


def _hints(factory: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(factory)
    except NameError:  # annotations that only a type checker can resolve: types are not checked
        return {}


def _resolve(target: str, trusted: tuple[str, ...], shown: str) -> Any:
    module_name, _, name = target.rpartition(".")
    _check_trust(module_name, trusted, shown)
    if module_name in MOVED:
        raise UserError(f"{shown} is invalid: the class moved; use {MOVED[module_name]}.{name}")
    if module_name.partition(".")[0] == "recipes":
        _check_not_hidden()
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{shown} cannot be imported ({error}): install its package, or set PYTHONPATH to its folder"
        ) from error
    # Names that a trusted module imports from elsewhere are not trusted.
    _check_trust(getattr(factory, "__module__", None) or "", trusted, shown)
    return factory


def _check_not_hidden() -> None:
    """`python -m` searches the current folder first, where a user may have a package of this name. Raises UserError."""
    found = importlib.util.find_spec("recipes")
    origin = None if found is None or found.origin is None else Path(found.origin).resolve()
    if origin is not None and origin.parent != _OWN_RECIPES:
        raise UserError(
            f"{origin} hides the runner's own package 'recipes': rename it, or use the command `runner` instead of "
            "`python -m runner`, which imports from the current folder first"
        )


def _check_trust(module_name: str, trusted: tuple[str, ...], shown: str) -> None:
    package = module_name.partition(".")[0]
    if package not in trusted:
        fix = f"add '{package}' to trusted_packages if you trust its code" if package else "name a class in a module"
        raise UserError(f"{shown} is outside the trusted packages ({', '.join(trusted)}): {fix}")


def _check_type(value: Any, hint: Any, setting: str) -> None:
    """Check plain and optional types, and parts that need a `_target_`; the class checks anything else."""
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in choices:
        return
    wanted = [choice for choice in choices if choice is not type(None)]
    if all(choice in _PLAIN for choice in wanted):
        expected = " or ".join(_DESCRIPTIONS[choice] for choice in wanted)
        require(any(_is_plain(value, choice) for choice in wanted), setting, value, f"use {expected}")
    elif any(getattr(choice, "_is_protocol", False) for choice in wanted):
        built = value is not None and not isinstance(value, (*_PLAIN, list, dict))
        require(built, setting, value, "use a part with its own _target_")


def _is_plain(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
