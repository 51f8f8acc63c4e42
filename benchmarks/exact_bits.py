"""Are the masks of `equivalence=exact` identical on an accelerator? `python benchmarks/exact_bits.py [DEVICE]`.

DEVICE is `cuda`, or `xla` in an environment with torch_xla (on its CPU device: PJRT_DEVICE=CPU). Compares with the CPU.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from runner.exact.stream import keep_mask, sample_keys

SHAPES = [(4,), (2, 300), (3, 7, 16), (5, 4, 33, 33), (16, 12, 64, 64)]


def accelerator(name: str) -> torch.device:
    if name != "xla":
        return torch.device(name)
    import torch_xla

    device: torch.device = torch_xla.device()
    return device


if __name__ == "__main__":
    device = accelerator(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    random = np.random.default_rng(0)
    different = elements = 0
    for shape in SHAPES:
        for p in (1e-4, 0.1, 0.5, 0.999):
            seed, step, site = (int(n) for n in random.integers(0, [2**31, 10**6, 200]))
            keys = sample_keys(seed, step, random.integers(0, 2**40, shape[0]))
            mask = keep_mask(keys, site, shape, p)
            different += int((keep_mask(keys.to(device), site, shape, p).cpu() != mask).sum())
            elements += mask.numel()
    print(f"{device}, torch {torch.__version__}: {different} of {elements:,} elements differ from the CPU's")
    sys.exit(different > 0)
