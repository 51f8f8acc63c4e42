"""Sequence to sequence: batches, loss and generated texts of T5 and BART, and training on several workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MBartConfig, MBartForConditionalGeneration

from recipes.models.pretrained import Pretrained
from recipes.sources.text_pairs import TextPairFiles
from recipes.tasks.generation import text_metrics
from recipes.tasks.seq2seq import SequenceToSequence
from runner.data.cache import Cache
from runner.data.recipe import Prepared, label_counts, without_targets
from runner.errors import UserError
from runner.exact import check_model
from tests.pool import WorkerPool
from tests.recipes.letters import save_gpt2
from tests.recipes.writers import pair_tokenizer, pairs, save_bart, save_t5, write_rows
from tests.replicas import train_recipe
from tests.sync.reference import largest_difference

SAVE: dict[str, Any] = {"t5": save_t5, "bart": save_bart}
COLUMNS = ("translation.en", "translation.de")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of translations, and models with and without dropout."""
    root = tmp_path_factory.mktemp("seq2seq")
    for name, save in SAVE.items():
        save(root / name)
        save(root / f"{name}-dropping", dropout=0.2)
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


@pytest.mark.parametrize("name", SAVE)
def test_loss_and_counts_of_rows(folder: Path, tmp_path: Path, name: str) -> None:
    """`label_count` is what the loss counts, and the loss is transformers' own, in any batch; fillers have none."""
    made = recipe(folder, name)
    data = prepared(made, tmp_path)
    model = made.build_model(data).eval().double()
    together = made.predict(model, made.collate(data.train[list(range(9))], data, 90))
    for row in range(9):
        batch = made.collate(data.train[[row]], data)
        loss_sum, count = made.loss(model, batch)
        assert int(count) == label_counts(data.train)[row]
        assert float(loss_sum.detach()) / int(count) == pytest.approx(
            float(model(batch["input_ids"], labels=batch["labels"]).loss.detach()), rel=1e-10
        )
        assert together[row, :2].tolist() == pytest.approx([float(loss_sum.detach()), int(count)], rel=1e-10)
    loss_sum, count = made.loss(model, without_targets(batch, np.array([True])))
    loss_sum.backward()  # type: ignore[no-untyped-call]
    assert (float(loss_sum.detach()), int(count)) == (0, 0)


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
    changes: list[dict[str, Any]] = [
        {"max_target_length": 1},
        {"max_source_length": 1},
        {"max_source_length": 0},
        {"num_beams": 0},
    ]
    for change in changes:
        ((setting, value),) = change.items()
        with pytest.raises(UserError, match=rf"^recipe\.{setting}={value} is invalid"):
            recipe(folder, **change).facts(Cache(tmp_path))


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
        assert made.predict(model, made.collate(data.eval[rows], data)).equal(together)
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
    """T5's length is unlimited, BART's is not; other models are refused; mBART can have rows without targets."""
    recipe(folder, "t5", max_source_length=5000).check_model()
    for setting in ("max_source_length", "max_target_length"):
        with pytest.raises(UserError, match=rf"^recipe\.{setting}=129 is invalid"):
            recipe(folder, "bart", **{setting: 129}).check_model()
    save_gpt2(tmp_path / "gpt2", positions=200)
    with pytest.raises(UserError, match=r"^recipe\.model\.name=.*/gpt2 is invalid"):
        recipe(tmp_path, "gpt2").check_model()
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    MBartForConditionalGeneration(MBartConfig(vocab_size=400, **sizes, **heads)).save_pretrained(tmp_path / "mbart")
    pair_tokenizer().save_pretrained(tmp_path / "mbart")
    made = dataclasses.replace(recipe(folder), model=Pretrained(str(tmp_path / "mbart")))
    data = prepared(made, tmp_path / "cache")
    batch = without_targets(made.collate(data.train[[0, 1]], data), np.array([True, True]))
    assert int(made.loss(made.build_model(data), batch)[1]) == 0


def test_saved_models_and_sources_alone(folder: Path, tmp_path: Path) -> None:
    """A saved model loads in transformers, and predicts for sources without targets, each once."""
    made = recipe(folder, "bart")
    data = prepared(made, tmp_path / "cache")
    made.save(made.build_model(data), data, tmp_path / "saved")
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved").config.is_encoder_decoder
    write_rows(tmp_path / "mine.jsonl", [{"translation": {"en": "The newt lives."}}, {"translation": {"en": "No."}}])
    alone: Any = made.from_saved(str(tmp_path / "saved"), str(tmp_path / "mine.jsonl")).for_predictions()
    mine = prepared(alone, tmp_path / "cache")
    assert label_counts(mine.eval).tolist() == [0, 0]
    predictions = alone.predict(alone.build_model(mine).eval(), alone.collate(mine.eval[[0, 1]], mine))
    columns = alone.prediction_columns(predictions, mine.eval)
    assert columns["input"] == ["The newt lives.", "No."]
    assert list(columns) == ["input", "generated"]


@pytest.mark.parametrize("name", [*SAVE, *(f"{name}-dropping" for name in SAVE)])
def test_workers(pool: WorkerPool, folder: Path, name: str) -> None:
    """Weights, metrics and ledger are one worker's, with accumulation, filler rows and dropout by sample."""
    overrides = [
        *("recipe=seq2seq", f"recipe.data.train={folder}/train.jsonl", f"recipe.data.eval={folder}/eval.jsonl"),
        *(f"recipe.data.source_column={COLUMNS[0]}", f"recipe.data.target_column={COLUMNS[1]}", "tracking=none"),
        *(f"recipe.model.name={folder}/{name}", "recipe.max_source_length=60", "recipe.max_new_tokens=6"),
        *("batch.global_batch=12", "precision=fp64", "optimizer=sgd", "optimizer.lr=0.01", "device=cpu", "epochs=1"),
        "equivalence=exact",
    ]
    overrides += ["recipe.generate=true"] if name == "t5" else []
    (one,) = pool.run(1, train_recipe, overrides)
    for result in pool.run(2, train_recipe, [*overrides, "accumulation.steps=3"]):
        assert largest_difference(result["weights"], one["weights"]) < 1e-12
        assert result["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
        assert result["ledger"] == one["ledger"]
    if name in SAVE:
        options = [one for one in overrides if one != "equivalence=exact"]
        (again,) = pool.run(1, train_recipe, [*options, "gradient_checkpointing=true"])
        assert largest_difference(again["weights"], one["weights"]) < 1e-12


def test_dropped_layers_are_not_exact(folder: Path, tmp_path: Path) -> None:
    """LayerDrop draws for a whole batch, so that equivalence=exact refuses it by name."""
    save_bart(tmp_path / "model", layerdrop=0.3)
    made = dataclasses.replace(recipe(folder), model=Pretrained(str(tmp_path / "model")))
    data = prepared(made, tmp_path / "cache")
    with pytest.raises(UserError, match=r"^equivalence=exact .* rand draws"):
        check_model(made, data, made.build_model(data), torch.device("cpu"))
