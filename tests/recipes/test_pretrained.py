"""Pretrained models and their tokenizers from local folders, on a tiny GPT-2 and a tiny BERT made here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from recipes.models.pretrained import Pretrained
from recipes.tasks.classification import Corpus, LabelledText, SequenceClassification
from runner.data.cache import Cache
from runner.data.recipe import Prepared
from runner.errors import UserError

WORDS = ["<|endoftext|>", "<unk>", "<pad>", "the", "a", "book", "dog", "nun", "fell", "slept", "ran", "old"]
TEXTS = ["the book fell", "a dog", "the old nun slept", "ran"]


def _save_tokenizer(folder: Path, **special: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special).save_pretrained(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with one layer, saved as a language model, with a tokenizer that has no pad token."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    _save_tokenizer(folder, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with one layer, saved as a masked language model, with a pad token of its own."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        pad_token_id=2,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    _save_tokenizer(folder, pad_token="<pad>")
    return folder


@pytest.fixture(params=["gpt2", "bert"])
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


class Given:
    """A text source with these rows."""

    def read(self) -> Corpus:
        return Corpus(LabelledText(TEXTS, [0, 1, 2, 1]), LabelledText(TEXTS[:2], [1, 0]), "given")


def prepared_recipe(folder: Path, cache: Path) -> tuple[SequenceClassification, Prepared]:
    recipe = SequenceClassification(Given(), Pretrained(str(folder)), max_length=16)
    recipe.check_model()
    return recipe, Prepared.load(recipe.prepare(Cache(cache), recipe.facts(Cache(cache))))


# --- what a model makes of texts ----------------------------------------------------------------------------


def test_tokenizer_gets_a_pad_token(gpt2: Path, bert: Path) -> None:
    """A tokenizer without a pad token pads with its end of text; one that has one keeps it."""
    assert AutoTokenizer.from_pretrained(gpt2).pad_token_id is None
    assert Pretrained(str(gpt2)).tokenizer([]).pad_token_id == 0
    assert Pretrained(str(bert)).tokenizer([]).pad_token_id == 2


def test_padding_does_not_matter(folder: Path, tmp_path: Path) -> None:
    """A sentence's logits are the same alone and beside longer ones, to 1e-5, also when it holds the pad token."""
    recipe, prepared = prepared_recipe(folder, tmp_path)
    torch.manual_seed(1)
    model = recipe.build_model(prepared).eval()
    together = recipe.collate(prepared.train[[0, 1, 2, 3]], prepared)
    assert together["input_ids"].shape == (4, 4)
    with torch.no_grad():
        logits = recipe.predict(model, together)
        for row in range(4):
            alone = recipe.predict(model, recipe.collate(prepared.train[[row]], prepared))
            assert torch.allclose(alone[0], logits[row], atol=1e-5), row
        # Without the mask, and with another pad token, the test would see a difference.
        blind = {**together, "attention_mask": torch.ones_like(together["attention_mask"])}
        assert folder.name.startswith("gpt2") or not torch.allclose(recipe.predict(model, blind), logits, atol=1e-5)
    assert logits.shape == (4, 3)
    assert len({tuple(row) for row in logits.tolist()}) == 4


def test_model_reads_the_last_word(gpt2: Path, tmp_path: Path) -> None:
    """GPT-2 classifies by the state of the last real token: changing the last word of a padded row moves its logits."""
    recipe, prepared = prepared_recipe(gpt2, tmp_path)
    model = recipe.build_model(prepared).eval()
    batch = recipe.collate(prepared.train[[1, 2]], prepared)
    changed = batch["input_ids"].clone()
    assert changed[0].tolist() == [4, 6, 0, 0]
    changed[0, 1] = 7
    with torch.no_grad():
        before, after = recipe.predict(model, batch), recipe.predict(model, {**batch, "input_ids": changed})
    assert not torch.allclose(before[0], after[0], atol=1e-5)
    assert torch.allclose(before[1], after[1], atol=1e-6)


def test_build(folder: Path) -> None:
    """A model comes in fp32 with as many classes as asked for, the saved weights below, and knows its pad token."""
    torch.manual_seed(1)
    first = Pretrained(str(folder)).build_classifier(3, len(WORDS), 2)
    torch.manual_seed(1)
    again = Pretrained(str(folder)).build_classifier(3, len(WORDS), 2)
    torch.manual_seed(2)
    other = Pretrained(str(folder)).build_classifier(3, len(WORDS), 2)
    assert first.config.num_labels == 3
    assert first.config.pad_token_id == 2
    assert {p.dtype for p in first.parameters()} == {torch.float32}
    heads = 0
    for (name, ours), same, others in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(ours, same), name
        heads += not torch.equal(ours, others)
    assert 0 < heads < 3  # only the new head is drawn anew: from the seed, and from nothing else


