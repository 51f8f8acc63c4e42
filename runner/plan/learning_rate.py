"""How the learning rate depends on the batch size."""

from __future__ import annotations

import math


def scaling_samples(scaling_batch: str, global_batch: int, samples_per_epoch: int, world_size: int) -> int:
    """The batch size in the scaling rule: samples per optimizer step of all workers, or of one (`replica_batch`).

    A step never sees more samples than an epoch has, even if the global batch is larger.
    """
    observed = min(global_batch, samples_per_epoch)
    return observed if scaling_batch == "global_batch" else -(-observed // world_size)


def lr_factor(rule: str, batch: int, reference_batch: int) -> float:
    """The factor on the base learning rate for steps of `batch` samples, tuned for steps of `reference_batch`.

    `linear`: batch ÷ reference (Goyal et al. 2017, "Accurate, Large Minibatch SGD"); `sqrt`: its square root
    (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"); `none`: 1.
    The common advice to multiply by the number of processes is the linear rule for a batch held equal per device.
    """
    ratio = batch / reference_batch
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
