"""Sentence pairs through the command line, on nothing but a configuration: tokenizer made, weights drawn."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from recipes.synthetic.grammar import generate
from runner import cli

LABELS = ("entailment", "neutral", "contradiction")


def write_pairs(path: Path, seed: int, count: int) -> None:
    sentences = [row.sentence for row in generate(seed, 2 * count, 2)[0]]
    rows = [
        json.dumps({"sentence1": sentences[2 * i], "sentence2": sentences[2 * i + 1], "gold_label": LABELS[i % 3]})
        for i in range(count)
    ]
    path.write_text("\n".join([*rows, json.dumps({"sentence1": "A.", "sentence2": "B.", "gold_label": "-"})]))


def test_mnli_on_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MultiNLI's own form of files, two workers, batches padded to max_length: every pair is trained on once."""
    write_pairs(tmp_path / "train.jsonl", 0, 45)
    write_pairs(tmp_path / "dev.jsonl", 1, 12)
    BertConfig(
        vocab_size=400, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ).save_pretrained(tmp_path / "shape")
    monkeypatch.chdir(tmp_path)
    data = ["train=train.jsonl", "eval=dev.jsonl", "text_column=sentence1", "pair_column=sentence2"]
    overrides = [
        "recipe=mnli",
        *(f"recipe.data.{setting}" for setting in (*data, "label_column=gold_label")),
        *("recipe.model.name=shape", "recipe.model.init=random", "recipe.padding=max_length", "recipe.max_length=48"),
        *("device=cpu2", "batch.global_batch=20", "epochs=1", "tracking=none"),
    ]
    assert cli.main(overrides, time.time()) == 0
    (folder,) = (tmp_path / "outputs" / "mnli").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples_seen"] == 45
    assert set(summary["eval"]) == {"accuracy", "macro_f1", "loss"}
    assert json.loads((folder / "plan.json").read_text())["optimizer_steps"] == 3
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    pair = tokenizer("The nun slept.", "It ran.", return_tensors="pt")
    assert pair["token_type_ids"].unique().tolist() == [0, 1]
    assert loaded(**pair).logits.shape == (1, 3)
