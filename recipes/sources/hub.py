"""The Hugging Face Hub where there is one, and its cache where there is not."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPException

from huggingface_hub import constants

from runner.errors import UserError, first_line

#: Seconds that the Hub has for its first answer. Its client would retry for half a minute, and say so each time.
_ANSWER_WITHIN_S = 5.0


def go_offline_if_unreachable() -> None:
    """Make the Hub's client use its cache alone, in this process, when the Hub does not answer at once.

    Raises UserError if its address, HF_ENDPOINT, is none.
    """
    if constants.HF_HUB_OFFLINE:
        return
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with urllib.request.urlopen(request, timeout=_ANSWER_WITHIN_S):
            pass
    except urllib.error.HTTPError:
        return  # it answers, if only with a refusal
    except ValueError as error:
        raise UserError(f"HF_ENDPOINT={constants.ENDPOINT} is no address: {first_line(error)}") from error
    except (OSError, HTTPException):
        import datasets.config

        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
