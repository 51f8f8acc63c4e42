"""How the learning rate follows the batch."""

from __future__ import annotations

import math


def scaling_samples(scaling_batch: str, global_batch: int, samples_per_epoch: int, world_size: int) -> int:
    """What the rule goes by: the samples behind an optimizer step (`global_batch`), or one worker's (`replica_batch`).

    A step never sees more samples than an epoch has, however large a global batch was asked for.
    """
    observed = min(global_batch, samples_per_epoch)
    return observed if scaling_batch == "global_batch" else -(-observed // world_size)


def lr_factor(rule: str, batch: int, reference_batch: int) -> float:
    """The factor on the base learning rate when `batch` samples replace `reference_batch` behind an optimizer step.

    `linear`: batch ÷ reference (Goyal et al. 2017, "Accurate, Large Minibatch SGD"); `sqrt`: its square root
    (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"); `none`: 1.
    The common advice to multiply by the number of processes is the linear rule for a batch held equal per device.
    """
    ratio = batch / reference_batch
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
