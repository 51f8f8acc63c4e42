"""Seeds and states of random generators."""

from __future__ import annotations

import random
import typing
from typing import Any

import numpy as np
import torch


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (CPU and all CUDA devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state of the generators of Python, NumPy and torch on the CPU, as plain data and tensors."""
    name, keys, position, has_gauss, gauss = typing.cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (name, torch.tensor(keys.astype("int64")), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """The inverse of `random_state`."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])


def worker_seed(seed: int, rank: int, step: int = 0) -> int:
    """A seed for what differs between workers (dropout), independent for neighbouring seeds and ranks.

    `step`: the optimizer step after which another number of workers has taken over; they draw new random streams.
    """
    return int(np.random.SeedSequence([seed, rank, *([step] if step else [])]).generate_state(1)[0])
