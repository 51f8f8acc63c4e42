"""Follow the gradients of a step: what each backward pass adds, and what the optimizer uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.tools.audit.records import BackwardPass, Batch, GradientCheck, StepGradients

#: The loss of one batch as the model's own, of transformers' models.
Loss = Callable[[nn.Module, Any], Tensor]

#: Steps whose gradients are followed, besides the one that is checked: two show what a step leaves to the next.
_STEPS = 3
#: Elements of each gradient that are recorded: sums, averages and clipping by norm act on all alike, and all processes
#: send theirs to all.
_ELEMENTS = 16


class GradientRecorder:
    """Elements of the gradients of the parameters that the optimizer trains, in some of its steps."""

    def __init__(self, parameters: Sequence[nn.Parameter], gradient_step: int | None) -> None:
        self._parameters, self._gradient_step = parameters, gradient_step
        self.recorded: list[StepGradients] = []
        self._passes: list[tuple[list[Tensor], list[Tensor]]] = []
        self._step = 1

    @property
    def follows(self) -> bool:
        """Return whether the gradients of this step are recorded."""
        return bool(self._parameters) and (self._step <= _STEPS or self._step == self._gradient_step)

    def begin_pass(self) -> None:
        """Note what is held before a backward pass accumulates gradients."""
        if self.follows:
            held = self._parts([one.grad for one in self._parameters])
            self._passes.append((held, list(held)))

    def accumulated(self, number: int) -> None:
        """Note the gradient of a parameter when the backward pass has added to it, before processes average it."""
        gradient = self._parameters[number].grad
        if self._passes and gradient is not None:
            self._passes[-1][1][number] = _elements(gradient)

    def held(self) -> Tensor:
        """Elements of the accumulated gradients."""
        return torch.cat(self._parts([one.grad for one in self._parameters]))

    def cleared(self, exactly: bool) -> bool:
        """Return whether no gradients are accumulated. `exactly`: look for zeros, too, which waits for the device."""
        if all(one.grad is None for one in self._parameters):
            return bool(self._parameters)
        return (exactly or self.follows) and not self.held().any()

    def forget(self) -> None:
        """Drop the backward passes of this step, whose gradients were cleared."""
        self._passes = []

    def end_step(self, used: Tensor | None) -> None:
        """`used`: elements of the gradients that the optimizer used, None if they are not known."""
        if used is not None and self._passes:
            passes = tuple(BackwardPass(torch.cat(held), torch.cat(after)) for held, after in self._passes)
            finite = all(one.isfinite().all() for one in (used, *(each.after for each in passes)))
            if finite:  # a GradScaler skips others
                self.recorded.append(StepGradients(self._step, passes, used))
        self._passes = []
        self._step += 1

    def _parts(self, gradients: Iterable[Tensor | None]) -> list[Tensor]:
        pairs = zip(gradients, self._parameters, strict=True)
        return [_elements(one).zero_() if gradient is None else _elements(gradient) for gradient, one in pairs]

    def check(
        self,
        model: nn.Module,
        loss: Loss,
        own: Sequence[Batch],
        everyone: Sequence[int],
        batch_of: Callable[[Sequence[int]], Any],
    ) -> GradientCheck:
        """Compute the gradient of the samples `everyone` in one batch, and of the last of `own` batches.

        `batch_of`: makes a collated batch of sample ids. Random streams and buffers are left as they were.
        """
        device = self._parameters[0].device
        single = [_on(device, batch_of(ids)) for _, ids in own]
        whole = _on(device, batch_of(everyone))
        # Seeds 1 and 2: equal without dropout.
        results = self._computed(model, loss, [(1, whole), (2, whole), (1, single[-1])])
        counts = [{"samples": len(ids), **_labels(batch)} for (_, ids), batch in zip(own, single, strict=True)]
        names = sorted(counts[0], key=lambda name: "'label" not in name)  # if several fit, it is the labels
        common = {name: [one[name] for one in counts] for name in names if all(name in one for one in counts)}
        return GradientCheck(self._step, results[0], results[1], results[2], common)

    def _computed(self, model: nn.Module, loss: Loss, batches: Iterable[tuple[int, Any]]) -> list[Tensor]:
        """The gradients of batches on the device, each with its seed."""
        buffers = {name: one.detach().clone() for name, one in model.named_buffers()}
        results = []
        try:
            with torch.random.fork_rng(), torch.enable_grad():
                for seed, batch in batches:
                    torch.manual_seed(seed)
                    value = loss(model, batch)
                    parts = self._parts(torch.autograd.grad(value, self._parameters, allow_unused=True))
                    results.append(torch.cat(parts))
        finally:
            for name, one in model.named_buffers():
                one.data.copy_(buffers[name])
        return results


def _elements(tensor: Tensor) -> Tensor:
    """Evenly spaced elements, [at most `_ELEMENTS`], in fp64 on the CPU."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    flat = dense.reshape(-1)
    return flat[:: -(-flat.numel() // _ELEMENTS) or 1].double().cpu().clone()


def _labels(batch: Any) -> dict[str, int]:
    """Counts of a batch that a loss may be averaged over: labels, also without the first of each row, and tokens."""
    named = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, (list, tuple)) else ()
    )
    counts = {}
    for name, one in named:
        if not isinstance(one, Tensor) or one.is_floating_point() or one.dim() == 0:
            continue
        if "mask" in str(name) or one.dtype == torch.bool:
            counts[f"unmasked elements of {name!r}"] = int(one.sum())
        else:
            counts[f"labels in {name!r}"] = int((one != -100).sum())
            if one.dim() > 1:
                counts[f"labels in {name!r} after the first"] = int((one[:, 1:] != -100).sum())
    return counts


def _on(device: torch.device, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: _on(device, one) for name, one in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_on(device, one) for one in batch)
    return batch.to(device) if isinstance(batch, Tensor) else copy.copy(batch)
