"""Keep credentials out of what is written and logged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from runner.log import MASK, masked

_SECRET_KEY = re.compile(
    r"(^|[_-])(passw(or)?d|passphrase|pwd|secret|credential|auth(orization)?|dsn|(api|access|private|secret)[_-]?key)s?$"
    r"|(auth|access|api|bearer)_?tokens?$|^tokens?$"
    # As `github_token`, but not a tokenizer's `eos_token`.
    r"|^(?!.*(bos|cls|end|eos|eot|image|mask|max|pad|sep|special|start|stop|turn|unk)_token$).*[_-]token$",
    re.IGNORECASE,
)


def names_a_secret(key: str) -> bool:
    """True if a setting of this name holds a secret, such as `api_key`."""
    return _SECRET_KEY.search(key) is not None


def masked_override(override: str) -> str:
    """`override`, such as `recipe.api_key=…`, without the secret in it."""
    key, _, _ = override.partition("=")
    return f"{key}={MASK}" if names_a_secret(key.rpartition(".")[2]) else masked(override)


def without_credentials(value: Any) -> Any:
    """A copy of JSON-like data with credentials masked: in URLs, and under keys that name a secret."""
    if isinstance(value, Mapping):
        return {
            key: MASK if names_a_secret(str(key)) and item is not None else without_credentials(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [without_credentials(item) for item in value]
    return masked(value) if isinstance(value, str) else value


def is_masked(text: str) -> bool:
    """True if a credential in `text` was masked, so that it cannot be used as it is."""
    return text == MASK or f"{MASK}@" in text or f"={MASK}" in text


def masked_keys(settings: Any, key: str = "") -> Iterator[str]:
    """The keys of plain settings, such as `recipe.api_key`, whose values were masked."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from masked_keys(value, f"{key}.{name}" if key else str(name))
    elif isinstance(settings, list):
        for value in settings:
            yield from masked_keys(value, key)
    elif isinstance(settings, str) and is_masked(settings):
        yield key
