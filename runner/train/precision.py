"""Precision of the forward and backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from runner.config.choices import PrecisionName

_AUTOCAST = {PrecisionName.bf16: torch.bfloat16, PrecisionName.fp16: torch.float16}


class Precision:
    """One precision on one device type (`cpu`, `cuda` or `xla`)."""

    def __init__(self, name: PrecisionName, device_type: str) -> None:
        self.name = name
        self.device_type = device_type
        # Set explicitly: PyTorch's default has changed before, and fp32 must mean fp32.
        torch.backends.cuda.matmul.allow_tf32 = name is PrecisionName.tf32
        torch.backends.cudnn.allow_tf32 = name is PrecisionName.tf32

    def cast(self, model: nn.Module) -> nn.Module:
        """The model with weights in fp64 under fp64, else in fp32."""
        return model.double() if self.name is PrecisionName.fp64 else model.float()

    @property
    def product_dtype(self) -> torch.dtype:
        """Bits of the factors of matrix products."""
        return _AUTOCAST.get(self.name, torch.float64 if self.name is PrecisionName.fp64 else torch.float32)

    def autocast(self) -> AbstractContextManager[object]:
        dtype = _AUTOCAST.get(self.name)
        return nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler: enabled under fp16 only."""
        return torch.amp.GradScaler(self.device_type, enabled=self.name is PrecisionName.fp16)
