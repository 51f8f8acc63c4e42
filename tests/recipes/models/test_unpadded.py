"""Layers that compute no padding: the same outputs and gradients for every kind of model that is said to be able to."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from recipes.models.unpadded import UNPADDED_TYPES, unpad_layers
from runner.exact import ExactDropout
from runner.exact.stream import sample_keys
from runner.kernels.attention import unpadded_attention
from runner.kernels.unpadded import without_padding

ROWS, LENGTH, WIDTH = 3, 11, 32
#: Sizes by all the names that models have for them. Windows are shorter than the longest row.
SIZES = {
    "vocab_size": 97,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "mask_token_id": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("sliding_window", "local_attention"), 4),
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
}


def small(kind: str) -> Any:
    default = AutoConfig.for_model(kind)
    config = AutoConfig.for_model(kind, **{name: size for name, size in SIZES.items() if hasattr(default, name)})
    torch.manual_seed(0)
    known = type(config) in AutoModelForSequenceClassification._model_mapping
    auto = AutoModelForSequenceClassification if known else AutoModelForCausalLM
    return auto.from_config(config).double().eval()


def padded_batch() -> dict[str, Tensor]:
    lengths = torch.tensor([5, LENGTH, 8])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    ids = torch.randint(4, 97, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


def run(model: Any, batch: dict[str, Tensor], padded: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, of all tokens if each has some, and gradients."""
    model.zero_grad()
    with contextlib.nullcontext() if padded else without_padding():
        logits = model(**batch).logits
    if logits.ndim == 3:
        logits = logits[batch["attention_mask"].bool()]
    logits.sin().sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", UNPADDED_TYPES)
def test_the_same_outputs_and_gradients(kind: str) -> None:
    model, batch = small(kind), padded_batch()
    expected, gradients = run(model, batch, padded=True)
    unpad_layers(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    seen: list[tuple[int, ...]] = []
    (layers,) = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 2)
    for product in (module for module in layers.modules() if isinstance(module, (nn.Linear, Conv1D))):
        product.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1]))
    found, own = run(model, batch, padded=False)
    assert set(seen) == {(1, int(batch["attention_mask"].sum()))}
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-7)  # some normalise in fp32
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(own[name], gradient, rtol=1e-6, atol=1e-7), name
    assert "without_padding" not in str(model.config.to_dict())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_other_forward_passes_are_as_ever(kind: str) -> None:
    """Generated texts are those of a model that was not changed, also with padding on the left."""
    batch = {name: tensor.flip(1) for name, tensor in padded_batch().items()}
    texts = []
    for changed in (False, True):
        model = AutoModelForCausalLM.from_config(small(kind).config).eval()
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)  # with the usual small weights texts repeat one token
        if changed:
            unpad_layers(model)
        texts.append(model.generate(**batch, max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)
    assert len(texts[0].unique()) > 3


@pytest.mark.parametrize("rows", ["of different lengths", "of one length"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "modernbert"])
def test_the_same_dropout_sequence_by_sequence(monkeypatch: pytest.MonkeyPatch, kind: str, rows: str) -> None:
    """Exact dropout drops the same weights of attention whether it computes padding or not.

    One of ModernBERT's two layers attends to windows, which is computed with padding.
    """
    model, batch = small(kind).train(), padded_batch()
    for module in model.modules():
        if getattr(module, "attention_dropout", None) == 0.0:  # ModernBERT's
            module.attention_dropout = 0.1
    if rows == "of one length":
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    keys = sample_keys(0, 0, np.arange(ROWS))
    with ExactDropout(keys):
        expected, gradients = run(model, batch, padded=True)
    unpad_layers(model)
    called: list[list[int]] = []

    def watched(*args: Any) -> Tensor:
        called.append(args[3])
        return unpadded_attention(*args)

    monkeypatch.setattr("recipes.models.unpadded.unpadded_attention", watched)
    with ExactDropout(keys):
        found, own = run(model, batch, padded=False)
    assert called == [batch["attention_mask"].sum(1).tolist()] * (1 if kind == "modernbert" else 2)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-7)
    for name, gradient in gradients.items():
        assert torch.allclose(own[name], gradient, rtol=1e-6, atol=1e-7), name


def flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *others: Any, scale: float) -> list[Tensor]:
    """What torch's kernel for GPUs computes: attention within each sequence."""
    starts_of_keys, longest, longest_of_keys, p, causal, _ = others
    assert (starts.dtype, starts.tolist(), longest, p) == (torch.int32, starts_of_keys.tolist(), longest_of_keys, 0)
    lengths = starts.diff().tolist()
    assert max(lengths) <= longest
    outputs = [
        functional.scaled_dot_product_attention(
            *(one.transpose(0, 1) for one in qkv), is_causal=causal, scale=scale, enable_gqa=True
        ).transpose(0, 1)
        for qkv in zip(*(one.split(lengths) for one in (query, key, value)), strict=True)
    ]
    return [torch.cat(outputs)]


def with_flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Mock:
    kernel = Mock(side_effect=flash_on_cpu)
    monkeypatch.setattr("runner.kernels.attention._HAVE_FLASH", ("cpu",))
    monkeypatch.setattr("runner.kernels.attention.can_use_flash_attention", lambda _: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    return kernel


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "modernbert"])
def test_flash_attention_gets_the_sequences(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """As on a GPU, with a stand-in for its kernel. One of ModernBERT's two layers attends to windows, with padding."""
    model, batch = small(kind), padded_batch()
    expected, gradients = run(model, batch, padded=True)
    unpad_layers(model)
    kernel = with_flash_on_cpu(monkeypatch)
    found, own = run(model, batch, padded=False)
    assert kernel.call_count == (1 if kind == "modernbert" else 2)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-7)
    for name, gradient in gradients.items():
        assert torch.allclose(own[name], gradient, rtol=1e-6, atol=1e-7), name


def test_flash_attention_computes_in_the_precision_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's rotary embeddings turn queries and keys into fp32, which the kernel does not take."""
    model, batch = small("llama").float(), padded_batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = run(model, batch, padded=True)
        unpad_layers(model)
        kernel = with_flash_on_cpu(monkeypatch)
        found, _ = run(model, batch, padded=False)
    assert {one.dtype for call in kernel.call_args_list for one in call.args[:3]} == {torch.bfloat16}
    assert torch.allclose(found, expected, rtol=0.05, atol=0.01)


def test_flash_attention_is_not_for_every_size_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 26, as TinyBERT's, are padded by torch's attention for padded batches only."""
    config = small("bert").config
    config.hidden_size, config.num_attention_heads = 52, 2
    model, batch = AutoModelForSequenceClassification.from_config(config).double().eval(), padded_batch()
    expected, _ = run(model, batch, padded=True)
    unpad_layers(model)
    kernel = with_flash_on_cpu(monkeypatch)
    found, _ = run(model, batch, padded=False)
    assert kernel.call_count == 0
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
