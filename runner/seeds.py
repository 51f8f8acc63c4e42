"""Random streams."""

from __future__ import annotations

import random
import sys
import typing
from typing import Any

import numpy as np
import torch


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch on every device of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CPU and all CUDA devices
    if "torch_xla" in sys.modules:  # only the XLA backend imports it
        sys.modules["torch_xla"].manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator of this process, as plain data and tensors."""
    name, keys, position, has_gauss, gauss = typing.cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (name, torch.tensor(keys.astype("int64")), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `random_state`."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def worker_seed(seed: int, rank: int) -> int:
    """A seed for what differs from worker to worker (dropout): far apart even for neighbouring seeds and ranks."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
