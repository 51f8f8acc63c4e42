"""Data sets of the Hugging Face Hub, and its cache where the Hub cannot be reached."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from huggingface_hub import constants

from recipes.sources.files import NO_DATA
from runner.errors import Unavailable, UserError, did_you_mean, first_line

#: The Hub's client would retry for half a minute, and print every attempt.
_TIMEOUT_S = 5.0


def go_offline_if_unreachable() -> None:
    """Make the Hub's client use only its cache, in this process, if the Hub does not answer within seconds."""
    if constants.HF_HUB_OFFLINE:
        return
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            pass
    except urllib.error.HTTPError:
        return  # reachable, if only to refuse
    except ValueError as error:
        raise UserError(f"HF_ENDPOINT={constants.ENDPOINT} is invalid ({first_line(error)}): give a URL") from error
    except (OSError, HTTPException):
        import datasets.config

        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True


def load_splits(name: str, config: str | None, splits: Sequence[str], columns: Sequence[str]) -> list[Any]:
    """These splits of a data set, as `datasets.Dataset`; `name` may also be a folder that `load_dataset` reads.

    Raises Unavailable if it cannot be loaded here, UserError for a split or a column that it does not have.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    go_offline_if_unreachable()
    try:
        found = load_dataset(name, config)
    except (ConnectionError, DatasetsError, OSError, ValueError) as error:
        raise Unavailable(f"{NO_DATA}, or go online to download '{name}' ({first_line(error)})") from error
    except RuntimeError as error:  # a loading script, which datasets no longer runs
        raise UserError(f"recipe.data.hub_name={name} cannot be loaded: {first_line(error)}") from error
    for split in splits:
        if split not in found:
            raise UserError(f"recipe.data.hub_name={name} has no split '{split}'{did_you_mean(split, found)}")
        for column in columns:
            there = found[split].column_names
            if column not in there:
                raise UserError(f"recipe.data.hub_name={name} has no column '{column}'{did_you_mean(column, there)}")
    return [found[split] for split in splits]
