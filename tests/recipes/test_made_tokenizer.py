"""Tokenizers made from training texts: of the model's kind, within its vocabulary, and the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipes.synthetic.made_tokenizer import KINDS, made_tokenizer, special_ids

from recipes.synthetic.grammar import generate
from runner.errors import UserError

TEXTS = [row.sentence for row in generate(0, 600, 2)[0]]
#: Written by a process: a digest of everything that the tokenizer is.
DIGEST = """
import hashlib
from recipes.synthetic.grammar import generate
from recipes.synthetic.made_tokenizer import made_tokenizer
texts = [row.sentence + " Ünïcode's, déjà-vu 42%!" for row in generate(0, 600, 2)[0]]
made = made_tokenizer({kind!r}, 700, texts)
print(hashlib.sha256(made.backend_tokenizer.to_str().encode()).hexdigest())
"""


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_the_same_in_every_process(model_type: str) -> None:
    """Three processes, with other hashes and other numbers of threads, make the same tokenizer to the last byte."""
    root = Path(__file__).parents[2]
    found = {
        subprocess.run(
            [sys.executable, "-c", DIGEST.format(kind=model_type)],
            check=True,
            capture_output=True,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
        ).stdout
        for seed, threads in (("1", "1"), ("2", "2"), ("3", "2"))
    }
    assert len(found) == 1


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.parametrize("vocabulary", [290, 400, 30522])
def test_within_the_models_vocabulary(model_type: str, vocabulary: int) -> None:
    """No token has a number that the model has no embedding for, and numbers have no gaps."""
    made = made_tokenizer(model_type, vocabulary, TEXTS)
    numbers = sorted(made.get_vocab().values())
    assert numbers == list(range(len(made)))
    assert len(made) <= vocabulary
    assert max(token for row in made(TEXTS)["input_ids"] for token in row) < vocabulary
    if vocabulary == 290:
        assert len(made) > 250  # it is used, not merely kept to


def test_frequent_words_are_one_token() -> None:
    """With room enough a word that texts repeat is not cut."""
    for model_type in ("gpt2", "bert"):
        made = made_tokenizer(model_type, 30522, ["the nun slept on the book"] * 3)
        assert len(made.tokenize("the nun slept")) == 3


@pytest.mark.parametrize("text", ["Grüße aus 北京 🙂", "a\tb\n\n c  d", "", '\'tis "so"', "\x00\x7f"])
def test_bytes_come_back(text: str) -> None:
    """GPT-2's kind loses nothing: what it cuts comes back as it was, also what no training text had."""
    made = made_tokenizer("gpt2", 600, TEXTS)
    assert made.decode(made(text)["input_ids"]) == text


def test_end_of_text_of_gpt2() -> None:
    """One special token does everything, as GPT-2's does, and single texts and pairs get none of their own."""
    made = made_tokenizer("gpt2", 600, TEXTS)
    assert made.bos_token_id == made.eos_token_id == made.pad_token_id == made.unk_token_id == 0
    assert special_ids("gpt2") == {"bos_token_id": 0, "eos_token_id": 0}
    one, two = made("the nun")["input_ids"], made("slept")["input_ids"]
    assert made("the nun", "slept")["input_ids"] == one + two
    assert "token_type_ids" not in made("the nun", "slept")


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_form_of_bert(model_type: str) -> None:
    """Lower case, BERT's form for texts and pairs, types for BERT only, padding number 0."""
    made = made_tokenizer(model_type, 30522, TEXTS)
    pair: dict[str, Any] = made("The Nun", "slept")
    assert made.convert_ids_to_tokens(pair["input_ids"]) == ["[CLS]", "the", "nun", "[SEP]", "slept", "[SEP]"]
    assert ("token_type_ids" in pair) is (model_type == "bert")
    if model_type == "bert":
        assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    assert made.convert_ids_to_tokens(made("京")["input_ids"]) == ["[CLS]", "[UNK]", "[SEP]"]
    assert made.pad_token_id == 0
    assert special_ids(model_type) == {"pad_token_id": 0}


@pytest.mark.parametrize(("model_type", "vocabulary"), [("gpt2", 200), ("bert", 6)])
def test_vocabulary_that_is_too_small(model_type: str, vocabulary: int) -> None:
    """A model with fewer tokens than the kind needs at least is refused with both numbers."""
    with pytest.raises(UserError, match=rf"vocabulary of {vocabulary} tokens.* needs \d+: give a model's folder"):
        made_tokenizer(model_type, vocabulary, TEXTS)


def test_saved_and_loaded(tmp_path: Path) -> None:
    """What is saved is read by transformers as the same tokenizer."""
    from transformers import AutoTokenizer

    for model_type in KINDS:
        made = made_tokenizer(model_type, 500, TEXTS)
        made.save_pretrained(tmp_path / model_type)
        loaded = AutoTokenizer.from_pretrained(tmp_path / model_type)
        assert dict(loaded(TEXTS[:5], TEXTS[5:10])) == dict(made(TEXTS[:5], TEXTS[5:10]))
