"""Check before training whether a model's loss and gradient are independent of how a batch is split."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from runner.data.recipe import Prepared, Recipe, label_counts
from runner.exact.dropout import ExactDropout, not_exact
from runner.exact.stream import sample_keys

#: Relative tolerance between the gradient of a batch and the sum of its samples' gradients. Rounding gives 1e-6 in fp32
#: and 1e-3 in tf32; wrong masks give 1% to 50%.
_TOLERANCE, _TOLERANCE_TF32 = 1e-4, 1e-2


def check_model(recipe: Recipe, prepared: Prepared, model: nn.Module, device: torch.device) -> list[str]:
    """Compare the gradient of three samples as one batch with the sum over single samples. Raises UserError.

    Returns the names of buffers that a forward pass changes.

    Dropout is on. This finds other randomness, recomputed activations, and samples that influence each other. Weights,
    buffers and modes of the model are restored, and it has no gradients afterwards.
    """
    ids = _three_rows(prepared)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        loss = sum(_backward(recipe, prepared, model, ids[i : i + 1], device, 1.0) for i in range(len(ids)))
        size = _norm(model)
        # With the opposite sign, so that the accumulated gradients are the difference.
        difference = loss - _backward(recipe, prepared, model, ids, device, -1.0)
        _compare("gradients", _norm(model), size)
        _compare("loss", abs(difference), abs(loss))
        return [name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])]
    finally:
        model.zero_grad(set_to_none=True)
        for module, training in modes:
            module.training = training
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _three_rows(prepared: Prepared) -> np.ndarray:
    """Rows with a loss and of different lengths, so that they need padding."""
    counts = label_counts(prepared.train)
    with_loss = np.flatnonzero(counts) if counts.any() else np.arange(len(counts))
    lengths = np.asarray(prepared.train.column("length"))[with_loss]
    by_length = with_loss[np.argsort(lengths, kind="stable")]
    return np.unique(by_length[[0, len(by_length) // 2, -1]])


def _backward(
    recipe: Recipe, prepared: Prepared, model: nn.Module, ids: np.ndarray, device: torch.device, sign: float
) -> float:
    """Accumulate `sign` times the gradient of these rows' loss sum, and return the loss sum.

    Every row is used twice, since batch normalisation fails on a single row.
    """
    rows = np.concatenate([ids, ids])
    before = _generators()
    batch = recipe.collate(prepared.train[rows.tolist()], prepared)
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    with _RandomnessCheck(sample_keys(0, 0, rows).to(device)):
        loss, _ = recipe.loss(model, on_device)
    if loss.requires_grad:
        (sign * loss).backward()
    if _generators() != before:
        raise not_exact("the recipe or the model draws from a global random generator")
    return float(loss.detach())


def _norm(model: nn.Module) -> float:
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return float(torch.stack([g.square().sum().cpu() for g in gradients]).sum().sqrt()) if gradients else 0.0


def _compare(what: str, difference: float, size: float) -> None:
    tolerance = _TOLERANCE_TF32 if torch.backends.cuda.matmul.allow_tf32 else _TOLERANCE
    if not difference <= tolerance * size:
        raise not_exact(
            f"the {what} of a batch and of its single samples differ by {difference:.2g} (norm {size:.2g}); typical "
            "causes are batch normalisation, unmasked padding and recomputed activations"
        )


class _RandomnessCheck(ExactDropout):
    """Also raises for every function that draws random numbers itself, and names it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _generators()
        result = super().__torch_function__(func, types, args, kwargs)
        if _generators() != before:
            name = getattr(func, "__name__", str(func))
            raise not_exact(f"{name} draws from a global random generator")
        return result


def _generators() -> list[Any]:
    """The states of all global generators, in a form that `==` compares."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy_state: Any = np.random.get_state()
    return [
        random.getstate(),
        (numpy_state[1].tobytes(), numpy_state[2:]),
        *(state.numpy().tobytes() for state in (torch.get_rng_state(), *cuda)),
    ]
