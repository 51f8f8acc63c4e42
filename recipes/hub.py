"""The Hugging Face Hub where there is one, and its cache where there is not."""

from __future__ import annotations

import urllib.error
import urllib.request

from huggingface_hub import constants

#: Seconds that the Hub has for its first answer. Its client would retry for half a minute, and say so each time.
_ANSWER_WITHIN_S = 5.0


def go_offline_if_unreachable() -> None:
    """Make the Hub's client use its cache alone, in this process, when the Hub does not answer at once."""
    if constants.HF_HUB_OFFLINE:
        return
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with urllib.request.urlopen(request, timeout=_ANSWER_WITHIN_S):
            pass
    except urllib.error.HTTPError:
        return  # it answers, if only with a refusal
    except OSError:
        import datasets.config

        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
