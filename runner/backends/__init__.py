"""Devices and the collectives between them."""

from runner.backends.protocol import Backend
from runner.backends.torch_distributed import TorchBackend

__all__ = ["Backend", "TorchBackend"]
