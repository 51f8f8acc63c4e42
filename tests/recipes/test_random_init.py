"""`recipe.model.init=random`: the real model's size, drawn weights, and a run that says so."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    RobertaConfig,
)

from recipes.models.pretrained import Pretrained
from recipes.models.published_shapes import SHAPES
from recipes.synthetic.acceptability import GrammarCorpus
from recipes.tasks.classification import SequenceClassification
from runner.config.compose import compose, settings
from runner.config.instantiate import build_recipe
from runner.data.cache import Cache
from runner.data.recipe import Prepared
from runner.errors import Unavailable, UserError
from tests.tiny_models import save_bert

SIZES = {"vocab_size": 400, "hidden_size": 16, "max_position_embeddings": 32}
CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config(vocab_size=400, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1),
    "bert": BertConfig(**SIZES, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16),
    "distilbert": DistilBertConfig(**SIZES, n_layers=1, n_heads=2, hidden_dim=16),
}


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The Hub's cache, which is empty, and the Hub out of reach."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with nothing but a configuration."""
    return configured(tmp_path, request.param)


def configured(root: Path, kind: str) -> Path:
    CONFIGS[kind].save_pretrained(root / kind)
    assert [path.name for path in (root / kind).iterdir()] == ["config.json"]
    return root / kind


def random(name: str | Path) -> Pretrained:
    return Pretrained(str(name), init="random")


def cached(hub: Path, name: str, **files: str) -> None:
    """Put files of a model into the Hub's cache, as its client would."""
    root = hub / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("c0ffee")
    for file, content in files.items():
        path = root / "snapshots" / "c0ffee" / file.replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


# --- what is drawn ------------------------------------------------------------------------------------------

HEADS: dict[str, Callable[[Pretrained], nn.Module]] = {
    "ForSequenceClassification": lambda of: of.build_classifier(3, 300, 0),
    "ForQuestionAnswering": lambda of: of.build_span_model(300, 0),
    "LMHeadModel": lambda of: of.build_language_model(300, 0),
}


@pytest.mark.parametrize(
    ("kind", "head"), [pair for pair in itertools.product(CONFIGS, HEADS) if pair != ("distilbert", "LMHeadModel")]
)
def test_weights_are_drawn_from_the_seed(tmp_path: Path, kind: str, head: str) -> None:
    """Every head that a kind has: equal for equal seeds, other for others, in fp32, with the whole vocabulary."""
    folder = configured(tmp_path, kind)

    def drawn(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return HEADS[head](random(folder))

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert type(first).__name__.endswith(head)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(again), strict=True))
    moved = [
        name for (name, a), b in zip(first.named_parameters(), weights(other), strict=True) if not torch.equal(a, b)
    ]
    assert any("embed" in name or "wte" in name for name in moved)
    assert len(moved) >= 5
    assert {parameter.dtype for parameter in weights(first)} == {torch.float32}
    assert first.get_input_embeddings().num_embeddings == 400  # type: ignore[operator]  # transformers models
    assert first.config.pad_token_id == 0
    if head == "ForSequenceClassification":
        assert first.config.num_labels == 3


def test_weights_in_the_folder_are_not_taken(tmp_path: Path) -> None:
    """A folder with weights gives its configuration and tokenizer, and not the weights; also one in half precision."""
    save_bert(tmp_path / "bert", ["the dog ran"])
    config = tmp_path / "bert" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    saved, drawn = (
        Pretrained(str(tmp_path / "bert"), init).build_classifier(2, 7, 0) for init in ("pretrained", "random")
    )
    key = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(saved.state_dict()[key], drawn.state_dict()[key])
    assert {parameter.dtype for parameter in weights(drawn)} == {torch.float32}
    assert random(tmp_path / "bert").tokenizer_identity() == Pretrained(str(tmp_path / "bert")).tokenizer_identity()
    assert len(random(tmp_path / "bert").notes) == 1


@pytest.mark.parametrize(
    ("name", "build", "parameters"),
    [
        # As published: 124, 110, 340 and 66 million; exact numbers are those of the released weights, with these heads.
        ("gpt2", lambda of: of.build_language_model(50257, 0), 124_439_808),
        ("gpt2", lambda of: of.build_classifier(2, 50257, 0), 124_439_808 + 2 * 768),
        ("bert-base-uncased", lambda of: of.build_classifier(2, 30522, 0), 109_483_778),
        ("bert-large-uncased", lambda of: of.build_span_model(30522, 0), 334_094_338),
        ("distilbert-base-uncased", lambda of: of.build_classifier(2, 30522, 0), 66_955_010),
        ("google-bert/bert-base-uncased", lambda of: of.build_span_model(30522, 0), 108_893_186),
    ],
)
def test_published_sizes(name: str, build: Callable[[Pretrained], nn.Module], parameters: int) -> None:
    """Where the Hub cannot be reached, well-known names have as many parameters as the published models."""
    random(name).check()
    with torch.device("meta"):
        model = build(random(name))
    assert sum(parameter.numel() for parameter in weights(model)) == parameters


