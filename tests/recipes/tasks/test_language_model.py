"""The causal language model: packing, batches, loss and perplexity by hand, and training on several workers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.models.pretrained import Pretrained
from recipes.tasks.language_model import (
    CausalLanguageModel,
    Documents,
    check_causal,
    packed,
    sees_ahead,
    token_ids,
)
from runner.config.compose import compose, settings
from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Prepared, label_counts, without_targets
from runner.errors import UserError
from runner.plan.experiment import prepare
from runner.plan.order import permutation
from tests.pool import WorkerPool
from tests.recipes.letters import (
    END,
    LETTERS,
    PAD,
    UNKNOWN,
    A,
    Given,
    bracketing,
    gpt2,
    letters,
    perplexity_by_hand,
    prepared,
    save_gpt2,
    uneven_lines,
    word_tokenizer,
)
from tests.recipes.writers import pair_tokenizer
from tests.replicas import train_recipe

B, C, D, E, F = (A + number for number in range(1, 6))
N = IGNORED_LABEL
TRAIN = ["a b c", "d e", "f", "a c e g i b d f h j a b", "j"]

# --- packing --------------------------------------------------------------------------------------------------

#: "a b c", "d e" and "f", each with its end-of-text token.
DOCUMENTS = [[A, B, C, END], [D, E, END], [F, END]]


def cut(documents: Sequence[Sequence[int]], packing: str, block_size: int) -> dict[str, list[Any]]:
    found = packed([np.asarray(document, dtype=np.int32) for document in documents], packing, block_size)
    return {**found, "input_ids": [row.tolist() for row in found["input_ids"]]}


@pytest.mark.parametrize(
    ("block_size", "rows"),
    [
        (4, [[A, B, C, END], [D, E, END, F]]),  # the last END alone would have no target
        (5, [[A, B, C, END, D], [E, END, F, END]]),
        (99, [[A, B, C, END, D, E, END, F, END]]),
    ],
)
def test_blocks(block_size: int, rows: list[list[int]]) -> None:
    lengths = [len(row) for row in rows]
    expected = {"input_ids": rows, "length": lengths, "label_count": [length - 1 for length in lengths]}
    assert cut(DOCUMENTS, "blocks", block_size) == expected


def test_rows_of_documents() -> None:
    """No row has tokens of two documents; documents without a row are not numbered."""
    found = cut([*DOCUMENTS, [END], [B, END]], "documents", 2)
    assert found["input_ids"] == [[A, B], [C, END], [D, E], [F, END], [B, END]]
    assert found["group"] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("packing", ["blocks", "documents"])
@pytest.mark.parametrize("block_size", [2, 7, 16])
def test_no_token_is_lost(packing: str, block_size: int) -> None:
    """Every token occurs once and in order, except last pieces of one token."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 99, size) for size in draw.integers(1, 40, 1000)]
    found = cut(documents, packing, block_size)
    wholes = [np.concatenate(documents)] if packing == "blocks" else documents
    kept = [whole[:-1] if len(whole) % block_size == 1 else whole for whole in wholes]
    assert [token for row in found["input_ids"] for token in row] == np.concatenate(kept).tolist()
    assert max(found["length"]) == block_size


def test_documents_end_with_the_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """`eos`, or `sep` without one, and not twice; texts beyond the model's positions cause no warning."""

    def ids(tokenizer: Any, *texts: str) -> list[list[int]]:
        return [one.tolist() for one in token_ids(tokenizer, texts)]

    eos = {"eos_token": "<|endoftext|>"}
    assert ids(word_tokenizer(LETTERS, **eos), "a b", "z") == [[A, B, END], [UNKNOWN, END]]
    assert ids(word_tokenizer(LETTERS, sep_token="<pad>"), "a b") == [[A, B, PAD]]
    assert ids(bracketing(word_tokenizer(LETTERS, **eos)), "a b") == [[PAD, A, B, END]]
    with pytest.raises(UserError, match="set eos_token"):
        ids(word_tokenizer(LETTERS), "a")
    warnings: list[str] = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", warnings.append)
    texts = [f"a {' '.join('b' * (number % 9))}" for number in range(2500)]
    expected = [[A, *[B] * (number % 9), END] for number in range(2500)]
    assert ids(word_tokenizer(LETTERS, **eos, model_max_length=4), *texts) == expected
    assert warnings == []


