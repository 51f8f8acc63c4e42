"""Pretrained models and tokenizers from local folders and the Hub's cache, with their weights or random ones."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch import nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    RobertaConfig,
    RobertaModel,
)

from recipes.models.pretrained import Pretrained
from runner.errors import Unavailable, UserError
from tests.recipes.letters import END, save_gpt2
from tests.tiny_models import save_bert

TEXTS = ["the otter lives in the river", "where"]
SIZES = {"vocab_size": 400, "hidden_size": 16, "max_position_embeddings": 32}
CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config(vocab_size=400, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1),
    "bert": BertConfig(**SIZES, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16),
    "distilbert": DistilBertConfig(**SIZES, n_layers=1, n_heads=2, hidden_dim=16),
}


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The Hub's cache, which is empty; the Hub cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), TEXTS)


def configured(root: Path, kind: str) -> Path:
    """A folder with nothing but a configuration."""
    CONFIGS[kind].save_pretrained(root / kind)
    return root / kind


def random(name: str | Path) -> Pretrained:
    return Pretrained(str(name), init="random")


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


# --- loaded weights -----------------------------------------------------------------------------------------


def test_only_the_head_is_new(bert: Path) -> None:
    """The saved weights in fp32, and a head with as many classes as asked for, drawn from the seed."""

    def built(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Pretrained(str(bert)).build_model("SequenceClassification", 9, 2, num_labels=3)

    first, again, other = built(1), built(1), built(2)
    assert (first.config.num_labels, first.config.pad_token_id) == (3, 2)
    assert {parameter.dtype for parameter in weights(first)} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(again), strict=True))
    differing = sum(not torch.equal(a, b) for a, b in zip(weights(first), weights(other), strict=True))
    assert 0 < differing <= 3  # pooler and classifier


def test_pad_token(tmp_path: Path, bert: Path) -> None:
    """A tokenizer without a pad token pads with its end of text."""
    gpt2 = save_gpt2(tmp_path / "gpt2")
    assert AutoTokenizer.from_pretrained(gpt2).pad_token_id is None
    assert Pretrained(str(gpt2)).tokenizer([]).pad_token_id == END
    assert Pretrained(str(bert)).tokenizer([]).pad_token == "[PAD]"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda f: None, True),
        (lambda f: (f / "model.safetensors").write_bytes(b"other weights"), True),
        (lambda f: (f / "tokenizer.json").write_text((f / "tokenizer.json").read_text().replace("otter", "x")), False),
        (lambda f: (f / "tokenizer_config.json").write_text('{"model_max_length": 5}'), False),
        (lambda f: (f / "vocab.txt").write_text("the"), False),
        (lambda f: (f / "spiece.model").write_bytes(b"x"), False),
    ],
)
def test_tokenizer_identity(bert: Path, tmp_path: Path, change: Callable[[Path], Any], same: bool) -> None:
    """It changes with every file that defines the tokenizer, and not with the place or the weights."""
    copy = Path(shutil.copytree(bert, tmp_path / "copy"))
    change(copy)
    assert (Pretrained(str(copy)).tokenizer_identity() == Pretrained(str(bert)).tokenizer_identity()) is same


# --- models that cannot be used -----------------------------------------------------------------------------


def reconfigure(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_damaged_weights_are_found_without_loading_them(bert: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bert, tmp_path / "copy"))
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"^recipe\.model\.name=.* model\.safetensors is damaged"):
        Pretrained(str(copy)).check()


def test_missing_shard(bert: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bert, tmp_path / "copy"))
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(UserError, match="model-00002-of-00002"):
        Pretrained(str(copy)).check()


def test_weights_of_another_shape_are_named_when_loaded(bert: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bert, tmp_path / "copy"))
    reconfigure(copy, max_position_embeddings=24)
    with pytest.raises(UserError, match=r"position_embeddings.* \[\d+, 16\], not \[24, 16\]"):
        Pretrained(str(copy)).build_model("SequenceClassification", 9, 0, num_labels=2)


def test_head_for_other_classes(bert: Path, tmp_path: Path) -> None:
    Pretrained(str(bert)).build_model("SequenceClassification", 9, 0, num_labels=3).save_pretrained(tmp_path)  # type: ignore[operator]
    Pretrained(str(bert)).check_head("SequenceClassification", 2)  # no head yet
    Pretrained(str(tmp_path)).check_head("SequenceClassification", 3)
    random(tmp_path).check_head("SequenceClassification", 2)  # no weights are loaded
    with pytest.raises(UserError, match=r"recipe\.model\.name=.* 3 classes"):
        Pretrained(str(tmp_path)).check_head("SequenceClassification", 2)


# --- what a configuration says ------------------------------------------------------------------------------


def test_positions_after_padding(tmp_path: Path) -> None:
    """RoBERTa has two positions less than its configuration says: one token more cannot be run."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    RobertaModel(RobertaConfig(vocab_size=20, max_position_embeddings=34, **sizes)).save_pretrained(tmp_path)
    longest = Pretrained(str(tmp_path)).longest_input()
    assert longest == 32
    model = AutoModel.from_pretrained(tmp_path)
    model(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))


def test_positions_and_direction(bert: Path, tmp_path: Path) -> None:
    assert Pretrained(str(bert)).longest_input() == 128
    with pytest.raises(UserError, match="causal model"):
        Pretrained(str(bert)).check_head("CausalLM")
    random(configured(tmp_path, "gpt2")).check_head("CausalLM")
    absent = Pretrained("someone/model")
    absent.check_head("CausalLM")
    assert absent.longest_input() is None


