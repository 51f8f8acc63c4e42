"""The learning-rate schedule: a pure function of the share of samples seen."""

from __future__ import annotations

import math


def lr_multiplier(name: str, share: float, warmup_share: float) -> float:
    """The factor on the peak learning rate when `share` (0 to 1) of all samples have been seen.

    It rises linearly from 0 over `warmup_share`, then is constant (`constant`), falls linearly to 0 (`linear`) or
    follows half a cosine to 0 (`cosine`; Loshchilov & Hutter 2017, "SGDR", without restarts). It depends only on the
    share, so every setup has the same learning rate at the same sample.
    """
    if share < warmup_share:
        return share / warmup_share
    if name == "constant":
        return 1.0
    rest = max(0.0, (1.0 - share) / (1.0 - warmup_share))
    if name == "linear":
        return rest
    assert name == "cosine", name
    return 0.5 * (1.0 + math.cos(math.pi * (1.0 - rest)))
