"""The Hugging Face Hub's cache, where the Hub cannot be reached."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPException

from huggingface_hub import constants

from runner.errors import UserError, first_line

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
