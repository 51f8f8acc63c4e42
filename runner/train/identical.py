"""`equivalence=identical` on workers: operations whose bits are fixed, and what must be equal at start and end."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from runner.backends import Backend
from runner.backends.machine import processor
from runner.errors import RunFailed, UserError
from runner.train.adapter import changing_state


def make_deterministic(device_type: str) -> None:
    """Let torch refuse operations whose bits change from run to run, and choose others where it can."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # to find mistakes only
    if device_type != "cuda":
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS is first used
    torch.backends.cudnn.benchmark = False  # chooses kernels by their speed in this run
    # Their backward passes add in an order that is not fixed.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def require_equal_workers(model: nn.Module, backend: Backend, device_type: str) -> None:
    """Raises UserError if processors or initial weights differ between workers. A collective."""
    rule = "bits differ between them: use machines of one kind, or equivalence=exact"
    for what, own, why in (
        ("processor", processor(device_type), rule),
        ("weights", weights_digest(model.state_dict()), "let build_model depend on the seed only"),
    ):
        found = backend.all_gather_object(own)
        if len(set(found)) > 1:
            differs = next(rank for rank, one in enumerate(found) if one != found[0])
            worker = f"worker {differs} has other {what} than worker 0 ({found[differs]}, {found[0]})"
            raise UserError(f"equivalence=identical is not possible: {worker}; {why}")


def common_digest(model: nn.Module, backend: Backend) -> str:
    """The digest of the weights after the last step, which all workers must have. A collective. Raises RunFailed."""
    digests = backend.all_gather_object(weights_digest(changing_state(model)))
    if len(set(digests)) > 1:
        raise RunFailed(f"equivalence=identical: workers ended with different weights ({', '.join(digests)})")
    return str(digests[0])


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names and bits of these tensors; 16 digits of it."""
    content = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        content.update(name.encode())
        content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()[:16]
