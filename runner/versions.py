"""The versions of the libraries whose arithmetic and defaults a result depends on."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Mapping

_LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "numpy")


@functools.cache
def library_versions() -> Mapping[str, str]:
    """By name, Python's own included."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
    }
