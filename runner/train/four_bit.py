"""Linear layers whose frozen weights are kept in 4 bits: NF4 (Dettmers et al. 2023, "QLoRA"), by bitsandbytes.

Imported only with `adapter=qlora`, since bitsandbytes is optional.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from runner.errors import UserError

_TYPE, _BLOCK = "nf4", 64
#: Layers to whose weight's dtype T5, LongT5 and Switch cast their activations.
_DTYPE_IS_READ = ("wo",)


class Linear4bit(nn.Module):
    """A frozen linear layer whose weight takes 4.5 bits per element: NF4, and a scale in fp32 for each block of 64.

    A product dequantises the whole weight, the backward pass does it again, so that only one layer's is in memory.

    bitsandbytes' own layer is not used. In fp64 it returns memory that nothing has written, it rounds the bias to the
    precision of its first input, and on CPUs with AVX-512 BF16 it repacks the weight for the first evaluation, after
    which its products have no gradient.
    """

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        self.transposed = isinstance(linear, Conv1D)
        if self.transposed:
            weight = weight.T.contiguous()
        self.out_features, self.in_features = map(int, weight.shape)
        quantised, state = quantize_4bit(weight, blocksize=_BLOCK, quant_type=_TYPE)
        self.weight = nn.Parameter(quantised.flatten(), requires_grad=False)
        # The bits of the scales as integers, which neither `double()` nor FSDP2's `param_dtype` changes.
        self.scales = nn.Parameter(state.absmax.view(torch.int32), requires_grad=False)
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of autocast, or else of the inputs."""
        if not inputs.is_floating_point():  # it was cast to the dtype that a weight is stored in
            raise UserError("adapter=qlora is invalid: this model reads the dtype of its weights; use adapter=lora")
        device = inputs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        product: Tensor = _Product.apply(inputs.to(dtype), self.weight, self.scales, self.bias, self._shape)
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def dequantised(self, dtype: torch.dtype) -> nn.Linear | Conv1D:
        """The layer as it was before, with the weight that products have used."""
        weight = _dequantised(self.weight, self.scales, self._shape, dtype)
        with torch.device("meta"):
            linear = (
                Conv1D(*self._shape) if self.transposed else nn.Linear(self.in_features, self.out_features, bias=False)
            )
        linear.weight = nn.Parameter(weight.T.contiguous() if self.transposed else weight, requires_grad=False)
        linear.bias = self.bias
        return linear


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, shape: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.shape = shape  # type: ignore[attr-defined]
        return functional.linear(inputs, _dequantised(weight, scales, shape, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight, scales = ctx.saved_tensors
        return gradient @ _dequantised(weight, scales, ctx.shape, gradient.dtype), None, None, None, None


def _dequantised(weight: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    known = torch.float32 if dtype is torch.float64 else dtype  # bitsandbytes has no fp64
    state = QuantState(scales.view(torch.float32), shape, dtype=known, blocksize=_BLOCK, quant_type=_TYPE)
    return dequantize_4bit(weight, state).to(dtype)


def quantise(model: nn.Module) -> None:
    """Keep the frozen linear layers of a model with a PEFT adapter in 4 bits, but for the head and the output layer."""
    base: Any = model.get_base_model()  # type: ignore[operator]
    kept, output = [*(base._keep_in_fp32_modules or ()), *_DTYPE_IS_READ], base.get_output_embeddings()
    for parent, name, layer, path in _linear_layers(base):
        if output not in (parent, layer) and should_convert_module(path, kept):
            setattr(parent, name, Linear4bit(layer))


def dequantise(model: nn.Module) -> None:
    """Undo `quantise`, with the weights that 4 bits have left."""
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear4bit):
                setattr(parent, name, layer.dequantised(dtype))


def _linear_layers(parent: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D, str]]:
    """Linear layers of the base model, and not of the adapter or the head: parent, name in it, layer, and path."""
    for name, child in list(parent.named_children()):
        path = f"{prefix}{name}"
        if isinstance(child, (nn.Linear, Conv1D)):
            yield parent, name, child, path
        elif isinstance(child, BaseTunerLayer):
            yield child, "base_layer", child.get_base_layer(), path
        elif not isinstance(child, AuxiliaryTrainingWrapper):
            yield from _linear_layers(child, f"{path}.")


def uncounted(model: nn.Module) -> int:
    """Parameters of the model that `Module.parameters` does not count: two elements in 4 bits are one of a tensor."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear4bit)]
    return sum(one.out_features * one.in_features - one.weight.numel() - one.scales.numel() for one in layers)
