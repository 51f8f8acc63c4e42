"""Given samples, their masks, and fixed noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from runner.exact.stream import keep_mask, sample_keys

CPU = torch.device("cpu")
KEYS = sample_keys(5, 3, np.arange(4))
#: Above 0, so that dropout is on, and too small to drop or scale anything.
DROPS_NOTHING = 1e-16


def drawn(shape: tuple[int, ...], p: float, site: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The scaled mask of the samples above: 0, or 1 / (1 - p)."""
    return keep_mask(KEYS, site, shape, p).to(dtype) / (1 - p)


def noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
