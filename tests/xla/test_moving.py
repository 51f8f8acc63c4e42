"""Models that are moved to an XLA device and back."""

from __future__ import annotations

import os

import pytest
import torch
import torch_xla
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from runner.backends.moving import to_device

SMALL_BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PJRT_DEVICE", "CPU")
    monkeypatch.setitem(os.environ, "CPU_NUM_DEVICES", "1")


@pytest.mark.parametrize(
    "model",
    [
        BertForMaskedLM(BertConfig(vocab_size=11, **SMALL_BERT)),
        GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=2, n_positions=8)),
        nn.Linear(2, 2),
    ],
    ids=["bert", "gpt2", "linear"],
)
def test_tied_weights_stay_tied(model: nn.Module) -> None:
    """The same parameters after both moves, under the same names and with the same values."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    there = to_device(model, torch_xla.device())
    assert [name for name, _ in there.named_parameters()] == list(before)
    assert all(p.device.type == "xla" and p.requires_grad for p in there.parameters())
    back = to_device(there, torch.device("cpu"))
    assert [name for name, _ in back.named_parameters()] == list(before)
    assert all(torch.equal(p, before[name]) for name, p in back.named_parameters())