# --- data -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["blocks", "documents"])
def recipe(request: pytest.FixtureRequest) -> CausalLanguageModel:
    return letters(TRAIN, ["b c d", "e"], block_size=8, packing=request.param)


@pytest.fixture
def data(recipe: CausalLanguageModel, tmp_path: Path) -> Prepared:
    return prepared(recipe, tmp_path / "cache")


def test_facts(tmp_path: Path) -> None:
    """Rows, and for `documents` their documents; workers find what the facts have tokenised, without the data."""
    facts = letters(TRAIN[:3], ["b c d", "e"]).facts(Cache(tmp_path / "blocks"))
    assert (facts.train_samples, facts.eval_samples, facts.unit, facts.groups) == (2, 2, "blocks", None)
    assert facts.digest == Documents(TRAIN[:3], ["b c d", "e"], "elsewhere").digest
    made, cache = letters(TRAIN, ["b c d", "e"], packing="documents"), Cache(tmp_path / "documents")
    facts = made.facts(cache)
    assert (facts.train_samples, facts.eval_samples, facts.unit) == (4 + 3, 2, "rows")
    assert (facts.groups, facts.train_groups, facts.eval_groups) == ("documents", 5, 2)
    entry = dataclasses.replace(made, data=Given([])).prepare(cache, facts)
    assert [entry] == list((tmp_path / "documents").iterdir())
    with pytest.raises(UserError, match="changed after the run was planned"):
        dataclasses.replace(made, data=Given(["x"])).prepare(Cache(tmp_path / "other"), facts)


def test_what_makes_another_entry(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    made = [letters(["a b", "c d e f"]), letters(["c d e f", "a b"]), letters(["a b", "c d e f"], block_size=5)]
    made += [letters(["a b", "c d e f"], packing="documents"), letters(["a b", "c d e f"], made="other")]
    assert len({one.prepare(cache, one.facts(cache)) for one in [*made, *made]}) == len(made)


def test_collate(tmp_path: Path) -> None:
    """Rows are padded on the right; every token but the first is a target, the end of text included."""
    made = letters(TRAIN, block_size=8, packing="documents")
    found = prepared(made, tmp_path)
    for length, more in ((None, 0), (6, 2)):
        batch = made.collate(found.train[[2, 0]], found, length)
        assert batch["input_ids"].tolist() == [[F, END, PAD, PAD, *[PAD] * more], [A, B, C, END, *[PAD] * more]]
        assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, *[0] * more], [1, 1, 1, 1, *[0] * more]]
        assert batch["labels"].tolist() == [[N, END, N, N, *[N] * more], [N, B, C, END, *[N] * more]]


def test_a_pad_token_in_the_text_is_text(tmp_path: Path) -> None:
    """GPT-2 pads with its end of text; the one that ends a document is seen and predicted."""
    made = CausalLanguageModel(Given(["a b", "c d e"]), Pretrained(str(save_gpt2(tmp_path / "m"))), 8, "documents")
    found = prepared(made, tmp_path / "cache")
    batch = made.collate(found.train[[0, 1]], found)
    assert batch["input_ids"].tolist() == [[A, B, END, END], [C, D, E, END]]
    assert batch["labels"].tolist()[0] == [N, B, END, N]
    assert batch["attention_mask"].tolist()[0] == [1, 1, 1, 0]


# --- loss and perplexity --------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """A model with these logits, [rows, length, vocabulary]."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.logits)


# Logits (0, ln 3) give the two tokens the probabilities 1/4 and 3/4.
LN4, LN4_3 = math.log(4), math.log(4 / 3)


