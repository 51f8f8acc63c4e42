"""Keep credentials out of what is written and logged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_USERINFO = re.compile(r"(\w[\w+.-]*://)[^/@\s]+@")
_SECRET_KEY = re.compile(r"(password|passwd|secret|token|api_key|apikey|credential)s?$", re.IGNORECASE)


def masked(text: str) -> str:
    """`text` with the user part of every URL replaced by stars."""
    return _USERINFO.sub(r"\1***@", text)


def without_credentials(value: Any) -> Any:
    """Plain data with credentials masked: in URLs, and under keys that name a secret."""
    if isinstance(value, Mapping):
        return {
            key: "***" if _SECRET_KEY.search(str(key)) and item is not None else without_credentials(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [without_credentials(item) for item in value]
    return masked(value) if isinstance(value, str) else value