def test_what_is_saved_can_be_loaded(folder: Path, tmp_path: Path) -> None:
    """What a recipe leaves is read by transformers' own classes, and gives the same logits for the same text."""
    recipe, prepared = prepared_recipe(folder, tmp_path / "cache")
    model = recipe.build_model(prepared).eval()
    recipe.save(model, prepared, tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert tokenizer.pad_token_id == prepared.properties["pad_id"] == loaded.config.pad_token_id
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = loaded(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        ours = recipe.predict(model, recipe.collate(prepared.train[[0, 1, 2, 3]], prepared))
    assert torch.allclose(theirs, ours, atol=1e-6)


def test_saved_model_can_be_trained_on(gpt2: Path, tmp_path: Path) -> None:
    """What a run leaves can be the next run's model."""
    recipe, prepared = prepared_recipe(gpt2, tmp_path / "cache")
    recipe.save(recipe.build_model(prepared), prepared, tmp_path / "model")
    Pretrained(str(tmp_path / "model")).check()
    assert Pretrained(str(tmp_path / "model")).build_classifier(3, len(WORDS), 0).config.num_labels == 3


# --- the tokenizer's identity -------------------------------------------------------------------------------


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda f: None, True),
        (lambda f: (f / "model.safetensors").write_bytes(b"other weights"), True),
        (lambda f: (f / "pytorch_model.bin").write_bytes(b"more weights"), True),
        (lambda f: (f / "tokenizer.json").write_text((f / "tokenizer.json").read_text().replace("nun", "num")), False),
        (lambda f: (f / "tokenizer_config.json").write_text('{"model_max_length": 5}'), False),
        (lambda f: (f / "vocab.txt").write_text("the"), False),
        (lambda f: (f / "merges.txt").write_text("t h"), False),
        (lambda f: (f / "spiece.model").write_bytes(b"x"), False),
        (lambda f: (f / "tokenizer.json").rename(f / "other.json"), False),
    ],
)
def test_tokenizer_identity(gpt2: Path, tmp_path: Path, change: Callable[[Path], Any], same: bool) -> None:
    """The identity changes with any file that a tokenizer is made from, and not with place or weights."""
    changed = copied(gpt2, tmp_path / "changed")
    change(changed)
    ours, theirs = (Pretrained(str(f)).tokenizer_identity() for f in (gpt2, changed))
    assert (ours == theirs) is same


def test_other_weights_find_the_tokenised_data(gpt2: Path, tmp_path: Path) -> None:
    """Two models with the same tokenizer share tokenised data; another tokenizer or length makes its own."""
    twin = copied(gpt2, tmp_path / "twin")
    (twin / "model.safetensors").write_bytes(b"other weights")
    cache = Cache(tmp_path / "cache")
    facts = SequenceClassification(Given(), Pretrained(str(gpt2))).facts(cache)

    def entry(folder: Path, max_length: int = 16) -> Path:
        return SequenceClassification(Given(), Pretrained(str(folder)), max_length).prepare(cache, facts)

    first = entry(gpt2)
    assert entry(twin) == first
    assert entry(gpt2, max_length=2) != first
    tokens = (twin / "tokenizer.json").read_text()
    (twin / "tokenizer.json").write_text(tokens.replace('"nun"', '"num"'))
    assert entry(twin) != first


# --- what cannot be used ------------------------------------------------------------------------------------


def test_text_without_tokens(gpt2: Path, tmp_path: Path) -> None:
    """No model reads an empty row, and a tokenizer that adds no special tokens makes one of an empty text."""

    class Holed:
        def read(self) -> Corpus:
            return Corpus(LabelledText(["a dog", "", "ran"], [0, 1, 1]), LabelledText(["ran"], [1]), "given")

    recipe = SequenceClassification(Holed(), Pretrained(str(gpt2)), max_length=16)
    cache = Cache(tmp_path)
    with pytest.raises(UserError, match="no token, '', row 1 of the train part"):
        recipe.prepare(cache, recipe.facts(cache))


