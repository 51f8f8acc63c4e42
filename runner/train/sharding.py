"""Sharded data parallelism: torch's FSDP2, with which each worker keeps a part of every weight.

A part is some of the weight's rows (a DTensor that is split in its first dimension). Before a block runs, forward or
backward, the workers gather its weights; after its backward pass they sum its gradients, of which each keeps its part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from runner.backends import Backend
from runner.config.choices import PrecisionName, ShardingKind
from runner.config.schema import Sharding

Key = TypeVar("Key")


@dataclass(frozen=True)
class ShardedModel:
    """`model`: with weights in parts. `empty`: on rank 0 the same layers without weights, on the CPU.

    `bytes_per_pass`: that one micro-batch of training moves: weights gathered for the forward pass, those of blocks
    once more for the backward pass, and gradients summed.
    """

    model: nn.Module
    empty: nn.Module | None
    bytes_per_pass: int

    def whole(self) -> nn.Module | None:
        """The model with all its weights on rank 0's CPU, None on other workers. A collective."""
        weights = {}
        for name, parameter in self.model.named_parameters():
            tensor = full(parameter.detach())
            if self.empty is not None:
                weights[name] = tensor.cpu()
        if self.empty is None:
            return None
        new: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
        for name, parameter in list(self.empty.named_parameters(remove_duplicate=False)):
            if parameter not in new:
                new[parameter] = nn.Parameter(weights[name], parameter.requires_grad)
            owner, _, attribute = name.rpartition(".")
            setattr(self.empty.get_submodule(owner), attribute, new[parameter])
        buffers = dict(self.model.named_buffers())
        for name, buffer in self.empty.named_buffers():
            buffer.copy_(buffers[name])
        return self.empty


def shard(settings: Sharding, model: nn.Module, backend: Backend, wire: torch.dtype | None, group: Any) -> ShardedModel:
    """Keep this worker's part of each weight of `model`, which is on the CPU, on the backend's device.

    `wire`: in which gradients are summed, None for their own dtype. `group`: the mesh of `mesh_of`. No collective.
    """
    from torch.distributed.fsdp import (  # takes half a second, and few runs need it
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    blocks = _blocks(model)
    empty = _without_weights(model) if backend.rank == 0 else None
    dtype = torch.bfloat16 if settings.param_dtype is PrecisionName.bf16 else None
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=wire or (torch.float32 if dtype else None), cast_forward_inputs=False
    )
    offload = OffloadPolicy()
    if settings.kind is ShardingKind.fsdp_offload:
        offload = CPUOffloadPolicy(pin_memory=backend.device.type == "cuda")
    traffic = _bytes_per_pass(model, blocks, dtype, policy.reduce_dtype)
    for module in (*blocks, model):
        fully_shard(module, mesh=group, mp_policy=policy, offload_policy=offload)
    for part in model.modules():
        part._is_fsdp_managed_module = True  # type: ignore[assignment]  # so that all workers generate equally long
    return ShardedModel(model, empty, traffic)


def mesh_of(backend: Backend) -> Any:
    """All workers in one dimension. A collective."""
    return init_device_mesh(backend.device.type, (backend.world_size,))


@contextmanager
def in_turn(backend: Backend, local_workers: int) -> Iterator[None]:
    """One worker of a machine after the other, so that the host's memory need only hold one whole model."""
    for turn in range(local_workers):
        if turn == backend.local_rank:
            yield
        backend.wait_for_all(None)


def is_sharded(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor  # takes a second, which the parent should not wait for

    return isinstance(tensor, DTensor)


def full(tensor: Any) -> Tensor:
    """The whole tensor. A collective if workers have parts of it."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def local(tensor: Any) -> Tensor:
    """This worker's part of a tensor, which is all of it unless it is sharded."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def laid_out_as(like: Mapping[Key, Tensor], tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Whole tensors in parts where those of `like` are, if they have their shape. No collective."""

    def laid_out(tensor: Tensor, like: Any) -> Tensor:
        if not is_sharded(like) or is_sharded(tensor) or tensor.shape != like.shape:
            return tensor
        parts, rank = tensor.chunk(like.device_mesh.size()), like.device_mesh.get_local_rank()
        result = torch.empty_like(like)
        if rank < len(parts):  # there can be fewer rows than workers
            local(result).copy_(parts[rank])
        return result

    return {key: laid_out(tensor, like[key]) for key, tensor in tensors.items()}


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, each of which is gathered by itself: the items of the outermost lists of modules."""
    blocks: list[nn.Module] = []

    def find(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) > 1:
                blocks.extend(child)
            else:
                find(child)

    find(model)
    return blocks


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy with empty parameters, which take no memory."""
    empty: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, empty)


def _bytes_per_pass(
    model: nn.Module, blocks: list[nn.Module], gathered: torch.dtype | None, reduced: torch.dtype | None
) -> int:
    in_blocks = {parameter for block in blocks for parameter in block.parameters()}
    total = 0
    for parameter in model.parameters():
        gathers = 2 if parameter in in_blocks else 1  # the others are kept until the backward pass
        total += gathers * parameter.numel() * (gathered or parameter.dtype).itemsize
        if parameter.requires_grad:
            total += parameter.numel() * (reduced or gathered or parameter.dtype).itemsize
    return total
