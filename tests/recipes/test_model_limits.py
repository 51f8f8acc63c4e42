"""What a model's configuration says before the model is loaded: positions, vocabulary, and which way it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, RobertaConfig, RobertaModel

from recipes.models.pretrained import Pretrained
from recipes.sources.plain_text import PlainText
from recipes.tasks.language_model import CausalLanguageModel
from runner.data.cache import Cache
from runner.errors import UserError
from tests.tiny_models import save_bert

TEXTS = ["the otter lives in the river", "where"]


def with_config(folder: Path, **config: Any) -> Pretrained:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return Pretrained(str(folder))


def test_positions_after_padding(tmp_path: Path) -> None:
    """RoBERTa has two positions less than its configuration says: as many tokens as we say run, one more does not."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = RobertaConfig(vocab_size=20, max_position_embeddings=34, pad_token_id=1, **sizes)
    RobertaModel(config).save_pretrained(tmp_path / "roberta")
    longest = Pretrained(str(tmp_path / "roberta")).longest_input()
    assert longest == 32
    model = AutoModel.from_pretrained(tmp_path / "roberta")
    model(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))
    for odd in (None, "x"):  # then it is these models' default
        roberta = with_config(
            tmp_path / f"odd-{odd}", model_type="roberta", max_position_embeddings=34, pad_token_id=odd
        )
        assert roberta.longest_input() == 32
    assert with_config(tmp_path / "bert", model_type="bert", max_position_embeddings=34).longest_input() == 34


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    """A vocabulary beyond the model's would be an index error in the middle of training."""
    model = Pretrained(str(save_bert(tmp_path / "bert", TEXTS)))
    known = json.loads((tmp_path / "bert" / "config.json").read_text())["vocab_size"]
    model.build_span_model(known, 0)
    with pytest.raises(UserError, match=f"a tokenizer of {known + 1} tokens and a model that knows {known}"):
        model.build_span_model(known + 1, 0)


def test_what_fills_gaps_is_refused_before_anything_is_tokenised(tmp_path: Path) -> None:
    """BERT as it comes is no language model, and its configuration says so; as a decoder it is one."""
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 10))
    data = PlainText(train=str(tmp_path / "text.txt"), eval=str(tmp_path / "text.txt"))
    folder = save_bert(tmp_path / "bert", TEXTS)
    recipe = CausalLanguageModel(data, Pretrained(str(folder)), block_size=16)
    with pytest.raises(UserError, match="sees the tokens it is to predict"):
        recipe.facts(Cache(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    recipe.check_model()


def test_nothing_is_known_of_what_is_not_here() -> None:
    """Offline, an unknown name tells neither positions nor direction."""
    absent = Pretrained("someone/model")
    assert absent.longest_input() is None
    assert absent.sees_both_ways() is False
