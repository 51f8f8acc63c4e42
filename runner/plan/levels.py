"""How alike two runs can be called at best: the levels of a certificate."""

from __future__ import annotations

from collections.abc import Iterable

IDENTICAL, EQUIVALENT, COMPARABLE, NOT_COMPARABLE = "identical", "equivalent", "comparable", "not comparable"
#: From the best to the worst.
_ORDER = (IDENTICAL, EQUIVALENT, COMPARABLE, NOT_COMPARABLE)


def worst(levels: Iterable[str], of_none: str) -> str:
    """The worst of `levels`, `of_none` if there are none. One that a newer version has written is worse than all."""
    return max(levels, key=lambda level: _ORDER.index(level) if level in _ORDER else len(_ORDER), default=of_none)