def test_shapes_of_the_papers() -> None:
    """Width, depth, heads and inner width of the papers, as transformers reads them."""
    found = {}
    for name in SHAPES:
        config = random(name)._config()
        inner = getattr(config, "intermediate_size", getattr(config, "hidden_dim", None)) or 4 * config.hidden_size
        found[name] = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, inner)
    assert found == {
        "gpt2": (768, 12, 12, 3072),
        "bert-base-uncased": (768, 12, 12, 3072),
        "bert-large-uncased": (1024, 24, 16, 4096),
        "distilbert-base-uncased": (768, 6, 12, 3072),
    }


# --- tokenizer and run --------------------------------------------------------------------------------------


def prepare(name: Path, cache: Path) -> tuple[SequenceClassification, Prepared]:
    recipe = SequenceClassification(GrammarCorpus(0, 200, 20), random(name), max_length=32)
    recipe.check_model()
    return recipe, Prepared.load(recipe.prepare(Cache(cache), recipe.facts(Cache(cache))))


def test_from_the_texts_to_a_loss(folder: Path, tmp_path: Path) -> None:
    """Without tokenizer and weights a recipe prepares, builds, has a loss with gradients, and leaves a model behind."""
    recipe, prepared = prepare(folder, tmp_path / "cache")
    assert prepared.properties["vocabulary"] <= 400
    torch.manual_seed(0)
    model = recipe.build_model(prepared)
    batch = recipe.collate(prepared.train[[0, 1, 2]], prepared)
    loss, count = recipe.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert int(count) == 3
    assert torch.isfinite(loss)
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    recipe.save(model.eval(), prepared, tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.pad_token_id == loaded.config.pad_token_id
    assert tokenizer.eos_token_id == loaded.config.eos_token_id  # GPT-2's configuration said 1
    inputs = tokenizer(GrammarCorpus(0, 200, 20).read().train.texts[:3], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = loaded(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        assert torch.allclose(theirs, recipe.predict(model, batch), atol=1e-5)


def test_made_tokenizers_have_an_identity_of_their_own(hub: Path, tmp_path: Path) -> None:
    """By kind and vocabulary, and never that of a real one, so that no run finds the other's tokens in the cache."""
    folders = [configured(tmp_path, kind) for kind in CONFIGS]
    bigger = tmp_path / "bigger"
    GPT2Config(vocab_size=500, n_embd=16, n_layer=1, n_head=2).save_pretrained(bigger)
    names = [*folders, bigger, "gpt2", "bert-base-uncased"]
    assert len({random(name).tokenizer_identity() for name in names}) == len(names)
    assert random("bert-base-uncased").tokenizer_identity() == random("bert-large-uncased").tokenizer_identity()
    made = random(folders[0]).tokenizer_identity()
    save_bert(tmp_path / "real", ["the dog ran"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folders[0] / name).write_text((tmp_path / "real" / name).read_text())
    assert random(folders[0]).tokenizer_identity() != made


def test_notes(folder: Path, tmp_path: Path) -> None:
    """What is drawn and what is made is said, a sentence each; a pretrained model has nothing to say."""
    drawn = f"weights of {folder} are random (recipe.model.init=random): timing only"
    made = f"no tokenizer of {folder} is here: one made from the training texts"
    assert random(folder).notes == [drawn, made]
    assert list(SequenceClassification(GrammarCorpus(0, 20, 2), random(folder)).notes) == [drawn, made]
    assert Pretrained(str(folder)).notes == []
    small = build_recipe(settings(compose([])).recipe, [])
    assert isinstance(small, SequenceClassification)
    assert list(small.notes) == []


def test_out_of_the_hubs_cache(hub: Path, tmp_path: Path) -> None:
    """A configuration in the cache is taken from there, also an unknown model's, and so is a tokenizer."""
    config = CONFIGS["bert"].to_json_string()
    cached(hub, "owner/tiny", config_json=config)
    random("owner/tiny").check()
    assert random("owner/tiny").longest_input() == 32
    assert len(random("owner/tiny").notes) == 2
    assert (
        random("owner/tiny").tokenizer_identity().startswith("made from the training texts for bert, of at most 400 ")
    )
    assert random("owner/tiny").build_classifier(2, 300, 0).config.hidden_size == 16

    real = save_bert(tmp_path / "real", ["the dog ran"])
    tokenizer = {f"{name}_json": (real / f"{name}.json").read_text() for name in ("tokenizer", "tokenizer_config")}
    cached(hub, "owner/whole", config_json=config, **tokenizer)
    assert len(random("owner/whole").notes) == 1
    assert random("owner/whole").tokenizer_identity() == "owner/whole at c0ffee"
    assert Pretrained("owner/whole").tokenizer_identity() == "owner/whole at c0ffee"


# --- what is known, and what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "init", "positions"),
    [
        ("gpt2", "random", 1024),
        ("openai-community/gpt2", "random", 1024),
        ("bert-large-uncased", "random", 512),
        ("distilbert/distilbert-base-uncased", "random", 512),
        ("gpt2", "pretrained", None),
        ("owner/model", "random", None),
    ],
)
def test_longest_input(name: str, init: str, positions: int | None) -> None:
    """Positions are known of shapes that are, and not of what is not here."""
    assert Pretrained(name, init).longest_input() == positions


def test_configuration_of_a_folder(folder: Path) -> None:
    """A folder's configuration tells its positions; with its weights asked for, it is refused for having none."""
    assert random(folder).longest_input() == 32
    random(folder).check()
    with pytest.raises(UserError, match="is a folder without weights"):
        Pretrained(str(folder)).check()
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"is a folder without a configuration \(config\.json\)"):
        random(folder).check()


@pytest.mark.parametrize("name", ["owner/model", "somebody/gpt2", "gpt3"])
def test_unknown_names(name: str) -> None:
    """A model that is neither in the cache nor well known is unavailable, with the names that are."""
    with pytest.raises(Unavailable) as caught:
        random(name).check()
    message = str(caught.value)
    assert message.startswith(f"recipe.model.name={name} is neither a local folder nor a model")
    assert message.endswith("or one of gpt2, bert-base-uncased, bert-large-uncased, distilbert-base-uncased")


def test_pretrained_models_that_are_not_here() -> None:
    """Weights that cannot be had are unavailable, and a well-known model's message says how to time it without them."""
    with pytest.raises(Unavailable, match=r"recipe\.model\.init=random needs none, for timing"):
        Pretrained("gpt2").check()
    with pytest.raises(Unavailable) as caught:
        Pretrained("owner/model").check()
    assert "init=random" not in str(caught.value)
    with pytest.raises(UserError) as wrong:
        Pretrained("no such name").check()
    assert not isinstance(wrong.value, Unavailable)


def test_no_tokenizer_can_be_made(tmp_path: Path) -> None:
    """Of a type whose tokens nobody here can imitate a tokenizer is needed, and the types without are named."""
    RobertaConfig(vocab_size=400, hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(Unavailable, match=r"can make one for gpt2, bert, distilbert only, not for roberta"):
        random(tmp_path).check()


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_type_without_the_head(tmp_path: Path, init: str) -> None:
    """A head that transformers does not have for a model's type is refused in one sentence, with either init."""
    folder = configured(tmp_path, "distilbert")
    random(folder).build_classifier(2, 300, 0).save_pretrained(folder)  # type: ignore[operator]
    with pytest.raises(UserError) as caught:
        Pretrained(str(folder), init).build_language_model(300, 0)
    assert str(caught.value).startswith(
        f"recipe.model.name={folder} is of a type for which transformers has no model for"
    )
    assert "causal language modelling" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"model_type": "no such type"}', '{"model_type": "bert", "vocab_size": "x"}']
)
def test_broken_configuration(tmp_path: Path, content: str) -> None:
    """A configuration that cannot be read is the user's mistake: one line that names the model."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"^recipe\.model\.name=") as caught:
        random(tmp_path).build_classifier(2, 300, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("init", "near"), [("ramdom", "did you mean 'random'?"), ("zeros", "there are: pretrained, random")]
)
def test_wrong_init(init: str, near: str) -> None:
    """A source of weights that does not exist is refused with the nearest one, or both."""
    with pytest.raises(UserError, match=rf"^recipe\.model\.init={init} is no source of weights") as caught:
        Pretrained("gpt2", init)
    assert near in str(caught.value)


@pytest.mark.parametrize("name", ["cola", "mnli"])
def test_init_is_a_setting(name: str) -> None:
    """`recipe.model.init=random` chooses it; the default loads weights."""
    for overrides, init in ((["recipe.model.init=random"], "random"), ([], "pretrained")):
        built = build_recipe(settings(compose([f"recipe={name}", *overrides])).recipe, [])
        assert isinstance(built, SequenceClassification)
        assert isinstance(built.model, Pretrained)
        assert built.model.init == init
