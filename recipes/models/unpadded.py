"""`recipe.padding=none`: a transformers model whose layers compute the tokens of a batch, and no padding.

Embeddings and head see the padded batch. A hook before the first layer removes padding and one after the last puts it
back, so linear layers, norms and MLPs in between get one row of all tokens, [1, tokens, width]. Attention is a function
that transformers calls by name. It computes no padding in 16 bits on a GPU, pads to similar lengths with dropout on a
CPU, and to the longest row elsewhere. A forward pass outside of `without_padding`, such as generating text, is not
changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.kernels.attention import AttentionOptions, flash_attention, unpadded_attention
from runner.kernels.unpadded import TokenLayout, layout_of

#: Model types whose layers are one list and whose attention transformers calls by name; a test tries each of them.
UNPADDED_TYPES = (
    *("bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "eurobert", "gemma", "gemma3_text"),
    *("glm", "gpt2", "gpt_neox", "granite", "llama", "ministral", "mistral", "modernbert", "nomic_bert", "olmo"),
    *("olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "roberta", "smollm3", "stablelm", "starcoder2"),
    "xlm-roberta",
)

_NAME = "without_padding"


@dataclass(frozen=True, eq=False)
class _Layout(TokenLayout):
    """What layers get as their attention mask. `mask`: of the padded scores, or None for what needs none."""

    mask: Tensor | None = None


def unpad_layers(model: Any) -> None:
    """Let a transformers model of one of `UNPADDED_TYPES` run its layers without padding."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # transformers takes seconds

    _register()
    model.set_attn_implementation(_NAME)
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    (layers,) = (one for one in lists if all(isinstance(layer, GradientCheckpointingLayer) for layer in one))
    layers[0].register_forward_pre_hook(_remove_padding, with_kwargs=True)
    layers[-1].register_forward_hook(_restore_padding, with_kwargs=True)
    for layer in layers:
        layer.register_forward_pre_hook(_unpad_rotations, with_kwargs=True)


def _layout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Layout | None:
    return next((one for one in (*args, *kwargs.values()) if isinstance(one, _Layout)), None)


def _remove_padding(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layout = _layout(args, kwargs)
    if layout is None:
        return None
    # Not a view of another tensor, unlike with `layout.unpadded`: torch.compile would make a separate program for it.
    tokens = args[0].flatten(0, 1).unsqueeze(0).index_select(1, layout.places)
    return (tokens, *args[1:]), kwargs


def _unpad_rotations(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rotary embeddings come with every call of a layer, as cosines and sines [1 or rows, length, size]."""
    layout, rotations = _layout(args, kwargs), kwargs.get("position_embeddings")
    if layout is None or rotations is None:
        return None
    of_tokens = tuple(layout.unpadded(one.expand(layout.rows, -1, -1)).unsqueeze(0) for one in rotations)
    return args, {**kwargs, "position_embeddings": of_tokens}


def _restore_padding(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    layout = _layout(args, kwargs)
    if layout is None:
        return output
    if isinstance(output, tuple):
        return (layout.padded(output[0][0]), *output[1:])
    return layout.padded(output[0])


def _register() -> None:
    """Make the attention known to transformers, which takes masks and attention from tables of names."""
    from transformers import AttentionInterface, AttentionMaskInterface  # transformers takes seconds
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    def mask(*args: Any, mask_function: Any, attention_mask: Tensor | None = None, **settings: Any) -> Any:
        if attention_mask is None or (layout := layout_of(attention_mask)) is None:
            return sdpa_mask(*args, mask_function=mask_function, attention_mask=attention_mask, **settings)
        if mask_function is causal_mask_function:
            of_scores = None  # padding follows the tokens, and none of them attends to it
        elif mask_function is bidirectional_mask_function:
            of_scores = attention_mask[:, None, None, :]
        else:
            of_scores = sdpa_mask(*args, mask_function=mask_function, attention_mask=attention_mask, **settings)
        return _Layout(layout.places, layout.rows, layout.length, of_scores)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
    ) -> tuple[Tensor, None]:
        """Shapes as transformers wants them: [1, heads, tokens, size] in, [1, tokens, heads, size] out.

        Rows of one length have no padding: [rows, heads, length, size] in, [rows, length, heads, size] out.
        """
        layout = attention_mask if isinstance(attention_mask, _Layout) else None
        mask = attention_mask if layout is None else layout.mask
        is_causal = settings.get("is_causal")
        causal = mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        options = AttentionOptions(settings.get("dropout", 0.0), settings.get("scaling"), causal)
        if _needs_no_mask(query, key, mask, layout):
            if layout is not None:
                output = flash_attention(query, key, value, layout, options)
                if output is not None:
                    return output, None
            if options.p > 0 and query.device.type == "cpu":
                lengths = [query.size(2)] * len(query) if layout is None else layout.lengths
                queries, keys, values = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
                output = unpadded_attention(queries, keys, values, lengths, options)
                return output.unflatten(0, (len(query), -1)), None
        if layout is None:
            return sdpa_attention_forward(module, query, key, value, mask, **settings)
        parts = [layout.padded(one[0].transpose(0, 1)).transpose(1, 2) for one in (query, key, value)]
        output, _ = sdpa_attention_forward(module, *parts, mask, **settings)
        return layout.unpadded(output).unsqueeze(0), None

    AttentionMaskInterface.register(_NAME, mask)
    AttentionInterface.register(_NAME, attention)


def _needs_no_mask(query: Tensor, key: Tensor, mask: Tensor | None, layout: _Layout | None) -> bool:
    """Whether lengths, and whether it is causal, say all that a mask would."""
    # Compiled, it would be another program for every sequence of lengths.
    if torch.compiler.is_compiling():
        return False
    if layout is None:
        return mask is None and query.size(2) == key.size(2)
    return mask is None or mask.size(-2) == 1
