"""Data and models that need no download: sentences of the built-in grammar, and encoders with random weights."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.trained_tokenizer import special_ids, trained_tokenizer
from recipes.synthetic.grammar import Row, generate

_TRAINED, _EVALUATED = 4000, 200
_VOCABULARY = 512


def write_material(folder: Path, tiny: bool) -> None:
    """Write `train.tsv` and `dev.tsv` with CoLA's columns, `squad.json` in SQuAD's format, and `bert/`, BERT-base.

    `tiny`: two layers of 32 dimensions in place of BERT-base's twelve of 768.
    """
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    train, evaluation = generate(0, _TRAINED, _EVALUATED)
    for name, rows in (("train", train), ("dev", evaluation)):
        lines = (f"grammar\t{row.label}\t\t{row.sentence}\n" for row in rows)
        (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "squad.json").write_text(json.dumps(_as_squad(train)), encoding="utf-8")

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    set_seed(0)
    config = BertConfig(vocab_size=_VOCABULARY, **(sizes if tiny else {}), **special_ids("bert"))
    BertForSequenceClassification(config).save_pretrained(folder / "bert")
    texts = [row.sentence for row in train]
    trained_tokenizer("bert", _VOCABULARY, texts).save_pretrained(folder / "bert")


def _as_squad(rows: list[Row]) -> dict[str, object]:
    """Paragraphs of ten sentences, each with a question whose answer is its first word."""
    paragraphs = []
    for first in range(0, len(rows), 10):
        context = ". ".join(row.sentence for row in rows[first : first + 10])
        answer = {"text": context.split()[0], "answer_start": 0}
        question = {"id": str(first), "question": "What is the first word?", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    return {"version": "1.1", "data": [{"title": "grammar", "paragraphs": paragraphs}]}
