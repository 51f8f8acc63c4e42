"""Sharded data parallelism: torch's FSDP2, with which each worker keeps a shard of every weight.

A shard is some of the weight's rows (a DTensor that is split in its first dimension). Before a block runs, forward or
backward, the workers gather its weights; after its backward pass they sum its gradients, of which each keeps its shard.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runner.backends import Backend
from runner.config.choices import PrecisionName, ShardingKind
from runner.config.schema import Sharding
from runner.errors import UserError, first_line

Key = TypeVar("Key")


@dataclass(frozen=True)
class ShardedModel:
    """`model`: with sharded weights. `skeleton`: on rank 0 the same layers without weights, on the CPU.

    `bytes_per_pass`: that one micro-batch of training moves: weights gathered for the forward pass, those of blocks
    once more for the backward pass, and gradients summed.
    """

    model: nn.Module
    skeleton: nn.Module | None
    bytes_per_pass: int

    def whole(self) -> nn.Module | None:
        """The model with all its weights on rank 0's CPU, None on other workers. A collective."""
        self.model.reshard()  # type: ignore[operator]  # what is outside the blocks stays gathered after a forward pass
        weights = {}
        for name, parameter in self.model.named_parameters():
            tensor = full(parameter.detach())
            if self.skeleton is not None:
                weights[name] = tensor.cpu()
        if self.skeleton is None:
            return None
        new: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
        for name, parameter in list(self.skeleton.named_parameters(remove_duplicate=False)):
            if parameter not in new:
                new[parameter] = nn.Parameter(weights[name], parameter.requires_grad)
            owner, _, attribute = name.rpartition(".")
            setattr(self.skeleton.get_submodule(owner), attribute, new[parameter])
        buffers = dict(self.model.named_buffers())
        for name, buffer in self.skeleton.named_buffers():
            buffer.copy_(buffers[name])
        return self.skeleton


def shard(
    settings: Sharding, model: nn.Module, backend: Backend, mesh: DeviceMesh, wire: torch.dtype | None = None
) -> ShardedModel:
    """Keep this worker's shard of each weight of `model`, which is on the CPU, on the backend's device. No collective.

    `mesh`: all workers in one dimension. `wire`: in which gradients are summed, None for their own dtype. Raises
    UserError for models that FSDP2 does not take.
    """
    from torch.distributed.fsdp import (  # takes half a second, and few runs need it
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    blocks = _blocks(model)
    skeleton = _without_weights(model) if backend.rank == 0 else None
    dtype = torch.bfloat16 if settings.param_dtype is PrecisionName.bf16 else None
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=wire or (torch.float32 if dtype else None), cast_forward_inputs=False
    )
    offload = OffloadPolicy()
    if settings.kind is ShardingKind.fsdp_offload:
        offload = CPUOffloadPolicy(pin_memory=backend.device.type == "cuda")
    bytes_per_pass = _bytes_per_pass(model, blocks, dtype, policy.reduce_dtype)
    try:
        for module in (*blocks, model):
            # The root stays gathered after a forward pass by default. transformers' `generate` needs that: it calls
            # encoders by themselves.
            sharded = fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    except (ValueError, NotImplementedError) as error:
        rule = f"FSDP2 does not take {type(model).__name__} ({first_line(error)}): use sharding=none"
        raise UserError(f"sharding={settings.kind.name} is invalid: {rule}") from error
    if hasattr(sharded, "set_reduce_scatter_unused_params"):  # newer than torch 2.9
        # A weight can have a gradient on some workers only, as in mixtures of experts.
        sharded.set_reduce_scatter_unused_params(True)
    return ShardedModel(model, skeleton, bytes_per_pass)


def mesh_of(backend: Backend) -> DeviceMesh:
    """All workers in one dimension. A collective."""
    return init_device_mesh(backend.device.type, (backend.world_size,))


@contextmanager
def in_turn(backend: Backend) -> Iterator[None]:
    """One worker of a machine after the other, so that the host's memory need only hold one whole model."""
    for turn in range(1 + max(backend.wait_for_all(backend.local_rank))):
        if turn == backend.local_rank:
            yield
        backend.wait_for_all(None)


def is_sharded(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor  # takes a second, which the parent should not wait for

    return isinstance(tensor, DTensor)


def full(tensor: Any) -> Tensor:
    """The whole tensor. A collective if it is sharded."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def local(tensor: Any) -> Tensor:
    """This worker's shard of a tensor, which is all of it unless it is sharded."""
    shard: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return shard


def laid_out_as(like: Mapping[Key, Tensor], tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Whole tensors sharded where those of `like` are, if they have the same shape. No collective."""

    def laid_out(tensor: Tensor, like: Any) -> Tensor:
        if not is_sharded(like) or is_sharded(tensor) or tensor.shape != like.shape:
            return tensor
        shards, rank = tensor.chunk(like.device_mesh.size()), like.device_mesh.get_local_rank()
        result = torch.empty_like(like)
        if rank < len(shards):  # there can be fewer rows than workers
            local(result).copy_(shards[rank])
        return result

    return {key: laid_out(tensor, like[key]) for key, tensor in tensors.items()}


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, each of which is gathered by itself: the items of the outermost lists of modules."""
    blocks: list[nn.Module] = []

    def find(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) > 1:
                lists = [item for item in child.children() if isinstance(item, nn.ModuleList)]
                blocks.extend(item for item in child.children() if item not in lists)
                for item in lists:
                    find(item)
            else:
                find(child)

    find(model)
    return blocks


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy with parameters on the meta device, which take no memory."""
    meta: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, meta)


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
