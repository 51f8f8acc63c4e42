"""Convert settings to JSON-ready data and back, for workers and for files."""

from __future__ import annotations

import dataclasses
import enum
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
    """The inverse of `to_plain` for a dataclass of plain values, paths, enums and further dataclasses."""
    return typing.cast(T, _decode(kind, data))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    default = MISSING if field.default is dataclasses.MISSING else field.default
    return default != MISSING or field.default_factory is not dataclasses.MISSING


def _decode(kind: Any, data: Any) -> Any:
    if data is None or kind is Any:
        return data
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        inner = [part for part in typing.get_args(kind) if part is not type(None)]
        return _decode(inner[0], data) if len(inner) == 1 else data  # a number or a name
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        build: Any = kind
        # A file of an older version lacks what was added since.
        fields = [f for f in dataclasses.fields(kind) if f.init and (f.name in data or not _has_default(f))]
        return build(**{f.name: _decode(hints[f.name], data[f.name]) for f in fields})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[data]
    if kind is Path:
        return Path(data)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, tuple):
        return origin(_decode(parts[0], item) for item in data)
    return data
