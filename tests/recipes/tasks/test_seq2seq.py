"""Sequence to sequence: batches, loss and generated texts of T5 and BART."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MBartConfig, MBartForConditionalGeneration

from recipes.models.pretrained import Pretrained
from recipes.sources.text_pairs import TextPairFiles
from recipes.tasks.generation import text_metrics
from recipes.tasks.seq2seq import SequenceToSequence
from runner.data.cache import Cache
from runner.data.recipe import Prepared, without_targets
from runner.errors import UserError
from runner.exact import check_model
from tests.recipes.writers import pair_tokenizer, pairs, save_bart, save_t5, write_rows

SAVE: dict[str, Any] = {"t5": save_t5, "bart": save_bart}
COLUMNS = ("translation.en", "translation.de")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of translations, and models."""
    root = tmp_path_factory.mktemp("seq2seq")
    for name, save in SAVE.items():
        save(root / name)
    write_rows(root / "train.jsonl", pairs(40))
    write_rows(root / "eval.jsonl", pairs(12))
    return root


def recipe(folder: Path, model: str = "t5", **settings: Any) -> SequenceToSequence:
    names = {"source_column": COLUMNS[0], "target_column": COLUMNS[1]}
    data = TextPairFiles(str(folder / "train.jsonl"), str(folder / "eval.jsonl"), **names)  # type: ignore[arg-type]
    limits = {"max_source_length": 100, "max_target_length": 30, "max_new_tokens": 12, **settings}
    return SequenceToSequence(data, Pretrained(str(folder / model)), **limits)


def prepared(made: SequenceToSequence, cache: Path) -> Prepared:
    return Prepared.load(made.prepare(Cache(cache), made.facts(Cache(cache))))


def test_encoder_and_decoder_are_padded_separately(folder: Path, tmp_path: Path) -> None:
    """Sources to the given length, targets to their longest, or to the limit where every shape is compiled."""
    made = recipe(folder)
    data = prepared(made, tmp_path)
    targets = max(len(ids) for ids in data.train[[0, 1, 2]]["target_ids"])
    for compiles, width in ((False, targets), (True, 30)):
        batch = made.collate(data.train[[0, 1, 2]], dataclasses.replace(data, compiles=compiles), 80)
        assert (batch["input_ids"].shape, batch["labels"].shape) == ((3, 80), (3, width))
    assert data.train.column("length").tolist()[:3] == batch["attention_mask"].sum(1).tolist()


def test_long_texts_keep_their_end(folder: Path, tmp_path: Path) -> None:
    made = recipe(folder, max_source_length=40, max_target_length=4, source_prefix="say: ")
    data, tokenizer = prepared(made, tmp_path), pair_tokenizer()
    rows = data.train[list(range(40))]
    for name, limit, texts in (
        ("input_ids", 40, [f"say: {row['translation']['en']}" for row in pairs(40)]),
        ("target_ids", 4, [row["translation"]["de"] for row in pairs(40)]),
    ):
        whole = [tokenizer(text)["input_ids"] for text in texts]
        kept = [ids if len(ids) <= limit else [*ids[: limit - 1], tokenizer.eos_token_id] for ids in whole]
        assert [ids.tolist() for ids in rows[name]] == kept
        (report,) = [one for one in data.properties["truncated"] if one["tokens"] == limit]
        assert report["train"] == [sum(len(ids) > limit for ids in whole), 40]
        assert report["train"][0] > 0


@pytest.mark.parametrize(("name", "beams"), [("t5", 1), ("bart", 3)])
def test_generated_texts_do_not_depend_on_the_batch(folder: Path, tmp_path: Path, name: str, beams: int) -> None:
    """Each is what `generate` gives for its source alone; the metrics compare it with the whole target."""
    made = recipe(folder, name, generate=True, num_beams=beams)
    data = prepared(made, tmp_path)
    model: Any = made.build_model(data).eval().double()
    rows = list(range(12))
    with torch.no_grad():
        together = made.predict(model, made.collate(data.eval[rows], data, 100))
    texts = made.prediction_columns(together, data.eval)["generated"]
    for row in (1, 4, 11):
        ids = torch.tensor(data.eval[[row]]["input_ids"][0][None].astype(np.int64))
        alone = model.generate(ids, max_new_tokens=12, do_sample=False, num_beams=beams)[0]
        assert texts[row] == pair_tokenizer().decode(alone, skip_special_tokens=True).strip()
    # What a published model may say about sampling and lengths.
    model.generation_config.update(do_sample=True, temperature=0.3, top_p=0.5, min_length=11, max_length=13)
    with torch.no_grad():
        assert torch.allclose(made.predict(model, made.collate(data.eval[rows], data)), together, rtol=1e-9)
    assert model.generation_config.min_length == 11
    metrics = made.metrics(together, data.eval)
    assert list(metrics) == made.metric_names
    targets = [row["translation"]["de"] for row in pairs(12)]
    assert {name: metrics[name] for name in text_metrics(texts, targets)} == text_metrics(texts, targets)


def test_metrics_of_texts() -> None:
    """In percent; spaces around a text do not matter to an exact match."""
    found = text_metrics(["the cat sat on the mat", "dog"], [" the cat sat on the mat", "a dog"])
    assert found == pytest.approx(
        {"exact_match": 50, "rouge1": 250 / 3, "rouge2": 50, "rougeL": 250 / 3, "bleu": 100 * np.exp(-1 / 7)}, rel=1e-4
    )


def test_models(folder: Path, tmp_path: Path) -> None:
    """T5's length is unlimited; mBART can have rows without targets."""
    recipe(folder, "t5", max_source_length=5000).check_model()
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    MBartForConditionalGeneration(MBartConfig(vocab_size=400, **sizes, **heads)).save_pretrained(tmp_path / "mbart")
    pair_tokenizer().save_pretrained(tmp_path / "mbart")
    made = dataclasses.replace(recipe(folder), model=Pretrained(str(tmp_path / "mbart")))
    data = prepared(made, tmp_path / "cache")
    batch = without_targets(made.collate(data.train[[0, 1]], data), np.array([True, True]))
    assert int(made.loss(made.build_model(data), batch)[1]) == 0


def test_dropped_layers_are_not_exact(folder: Path, tmp_path: Path) -> None:
    """LayerDrop draws for a whole batch, so that equivalence=exact refuses it by name."""
    save_bart(tmp_path / "model", layerdrop=0.3)
    made = dataclasses.replace(recipe(folder), model=Pretrained(str(tmp_path / "model")))
    data = prepared(made, tmp_path / "cache")
    with pytest.raises(UserError, match=r"^equivalence=exact .* rand draws"):
        check_model(made, data, made.build_model(data), torch.device("cpu"))
