"""The versions of the libraries whose arithmetic and defaults a result depends on."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Mapping

import torch

_LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "numpy")


@functools.cache
def library_versions(device_type: str) -> Mapping[str, str]:
    """By name; Python's own, and CUDA's where `device_type` is `cuda`."""
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    if device_type == "cuda":
        versions["CUDA"] = str(torch.version.cuda)
    return {"python": platform.python_version(), **versions}