# --- random weights -----------------------------------------------------------------------------------------

HEADS: dict[str, Callable[[Pretrained], nn.Module]] = {
    "ForSequenceClassification": lambda of: of.build_model("SequenceClassification", 300, 0, num_labels=3),
    "ForQuestionAnswering": lambda of: of.build_model("QuestionAnswering", 300, 0),
    "LMHeadModel": lambda of: of.build_model("CausalLM", 300, 0),
}


@pytest.mark.parametrize("head", HEADS)
def test_weights_are_drawn_from_the_seed(tmp_path: Path, head: str) -> None:
    folder = configured(tmp_path, "bert")

    def drawn(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return HEADS[head](random(folder))

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert type(first).__name__.endswith(head)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(again), strict=True))
    assert sum(not torch.equal(a, b) for a, b in zip(weights(first), weights(other), strict=True)) >= 5
    assert {parameter.dtype for parameter in weights(first)} == {torch.float32}
    assert first.get_input_embeddings().num_embeddings == 400  # type: ignore[operator]  # transformers models


def test_weights_in_the_folder_are_not_used(tmp_path: Path) -> None:
    """Configuration and tokenizer are the folder's; weights are drawn in fp32, whatever dtype it names."""
    folder = save_bert(tmp_path / "bert", TEXTS)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    saved, drawn = (
        Pretrained(str(folder), init).build_model("SequenceClassification", 9, 0, num_labels=2)
        for init in ("pretrained", "random")
    )
    key = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(saved.state_dict()[key], drawn.state_dict()[key])
    assert {parameter.dtype for parameter in weights(drawn)} == {torch.float32}
    assert random(folder).tokenizer_identity() == Pretrained(str(folder)).tokenizer_identity()
    assert (len(random(folder).notes), len(Pretrained(str(folder)).notes)) == (1, 0)


def test_files_in_the_hubs_cache(hub: Path, bert: Path) -> None:
    def cached(name: str, *files: str) -> None:
        root = hub / f"models--{name.replace('/', '--')}"
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text("c0ffee")
        (root / "snapshots" / "c0ffee").mkdir(parents=True)
        for file in files:
            shutil.copy(bert / file, root / "snapshots" / "c0ffee" / file)

    cached("owner/tiny", "config.json")
    random("owner/tiny").check()
    assert random("owner/tiny").longest_input() == 128
    assert random("owner/tiny").build_model("SequenceClassification", 9, 0, num_labels=2).config.hidden_size == 16
    cached("owner/whole", "config.json", "tokenizer.json", "tokenizer_config.json")
    for init in ("random", "pretrained"):
        assert Pretrained("owner/whole", init).tokenizer_identity() == "owner/whole at c0ffee"


# --- what cannot be used ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "what"),
    [("config.json", "a configuration"), ("model.safetensors", "weights"), ("tokenizer.json", "a tokenizer")],
)
def test_folders_that_lack_something(bert: Path, tmp_path: Path, file: str, what: str) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    (folder / file).unlink()
    for model in (Pretrained(str(folder)), random(folder)):
        needed = model.init == "pretrained" or what != "weights"
        with pytest.raises(UserError, match=f"is a folder without {what}") if needed else contextlib.nullcontext():
            model.check()


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", "no weights"), ("config.json", "{"), ("config.json", '{"model_type": "no such type"}')],
)
def test_broken_models(bert: Path, tmp_path: Path, file: str, content: str) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=r"^recipe\.model\.name=.* cannot be loaded: .*") as caught:
        Pretrained(str(folder)).build_model("SequenceClassification", 9, 0, num_labels=2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "{}"])
def test_broken_tokenizers(bert: Path, tmp_path: Path, content: str) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"^recipe\.model\.name="):
        Pretrained(str(folder)).tokenizer([])


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "~/model", "a/b/c"])
def test_paths_that_do_not_exist(name: str) -> None:
    """They are not looked up on the Hub."""
    with pytest.raises(UserError, match="does not exist") as caught:
        Pretrained(name).check()
    assert not isinstance(caught.value, Unavailable)


def test_names_that_are_not_available() -> None:
    """The error says what a folder must have."""
    for name in ("gpt2", "owner/model", "no such name"):
        for model in (Pretrained(name), random(name)):
            with pytest.raises(Unavailable, match=f"recipe.model.name={name} .*go online") as caught:
                model.check()
            assert ("weights and" in str(caught.value)) is (model.init == "pretrained")


def test_other_mistakes(bert: Path, tmp_path: Path) -> None:
    for settings in ({"name": "  "}, {"name": "gpt2", "init": "ramdom"}):
        with pytest.raises(UserError, match=r"^recipe\.model\."):
            Pretrained(**settings)
    # A vocabulary beyond the model's would be an index error in the middle of training.
    known = json.loads((bert / "config.json").read_text())["vocab_size"]
    with pytest.raises(UserError, match=f"{known + 1} tokens"):
        Pretrained(str(bert)).build_model("QuestionAnswering", known + 1, 0)
    # transformers has no such head.
    with pytest.raises(UserError, match=r"^recipe\.model\.name="):
        random(configured(tmp_path, "distilbert")).build_model("CausalLM", 300, 0)