@pytest.mark.parametrize(
    ("labels", "losses", "counts"),
    [
        ([[N, 1, 0], [N, 0, 0]], [LN4_3 + LN4, 2 * LN4], [2, 2]),
        ([[1, 1, N], [0, 0, 1]], [LN4_3, LN4 + LN4_3], [1, 2]),  # the first token is no target, labelled or not
        ([[N, N, N], [N, N, 0]], [0.0, LN4], [0, 1]),
        ([[N, N, N], [N, N, N]], [0.0, 0.0], [0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loss_and_predictions_by_hand(
    labels: list[list[int]], losses: list[float], counts: list[int], dtype: torch.dtype
) -> None:
    """The sum over targets and their number, at least in fp32; predictions are the same per row, in fp64."""
    model = Fixed(torch.tensor([0.0, math.log(3)]).repeat(2, 3, 1).to(dtype))
    ids = torch.zeros((2, 3), dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": torch.tensor(labels)}
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-6
    loss_sum, count = letters(TRAIN).loss(model, batch)
    assert loss_sum.item() == pytest.approx(sum(losses), rel=tolerance)
    assert int(count) == sum(counts)
    assert loss_sum.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    predictions = letters(TRAIN).predict(model, batch)
    assert predictions.dtype is torch.float64
    assert predictions[:, 0].tolist() == pytest.approx(losses, rel=tolerance)
    assert predictions[:, 1].tolist() == counts


def test_counts_and_losses_of_rows(recipe: CausalLanguageModel, data: Prepared) -> None:
    """`label_count` is what the loss counts, and the loss is transformers' own; filler rows have none."""
    model = recipe.build_model(data).eval()
    for row in range(len(data.train)):
        batch = recipe.collate(data.train[[row]], data)
        loss_sum, count = recipe.loss(model, batch)
        assert int(count) == label_counts(data.train)[row] == data.train.column("length")[row] - 1
        assert float(loss_sum.detach()) / int(count) == pytest.approx(float(model(**batch).loss.detach()), rel=1e-5)
    batch = without_targets(recipe.collate(data.train[[0, 0]], data, 16), np.array([True, True]))
    loss_sum, count = recipe.loss(model, batch)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    assert (float(loss_sum.detach()), int(count)) == (0.0, 0)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_perplexity_by_hand(recipe: CausalLanguageModel, data: Prepared) -> None:
    """Over all targets and not over rows, however rows are batched and padded: token by token in fp64."""
    predictions = torch.tensor([[1.0, 1], [3 * math.log(6) - 1, 2], [0, 0]], dtype=torch.float64)
    assert recipe.metrics(predictions, data.eval) == pytest.approx({"perplexity": 6.0, "loss": math.log(6)}, rel=1e-12)
    torch.manual_seed(0)
    model = recipe.build_model(data).eval().double()
    expected = perplexity_by_hand(model, data.train)
    rows = list(range(len(data.train)))
    for size, length in ((1, None), (2, 11), (len(rows), None)):
        batches = [recipe.collate(data.train[rows[i : i + size]], data, length) for i in range(0, len(rows), size)]
        with torch.no_grad():
            found = torch.cat([recipe.predict(model, batch) for batch in batches])
        assert recipe.metrics(found, data.train)["perplexity"] == pytest.approx(expected, rel=1e-10)
        by_row = recipe.row_metrics(found, data.train)
        assert float(by_row["perplexity"].mean()) == pytest.approx(expected, rel=1e-10)
        groups = data.train.groups()
        assert len(by_row["loss"]) == (len(rows) if groups is None else len(set(groups)))
    assert expected > 5


# --- models and settings --------------------------------------------------------------------------------------


def test_bidirectional_models(tmp_path: Path) -> None:
    """They are refused: before tokenising if the configuration says so, otherwise when they are built."""
    made = letters(TRAIN, causal=False)
    with pytest.raises(UserError, match=r"recipe\.model is a BertLMHeadModel"):
        made.build_model(prepared(made, tmp_path))
    model = gpt2(13).train()
    assert not sees_ahead(model)
    assert model.training
    (tmp_path / "bert").mkdir()
    config = {"model_type": "bert", "is_decoder": False, "max_position_embeddings": 8}
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config))
    pair_tokenizer().save_pretrained(str(tmp_path / "bert"))
    bert = Pretrained(str(tmp_path / "bert"), "random")
    assert bert.is_bidirectional()
    with pytest.raises(UserError, match="use a causal model"):  # not that it has too few positions
        check_causal(bert, "recipe.max_length", 16)


def test_saved_models_can_be_loaded(tmp_path: Path) -> None:
    made = CausalLanguageModel(Given(TRAIN), Pretrained(str(save_gpt2(tmp_path / "model"))), 8, "documents")
    found = prepared(made, tmp_path / "cache")
    model = made.build_model(found).eval()
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)  # as training would
        made.save(model, found, tmp_path / "saved")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        batch = made.collate(found.train[[0, 3]], found)
        assert torch.allclose(made.predict(loaded, batch), made.predict(model, batch), rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("a b c")["input_ids"] == [A, B, C]


def test_model_and_settings(tmp_path: Path) -> None:
    """Dropout and notes are the model's; wrong settings are refused before anything is tokenised."""
    assert (letters(TRAIN).has_dropout, letters(TRAIN, has_dropout=True).has_dropout) == (False, True)
    assert list(letters(TRAIN).notes) == ["a note"]
    changes: list[dict[str, Any]] = [{"block_size": 1}, {"block_size": 33}, {"packing": "block"}]
    for change in changes:
        ((name, value),) = change.items()
        with pytest.raises(UserError, match=rf"^recipe\.{name}={value} is invalid"):
            letters(TRAIN, **change).facts(Cache(tmp_path))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"recipe\.data\.eval has no row of two tokens"):
        letters(TRAIN, [""]).facts(Cache(tmp_path))


# --- runs -----------------------------------------------------------------------------------------------------

GLOBAL_BATCH = 12


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A hundred lines of 2 to 61 tokens, and a tiny model."""
    folder = tmp_path_factory.mktemp("uneven")
    for part, count, seed in (("train", 100, 1), ("eval", 10, 2)):
        (folder / f"{part}.txt").write_text("\n".join(uneven_lines(count, seed)))
    return [
        *("recipe=causal_lm", f"recipe.data.train={folder}/train.txt", f"recipe.data.eval={folder}/eval.txt"),
        *(f"recipe.model.name={save_gpt2(folder / 'model')}", "recipe.packing=documents", "recipe.block_size=32"),
        *(f"batch.global_batch={GLOBAL_BATCH}", "batch.length_sorted=false", "precision=fp64", "optimizer=sgd"),
        *("optimizer.lr=0.05", "optimizer.clip_norm=null", "schedule=constant", "scaling=none", "tracking=none"),
        *("epochs=2", "device=cpu"),
    ]


def test_workers_with_uneven_token_counts(pool: WorkerPool, uneven: list[str]) -> None:
    """With k = 1 weights and metrics are one worker's to 1e-12, though workers have very different target counts."""
    (one,) = pool.run(1, train_recipe, uneven)
    for result in pool.run(2, train_recipe, [*uneven, "accumulation.steps=3"]):
        for name, tensor in result["weights"].items():
            assert float((tensor - one["weights"][name]).abs().max()) < 1e-12, name
        assert result["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
    experiment = prepare(settings(compose(uneven)))
    made = experiment.recipe
    found = Prepared.load(made.prepare(Cache(experiment.config.cache_dir), experiment.facts))
    assert len(one["losses"]) == experiment.plan.optimizer_steps > 10
    order = permutation(len(found.train), experiment.config.seed, 0)
    counts = label_counts(found.train)
    shares = [order[i : i + GLOBAL_BATCH] for i in range(0, len(order), GLOBAL_BATCH)]
    ratios = [float(counts[ids[0::2]].sum() / counts[ids[1::2]].sum()) for ids in shares]
    assert max(*ratios, *(1 / ratio for ratio in ratios)) > 2
    # The first loss is the mean over the first global batch's targets, the perplexity that of the final weights.
    model = made.build_model(found).double().eval()
    loss_sum, count = made.loss(model, made.collate(found.train[order[:GLOBAL_BATCH].tolist()], found))
    assert one["losses"][0] == pytest.approx(float(loss_sum.detach()) / int(count), rel=1e-10)
    model.load_state_dict(one["weights"])
    assert one["metrics"]["perplexity"] == pytest.approx(perplexity_by_hand(model, found.eval), rel=1e-9)
