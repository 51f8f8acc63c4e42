"""Tokenizers trained on texts: of the model's kind, within its vocabulary, and the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.trained_tokenizer import KINDS, special_ids, trained_tokenizer
from recipes.synthetic.grammar import generate

TEXTS = [row.sentence for row in generate(0, 600, 2)[0]]
#: Run by a process: a digest of everything that the tokenizer is.
DIGEST = """
import hashlib
from benchmarks.peers.trained_tokenizer import trained_tokenizer
from recipes.synthetic.grammar import generate
texts = [row.sentence + " Ünïcode's, déjà-vu 42%!" for row in generate(0, 600, 2)[0]]
for kind in ("gpt2", "bert"):
    made = trained_tokenizer(kind, 700, texts)
    print(hashlib.sha256(made.backend_tokenizer.to_str().encode()).hexdigest())
"""


def test_the_same_in_every_process() -> None:
    """Workers and later runs must get the same ids, with other hash seeds and thread counts."""
    root = Path(__file__).parents[2]
    found = set()
    for number in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": number, "RAYON_NUM_THREADS": number}
        command = [sys.executable, "-c", DIGEST]
        found.add(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    assert len(found) == 1


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.parametrize("vocabulary", [290, 30522])
def test_within_the_models_vocabulary(model_type: str, vocabulary: int) -> None:
    made = trained_tokenizer(model_type, vocabulary, TEXTS)
    assert sorted(made.get_vocab().values()) == list(range(len(made)))
    assert 250 < len(made) <= vocabulary or vocabulary > 290
    assert max(token for row in made(TEXTS)["input_ids"] for token in row) < vocabulary


def test_byte_level() -> None:
    """No text is lost, frequent words are one token, and the end of text is the only special token."""
    made = trained_tokenizer("gpt2", 30522, TEXTS)
    for text in ("Grüße aus 北京 🙂", "a\tb\n\n c  d", "", '\'tis "so"', "\x00\x7f"):
        assert made.decode(made(text)["input_ids"]) == text
    assert len(made.tokenize("the nun slept")) == 3
    assert made.bos_token_id == made.eos_token_id == made.pad_token_id == made.unk_token_id == 0
    assert special_ids("gpt2") == {"bos_token_id": 0, "eos_token_id": 0}
    pair = made("the nun", "slept")
    assert pair["input_ids"] == made("the nun")["input_ids"] + made("slept")["input_ids"]
    assert "token_type_ids" not in pair


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_word_piece(model_type: str) -> None:
    """Lower case, BERT's form of pairs, types for BERT only, and padding with id 0."""
    made = trained_tokenizer(model_type, 30522, TEXTS)
    pair = made("The Nun", "slept")
    assert made.convert_ids_to_tokens(pair["input_ids"]) == ["[CLS]", "the", "nun", "[SEP]", "slept", "[SEP]"]
    assert pair.get("token_type_ids") == ([0, 0, 0, 0, 1, 1] if model_type == "bert" else None)
    assert made.convert_ids_to_tokens(made("京")["input_ids"]) == ["[CLS]", "[UNK]", "[SEP]"]
    assert (made.pad_token_id, special_ids(model_type)) == (0, {"pad_token_id": 0})


@pytest.mark.parametrize(("model_type", "vocabulary"), [("gpt2", 200), ("bert", 6)])
def test_vocabulary_that_is_too_small(model_type: str, vocabulary: int) -> None:
    with pytest.raises(ValueError, match=f"vocabulary of {vocabulary} tokens"):
        trained_tokenizer(model_type, vocabulary, TEXTS)
