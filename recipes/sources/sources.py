"""Where a recipe's data come from: a training and an evaluation file, or a data set of the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.errors import Unavailable, UserError, first_line

_NO_DATA = "there are no training data: give local files with recipe.data.train=… and recipe.data.eval=…"


def local_files(train: str | None, evaluation: str | None, hub_name: str | None) -> tuple[str, str] | None:
    """Both files, or None where the Hub is to be asked. Raises UserError for one file of two, and for nothing given."""
    for name, path in (("train", train), ("eval", evaluation)):
        if path is not None and (not isinstance(path, str) or not path.strip()):
            raise UserError(f"recipe.data.{name}={path} cannot be: give the path of a file")
    if train is not None and evaluation is not None:
        return train, evaluation
    if train is not None or evaluation is not None:
        given, missing = ("eval", "train") if train is None else ("train", "eval")
        raise UserError(
            f"recipe.data.{given} is given and recipe.data.{missing} is not: give both files"
            + (f", or neither to take {hub_name} from the Hub" if hub_name else "")
        )
    if not hub_name:
        raise UserError(_NO_DATA)
    return None


def hub_words(name: str | None, config: str | None, train: str, evaluation: str) -> str:
    """A data set of the Hub with its parts, as `hub_samples_of` has it too: `owner/name/config (train, validation)`."""
    return f"{name}/{config} ({train}, {evaluation})" if config else f"{name} ({train}, {evaluation})"


def expected_sizes(
    words: str, of: str | None, known: tuple[int | None, int | None], limits: tuple[int | None, int | None]
) -> tuple[int, int, str] | None:
    """Rows of both parts of the Hub's data set `words`, and who says so; None if that is not known.

    `known`: the sizes of the data set `of`, which are those of no other; `limits`: rows that are taken at most.
    """
    train, evaluation = known
    if of != words or train is None or evaluation is None:
        return None
    train_limit, evaluation_limit = limits
    return _first(train, train_limit), _first(evaluation, evaluation_limit), f"the size of {words} on the Hub"


def _first(size: int, limit: int | None) -> int:
    return size if limit is None else min(size, limit)


def local_path(name: str, setting: str) -> Path:
    """A path that one may look at, whether or not there is something. `setting`: as the user gave it.

    Raises UserError for a name that is too long, an unknown user's home, or a folder that may not be entered.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{setting} cannot be looked at: {getattr(error, 'strerror', None) or error}") from error
    return path


def is_text(value: Any) -> bool:
    """Whether a value of a JSON file is text; half of a surrogate pair can be written there, and is none."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_json(text: str) -> Any:
    """The content of a JSON text. Raises json.JSONDecodeError, for too many brackets within each other too."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", text, 0) from error


def read_text(name: str, setting: str, what: str) -> str:
    """A file's UTF-8 text. `setting`: as the user gave it; `what`: it should be, in words. Raises UserError."""
    path = local_path(name, setting)
    if path.is_dir():
        raise UserError(f"{setting} is a folder: give {what} itself")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"{setting} does not exist (looked in {path.absolute().parent}): check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{setting} is not UTF-8 text (byte {error.start}): convert it") from error
    except OSError as error:
        raise UserError(f"{setting} cannot be read: {error.strerror}") from error


def hub_parts(name: str, config: str | None, parts: Sequence[str], columns: Sequence[str]) -> list[Any]:
    """These parts of a data set, each with at least these columns; a local folder that `load_dataset` reads will do.

    Raises Unavailable where the data set cannot be had, UserError for a part or a column that it has not.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    from recipes.sources.hub import go_offline_if_unreachable

    go_offline_if_unreachable()
    try:
        found = load_dataset(name, config)
    except (ConnectionError, DatasetsError, OSError, ValueError) as error:
        raise Unavailable(
            f"{_NO_DATA}, or go online so that '{name}' can come from the Hugging Face Hub ({first_line(error)})"
        ) from error
    except RuntimeError as error:  # a script of its own, which datasets does not run any more
        raise UserError(f"recipe.data.hub_name={name} cannot be loaded: {first_line(error)}") from error
    for part in parts:
        if part not in found:
            raise UserError(f"recipe.data has no part '{part}' on the Hub: {name} has {', '.join(found)}")
        for column in columns:
            if column not in found[part].column_names:
                there = ", ".join(found[part].column_names)
                raise UserError(f"recipe.data has no column '{column}' on the Hub: {name} has {there}")
    return [found[part] for part in parts]
