"""Convert settings to JSON-ready data and back, for workers and for files."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import itertools
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import MISSING


def to_plain(value: Any) -> Any:
    """A configuration as JSON-ready data; enum members become their names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    return str(value) if isinstance(value, Path) else value


T = TypeVar("T")


def from_plain(kind: type[T], data: Any) -> T:
    """The inverse of `to_plain` for a dataclass of plain values, paths, enums and further dataclasses.

    Raises ValueError for a value that is missing or not of its field's type.
    """
    return typing.cast(T, _decode(kind, data, "it"))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    default = MISSING if field.default is dataclasses.MISSING else field.default
    return default != MISSING or field.default_factory is not dataclasses.MISSING


def _decode(kind: Any, data: Any, name: str) -> Any:
    """`name`: of the value, for messages."""
    if kind is Any:
        return data
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [part for part in parts if part is not type(None)]
        if data is None and len(inner) < len(parts):
            return None
        return _decode(inner[0], data, name) if len(inner) == 1 else data  # a number or a name
    if dataclasses.is_dataclass(kind):
        _check(isinstance(data, Mapping), name, data, kind)
        return _decode_dataclass(kind, data)
    if origin is collections.abc.Mapping:
        _check(isinstance(data, Mapping), name, data, kind)
        return {key: _decode(parts[1], item, f"{name}.{key}") for key, item in data.items()}
    if origin in (list, tuple):
        _check(isinstance(data, (list, tuple)), name, data, kind)
        kinds = parts if len(parts) == len(data) and ... not in parts else itertools.repeat(parts[0])
        return origin(_decode(one, item, name) for one, item in zip(kinds, data, strict=False))
    if not isinstance(kind, type):
        return data
    if issubclass(kind, enum.Enum):
        _check(isinstance(data, str) and data in kind.__members__, name, data, kind)
        return kind[data]
    if kind is float and data in ("NaN", "Infinity", "-Infinity"):  # as JSON without such numbers has them
        return float(data)
    if kind in (bool, int, float, str):
        accepted = (int, float) if kind is float else kind
        _check(isinstance(data, accepted) and (kind is bool or not isinstance(data, bool)), name, data, kind)
    return Path(data) if kind is Path else data


def _decode_dataclass(kind: Any, data: Mapping[str, Any]) -> Any:
    hints = _type_hints(kind)
    # A file of an older version lacks what was added since.
    fields = [f for f in dataclasses.fields(kind) if f.init and (f.name in data or not _has_default(f))]
    if missing := [f.name for f in fields if f.name not in data]:
        raise ValueError(f"it has no {missing[0]}")
    return kind(**{f.name: _decode(hints[f.name], data[f.name], f.name) for f in fields})


@functools.cache
def _type_hints(kind: Any) -> dict[str, Any]:
    """Evaluate annotations once: a command may read the records of a thousand runs."""
    return typing.get_type_hints(kind)


def _check(ok: bool, name: str, data: Any, kind: Any) -> None:
    if not ok:
        raise ValueError(f"{name} is {data!r:.60}, and not {getattr(kind, '__name__', kind)}")
