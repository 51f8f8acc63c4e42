"""Training an adapter: which weights, the same on every split, little on the wire, and the same bits when resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

from runner.config.choices import AdapterKind
from runner.config.schema import Adapter
from runner.errors import UserError
from runner.train.adapter import add_adapter, changing_state, frozen_digest, load_changing_state, without_adapter
from tests.pool import WorkerPool
from tests.replicas import train
from tests.sync.reference import ADAMW, EXACT, SGD, largest_difference
from tests.train.test_resumed import check

LORA = ["adapter=lora", "adapter.rank=2", "adapter.dropout=0.1", "adapter.merge=true"]
QLORA = ["adapter=qlora", *LORA[1:]]
BOTH = pytest.mark.parametrize("adapter", [LORA, QLORA], ids=["lora", "qlora"])
SIZES = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}
BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, **SIZES}
GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, **SIZES}


def lora(**settings: Any) -> Adapter:
    return Adapter(**{"kind": AdapterKind.lora, "rank": 2, "alpha": 4.0, "merge": True, **settings})


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("build", "head"),
    [
        (lambda: BertForQuestionAnswering(BertConfig(**BERT)), {"qa_outputs"}),
        (
            lambda: DistilBertForSequenceClassification(DistilBertConfig(dim=8, n_layers=1, n_heads=2, hidden_dim=8)),
            {"pre_classifier", "classifier"},  # PEFT by itself leaves out the first, random and frozen
        ),
        (lambda: GPT2ForSequenceClassification(GPT2Config(**GPT2)), {"score"}),
        (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), set()),
        (lambda: LlamaForCausalLM(LlamaConfig(**BERT)), set()),
    ],
    ids=["questions", "two layers in the head", "GPT-2", "tied head", "Llama"],
)
def test_trained_are_the_matrices_and_the_head(build: Callable[[], nn.Module], head: set[str]) -> None:
    model = add_adapter(lora(), build())
    rest = [name for name in trained_names(model) if ".lora_" not in name]
    assert {name.split(".modules_to_save")[0].rpartition(".")[2] for name in rest} == head
    assert all("modules_to_save" in name for name in rest)
    assert len(trained_names(model)) > len(rest)


def test_chosen_layers() -> None:
    model = add_adapter(lora(target_modules=["query"]), BertForQuestionAnswering(BertConfig(**BERT)))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained_names(model) if ".lora_" in name} == {
        "query"
    }


def test_new_layers_are_trained_too() -> None:
    """Frozen, they would be random, and other ones wherever the adapter is loaded."""
    model: Any = BertForSequenceClassification(BertConfig(**BERT))
    model.new_weights = ["bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.weight"]
    rest = [name for name in trained_names(add_adapter(lora(), model)) if ".lora_" not in name]
    assert {name.split(".modules_to_save")[0].rpartition("model.")[2] for name in rest} == {
        "bert.pooler.dense",
        "classifier",
    }
    assert not [name for name in trained_names(model) if "pooler.dense.lora" in name]


def test_merged_is_the_same_function() -> None:
    model = BertForQuestionAnswering(BertConfig(**BERT)).double().eval()
    names = model.state_dict().keys()
    tokens = torch.arange(12).reshape(2, 6)
    before = model(tokens).start_logits
    adapted = add_adapter(lora(), model).double().eval()
    assert torch.equal(adapted(tokens).start_logits, before)  # one of the two matrices starts at 0
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    after = adapted(tokens).start_logits
    assert (after - before).abs().max() > 1e-3
    merged = without_adapter(lora(), adapted)
    assert merged.state_dict().keys() == names
    assert torch.allclose(merged(tokens).start_logits, after, rtol=0, atol=1e-12)


def test_frozen_weights_are_not_part_of_the_state() -> None:
    model, other = (add_adapter(lora(), BertForQuestionAnswering(BertConfig(**BERT))) for _ in range(2))
    state = changing_state(model)
    assert set(trained_names(model)) <= state.keys()
    assert sum(tensor.numel() for tensor in state.values()) < sum(p.numel() for p in model.parameters()) / 2
    frozen = frozen_digest(other)
    load_changing_state(other, state)
    assert all(torch.equal(tensor, changing_state(other)[name]) for name, tensor in state.items())
    assert frozen == frozen_digest(other) != frozen_digest(model)
    assert frozen_digest(nn.Linear(2, 2)) is None


def test_wrong_settings() -> None:
    with pytest.raises(UserError, match=r"adapter=lora .*Linear"):
        add_adapter(lora(), nn.Linear(2, 2))
    convolutions = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic")
    with pytest.raises(UserError, match=r"adapter=lora .*ResNetForImageClassification"):
        add_adapter(lora(), ResNetForImageClassification(convolutions))
    with pytest.raises(UserError, match=r"adapter\.merge=false"):
        add_adapter(lora(merge=False), BertForQuestionAnswering(BertConfig(**BERT)))
    for names in (["qkv"], ["query", "qkv"], ["uery"], ["classifier"]):
        with pytest.raises(UserError, match=rf"adapter\.target_modules=.*'{names[-1]}'.*query, key, value, dense$"):
            add_adapter(lora(target_modules=names), BertForSequenceClassification(BertConfig(**BERT)))


@BOTH
@pytest.mark.parametrize(
    "split", [(2, []), (3, ["accumulation.steps=2"])], ids=["2 workers", "3 workers, accumulation"]
)
def test_every_split_ends_alike(pool: WorkerPool, split: tuple[int, list[str]], adapter: list[str]) -> None:
    workers, accumulation = split
    one = pool.run(1, train, [*SGD, *EXACT, *adapter])[0]
    other = pool.run(workers, train, [*SGD, *EXACT, *adapter, *accumulation])[0]
    assert largest_difference(one["weights"], other["weights"]) < 1e-12
    assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-11)
    assert one["ledger"] == other["ledger"]


@BOTH
def test_only_the_adapter_is_sent(pool: WorkerPool, adapter: list[str]) -> None:
    """Each all-reduce has the trained weights, and two sums; and the frozen weights of all workers stay."""
    start = pool.run(1, train, [*SGD, *adapter, "max_steps=1", "optimizer.lr=1e-30"])[0]["weights"]
    ends = pool.run(2, train, [*SGD, *adapter, "sync.k=5"])
    for end in ends:
        moved = {name for name, tensor in end["weights"].items() if not torch.equal(tensor, start[name])}
        assert moved
        assert all(".lora_" in name or "modules_to_save" in name for name in moved)
    trained = sum(ends[0]["weights"][name].nbytes for name in moved)
    stats = ends[0]["stats"]
    assert stats.synchronisations == 2
    assert trained <= stats.bytes / stats.synchronisations < 1.5 * trained


@BOTH
@pytest.mark.parametrize("sync", [["sync.k=1"], ["sync.k=3"]], ids="".join)
def test_a_resumed_run_ends_with_the_same_bits(pool: WorkerPool, sync: list[str], adapter: list[str]) -> None:
    check(pool, [*ADAMW, *adapter, *sync, "precision=fp32", "evaluation.keep_best=true"])