@pytest.mark.parametrize(
    ("remove", "what"),
    [
        (("config.json",), "a configuration (config.json)"),
        (("model.safetensors",), "weights (*.safetensors or pytorch_model*.bin)"),
        (("tokenizer.json",), "a tokenizer (tokenizer.json"),
        (("config.json", "model.safetensors", "tokenizer.json"), "a configuration"),
    ],
)
def test_folder_that_lacks_something(gpt2: Path, tmp_path: Path, remove: tuple[str, ...], what: str) -> None:
    """A folder without configuration, weights or tokenizer is refused before training, by what is missing."""
    folder = copied(gpt2, tmp_path / "model")
    for name in remove:
        (folder / name).unlink()
    with pytest.raises(UserError) as caught:
        Pretrained(str(folder)).check()
    assert str(caught.value).startswith(f"recipe.model.name={folder} is a folder without {what}")


@pytest.mark.parametrize("content", ["[]", "7", "null", "[" * 100_000])
def test_configuration_without_settings(gpt2: Path, tmp_path: Path, content: str) -> None:
    """JSON that is no object, or too deep, is refused by the model's name."""
    folder = copied(gpt2, tmp_path / "model")
    (folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"^recipe\.model\.name=.* has a config\.json that "):
        Pretrained(str(folder)).longest_input()


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "../model", "~/model", "a/b/c"])
def test_path_that_does_not_exist(name: str) -> None:
    """What can only be a path is not looked for on the Hub."""
    with pytest.raises(UserError, match="does not exist") as caught:
        Pretrained(name).check()
    assert str(caught.value).startswith(f"recipe.model.name={name} ")


@pytest.mark.parametrize("name", [None, "", "  ", 5])
def test_no_name(name: Any) -> None:
    """A model without a name is refused by its setting."""
    with pytest.raises(UserError, match=r"^recipe\.model\.name="):
        Pretrained(name)


@pytest.mark.parametrize("name", ["gpt2", "owner/model", "no such name"])
def test_hub_offline(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name of the Hub without the Hub is refused with both ways out: going online, or a local folder."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as caught:
        Pretrained(name).check()
    message = str(caught.value)
    assert message.startswith(f"recipe.model.name={name} is neither a local folder nor a model")
    assert "go online" in message
    assert "give a folder that holds config.json, weights and tokenizer" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b"no weights"),
        ("config.json", b"{"),
        ("config.json", b"{}"),
        ("config.json", b'{"model_type": "no such type"}'),
    ],
)
def test_broken_model(gpt2: Path, tmp_path: Path, file: str, content: bytes) -> None:
    """Broken weights and configurations are the user's mistake: one line that names the model."""
    folder = copied(gpt2, tmp_path / "model")
    (folder / file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        Pretrained(str(folder)).build_classifier(2, len(WORDS), 0)
    assert str(caught.value).startswith(f"recipe.model.name={folder} cannot be loaded: ")
    assert "\n" not in str(caught.value)


def test_model_with_another_number_of_classes(gpt2: Path, tmp_path: Path) -> None:
    """A model already fine-tuned for another number of classes gets a new head, or is refused in one sentence."""
    three = Pretrained(str(gpt2)).build_classifier(3, len(WORDS), 0)
    three.save_pretrained(tmp_path)  # type: ignore[operator]
    try:
        assert Pretrained(str(tmp_path)).build_classifier(2, len(WORDS), 0).config.num_labels == 2
    except UserError as error:
        assert str(error).startswith("recipe.model.name=")  # noqa: PT017


@pytest.mark.parametrize(("file", "content"), [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("config.json", "{")])
def test_broken_tokenizer(gpt2: Path, tmp_path: Path, file: str, content: str) -> None:
    """A tokenizer that cannot be loaded is the user's mistake too."""
    folder = copied(gpt2, tmp_path / "model")
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=r"^recipe\.model\.name="):
        Pretrained(str(folder)).tokenizer([])


def test_tokenizer_with_neither_pad_nor_end(gpt2: Path, tmp_path: Path) -> None:
    """A tokenizer with neither a pad token nor an end of text still pads, or is refused in one sentence."""
    folder = copied(gpt2, tmp_path / "model")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    try:
        assert Pretrained(str(folder)).tokenizer([]).pad_token_id is not None
    except UserError as error:
        assert str(error).startswith("recipe.model.name=")  # noqa: PT017
