"""Versions of the libraries that influence results."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Mapping

import torch

_LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "numpy")


@functools.cache
def library_versions(device_type: str) -> Mapping[str, str]:
    """Versions by name, including Python, and CUDA or torch_xla if `device_type` is `cuda` or `xla`."""
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    if device_type == "cuda":
        versions["CUDA"] = str(torch.version.cuda)
    if device_type == "xla":
        versions["torch_xla"] = importlib.metadata.version("torch_xla")
    return {"python": platform.python_version(), **versions}
