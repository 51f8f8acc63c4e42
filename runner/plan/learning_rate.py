"""How the learning rate follows the batch."""

from __future__ import annotations

import math


def lr_factor(rule: str, batch: int, reference_batch: int) -> float:
    """The factor on the base learning rate when `batch` samples replace `reference_batch` behind an optimizer step.

    `linear`: batch ÷ reference (Goyal et al. 2017, "Accurate, Large Minibatch SGD"); `sqrt`: its square root
    (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"); `none`: 1.
    The common advice to multiply by the number of processes is the linear rule for a batch held equal per device.
    """
    ratio = batch / reference_batch
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
