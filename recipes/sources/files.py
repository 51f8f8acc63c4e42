"""A training and an evaluation file on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runner.errors import UserError, require

NO_DATA = "there is no training data: set recipe.data.train=… and recipe.data.eval=… to local files"


def local_files(train: str | None, evaluation: str | None, hub_name: str | None) -> tuple[str, str] | None:
    """Both files, or None if the data come from the Hub. Raises UserError if only one is given, or no source at all."""
    if train is not None and evaluation is not None:
        return train, evaluation
    if train is not None or evaluation is not None:
        given, missing = ("eval", "train") if train is None else ("train", "eval")
        raise UserError(
            f"recipe.data.{missing}=null is invalid with recipe.data.{given}={train or evaluation}: set both files"
            + (f", or neither to download {hub_name}" if hub_name else "")
        )
    if not hub_name:
        raise UserError(NO_DATA)
    return None


def evaluation_file(evaluation: str | None, hub_name: str | None) -> str | None:
    """The evaluation file, or None if the data come from the Hub. Raises UserError without any source."""
    if evaluation is None and not hub_name:
        raise UserError("there is no evaluation data: set recipe.data.eval=… to a local file")
    return evaluation


@contextlib.contextmanager
def reading(path: Path, setting: str) -> Iterator[None]:
    """Turn the errors of reading `path` as UTF-8 text into a UserError. `setting`: the user's `name=value`."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{setting} does not exist (looked in {path.absolute().parent}): check the path") from error
    except IsADirectoryError as error:
        raise UserError(f"{setting} is a folder: give a file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{setting} is not UTF-8 text (byte {error.start}): convert it to UTF-8") from error
    except OSError as error:
        raise UserError(f"{setting} cannot be read ({error.strerror}): check the file") from error


def read_text(name: str, setting: str) -> str:
    """The content of a UTF-8 file. `setting`: the user's `name=value`. Raises UserError."""
    path = Path(name).expanduser()
    with reading(path, setting):
        return path.read_text(encoding="utf-8-sig")


def check_subsets(source: Any, unit: str) -> None:
    """Check a source's `max_train_samples`, `max_eval_samples` and `subset_seed`. Raises UserError."""
    for name in ("max_train_samples", "max_eval_samples"):
        count = getattr(source, name)
        require(count is None or count >= 1, f"recipe.data.{name}", count, f"use at least 1 {unit}, or null")
    require(source.subset_seed >= 0, "recipe.data.subset_seed", source.subset_seed, "must be at least 0")


def subset(rows: int, limit: int | None, seed: int) -> list[int]:
    """The numbers of `limit` random rows in increasing order, or of all rows if there are no more.

    A smaller subset with the same seed is part of a larger one.
    """
    if limit is None or limit >= rows:
        return list(range(rows))
    return sorted(np.random.default_rng(seed).permutation(rows)[:limit].tolist())
