"""Random streams."""

from __future__ import annotations

import random

import numpy as np
import torch


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch on every device of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CPU and all CUDA devices


def worker_seed(seed: int, rank: int) -> int:
    """A seed for what differs from worker to worker (dropout): far apart even for neighbouring seeds and ranks."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
