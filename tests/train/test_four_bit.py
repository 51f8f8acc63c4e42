"""Weights in 4 bits: the numbers of bitsandbytes and PEFT, in every precision, and which layers have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LongT5Config,
    LongT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

from runner.config.choices import AdapterKind
from runner.config.schema import Adapter
from runner.train.adapter import (
    add_adapter,
    changing_state,
    frozen_digest,
    load_changing_state,
    parameter_count,
    without_adapter,
)
from runner.train.four_bit import Linear4bit
from tests.train.test_adapter import BERT, GPT2

QLORA = Adapter(kind=AdapterKind.qlora, rank=2, alpha=4.0, merge=True)
WIDER = {
    **BERT,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_size": 32,
    "intermediate_size": 48,
}
T5: dict[str, Any] = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2}
TOKENS = torch.arange(12).reshape(2, 6)


def outcome(module: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The module's output, and the gradient of its input."""
    inputs = inputs.clone().requires_grad_()
    output: Tensor = module(inputs)
    output.sin().sum().backward()
    assert inputs.grad is not None
    return output.detach(), inputs.grad


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**WIDER))


def trained(model: nn.Module) -> nn.Module:
    """The model, as if its adapter had been trained: the second of two matrices starts at 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (7, 5)], ids=str)
def test_products_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear = nn.Linear(shape[1], shape[0]).requires_grad_(False)
    own = bitsandbytes.nn.Linear4bit(
        shape[1], shape[0], compute_dtype=dtype, quant_type="nf4", compress_statistics=False
    )
    own.load_state_dict(linear.state_dict())
    inputs = torch.randn(3, 4, shape[1]).to(dtype)
    expected = outcome(own.to("cpu").requires_grad_(False), inputs)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        found = outcome(Linear4bit(linear), inputs)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("layer", [nn.Linear(24, 40), Conv1D(40, 24)], ids=["linear", "transposed"])
def test_products_are_those_of_the_dequantised_layer(layer: nn.Linear | Conv1D) -> None:
    """In fp64, before and after an evaluation."""
    four_bit = Linear4bit(layer.double().requires_grad_(False))
    dequantised = four_bit.dequantised(torch.float64)
    assert type(dequantised) is type(layer)
    error = (dequantised.weight - layer.weight).abs().mean() / layer.weight.abs().mean()
    assert 0.01 < error < 0.15
    inputs = torch.randn(3, 24, dtype=torch.float64)
    expected = outcome(dequantised, inputs)
    for _ in range(2):
        for one, other in zip(outcome(four_bit, inputs), expected, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-14)
        with torch.no_grad():
            four_bit.eval()(inputs)
        four_bit.train()


def test_casts_leave_the_weight_as_it_is() -> None:
    layer = Linear4bit(nn.Linear(24, 40))
    before = layer.dequantised(torch.float32).weight
    assert torch.equal(layer.double().bfloat16().dequantised(torch.float32).weight, before)


def test_the_model_is_that_of_transformers_and_peft(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)  # type: ignore[operator]
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["classifier"])
    in_4_bits = BertForSequenceClassification.from_pretrained(tmp_path, quantization_config=settings)
    lora = LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules="all-linear", modules_to_save=["classifier"]
    )
    theirs, ours = trained(get_peft_model(in_4_bits, lora)), trained(add_adapter(QLORA, bert()))
    gradients = []
    for model in (theirs, ours):
        model(TOKENS).logits.sin().sum().backward()
        gradients.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(one, gradients[1][name]) for name, one in gradients[0].items())


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (bert, {"query", "key", "value", "dense"}),  # not the classifier
        (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), {"c_attn", "c_proj", "c_fc"}),
        (
            lambda: LlamaForCausalLM(LlamaConfig(**BERT, tie_word_embeddings=False)),
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},  # not lm_head
        ),
        (
            lambda: T5ForConditionalGeneration(T5Config(**T5)),
            {"q", "k", "v", "o", "wi"},  # not wo, to whose dtype T5 casts its activations
        ),
        (lambda: LongT5ForConditionalGeneration(LongT5Config(**T5)), {"q", "k", "v", "o", "wi"}),
    ],
    ids=["BERT", "GPT-2", "Llama", "T5", "LongT5"],
)
@pytest.mark.parametrize("targets", [None, ["classifier.dense", "dense", "c_attn", "q_proj", "q"]], ids=["all", "some"])
def test_which_layers_are_in_4_bits(
    build: Callable[[], nn.Module], expected: set[str], targets: list[str] | None
) -> None:
    """All linear layers, whichever the adapter is on."""
    model = build()
    names = [name for name in targets or () if any(one.endswith(f".{name}") for one, _ in model.named_modules())]
    adapted = add_adapter(
        Adapter(kind=AdapterKind.qlora, rank=2, alpha=4.0, merge=True, target_modules=names or None), model
    )
    found = [name.removesuffix(".base_layer") for name, one in adapted.named_modules() if isinstance(one, Linear4bit)]
    assert {name.rpartition(".")[2] for name in found} == expected
    linear = [name for name, one in build().named_modules() if isinstance(one, (nn.Linear, Conv1D))]
    assert len(found) == sum(name.rpartition(".")[2] in expected for name in linear)


@pytest.mark.parametrize("build", [bert, lambda: GPT2LMHeadModel(GPT2Config(**GPT2))], ids=["BERT", "GPT-2"])
def test_merged_is_the_same_function(build: Callable[[], nn.Module]) -> None:
    """As a whole model without 4 bits, whose weights are those that were trained with."""
    model = build()
    names = model.state_dict().keys()
    adapted = trained(add_adapter(QLORA, model).double()).eval()
    before = adapted(TOKENS).logits
    merged = without_adapter(QLORA, adapted)
    assert merged.state_dict().keys() == names
    assert torch.allclose(merged(TOKENS).logits, before, rtol=0, atol=1e-12)


def test_frozen_weights_are_not_part_of_the_state() -> None:
    model, other = (
        add_adapter(QLORA, build()) for build in (bert, lambda: BertForSequenceClassification(BertConfig(**WIDER)))
    )
    state = changing_state(model)
    assert all(".lora_" in name or "modules_to_save" in name for name in state if "position_ids" not in name)
    frozen = frozen_digest(other)
    load_changing_state(other, state)
    assert frozen == frozen_digest(other) != frozen_digest(model)


def test_size() -> None:
    """Parameters are counted as without 4 bits; in memory they are a seventh, with 4 bytes for 64 in each block."""
    whole = add_adapter(Adapter(kind=AdapterKind.lora, rank=2, alpha=4.0, merge=True), bert())
    model: Any = add_adapter(QLORA, bert())
    assert parameter_count(QLORA, model) == sum(one.numel() for one in whole.parameters())
    layer = Linear4bit(nn.Linear(512, 256, bias=False))
    assert sum(one.nbytes for one in layer.parameters()) == 512 * 256 * 4.5 / 8
