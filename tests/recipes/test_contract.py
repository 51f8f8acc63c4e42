"""What every recipe promises, on small files and models: rows, loss, batches, metrics, saved models and workers."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from runner.config.instantiate import build_recipe
from runner.data.cache import Cache
from runner.data.recipe import Batch, DataFacts, Prepared, label_counts, without_targets
from runner.errors import UserError
from tests.configured import configured
from tests.pool import WorkerPool
from tests.recipes import labelled, pictures, writers, zoo
from tests.recipes.letters import save_gpt2, uneven_lines
from tests.replicas import train_recipe
from tests.sync.reference import largest_difference
from tests.tiny_models import save_bert

#: Training rows of most cases: 37 in batches of 12 leave a single one, so that a second worker has a filler row.
TRAIN, EVAL = 37, 12


def write_cases(folder: Path) -> dict[str, list[str]]:
    """Files and models with dropout, where they have some; the overrides of each case."""
    found = labelled.write(folder, TRAIN, EVAL, dropout=0.1)
    zoo.write(folder, 10, 6)
    save_bert(folder / "zoo", zoo.texts())
    save_gpt2(folder / "gpt2", positions=64)
    writers.save_llama(folder / "llama", dropout=0.2)
    writers.save_t5(folder / "t5", dropout=0.2)
    writers.save_bart(folder / "bart", dropout=0.2)
    pictures.save_vit(folder / "vit", dropout=0.1)
    pictures.save_convnext(folder / "convnext")
    for part, count in (("train", TRAIN), ("eval", EVAL)):
        (folder / f"lines-{part}.txt").write_text("\n".join(uneven_lines(count, count)))
        writers.write_rows(folder / f"chats-{part}.jsonl", writers.chats(count, turns=3))
        writers.write_rows(folder / f"texts-{part}.jsonl", writers.pairs(count))
        writers.write_rows(folder / f"preferences-{part}.jsonl", writers.preferences(count))
        writers.write_rows(folder / f"preferred-chats-{part}.jsonl", writers.preferred_chats(count))
        pictures.write_folder(folder / f"pictures-{part}", count, first=len(part) * 100)

    def of(recipe: str, files: str, model: str, *more: str) -> list[str]:
        data = [f"recipe.data.{part}={folder / files.format(part)}" for part in ("train", "eval")]
        return [f"recipe={recipe}", *data, f"recipe.model.name={folder / model}", *(f"recipe.{one}" for one in more)]

    columns = ("data.source_column=translation.en", "data.target_column=translation.de")
    generating = ("generate=true", "max_new_tokens=6")
    return {
        **found,
        "squad": of("squad", "zoo-{}.json", "zoo", "max_length=48", "doc_stride=8", "max_query_length=12"),
        "blocks": of("causal_lm", "lines-{}.txt", "gpt2", "block_size=16"),
        "documents": of("causal_lm", "lines-{}.txt", "gpt2", "block_size=32", "packing=documents"),
        "chat": of("chat", "chats-{}.jsonl", "llama", "max_length=120", *generating),
        "t5": of("seq2seq", "texts-{}.jsonl", "t5", "max_source_length=60", *columns, *generating),
        "bart": of("seq2seq", "texts-{}.jsonl", "bart", "max_source_length=60", *columns),
        "preference": of("preference", "preferences-{}.jsonl", "llama", "max_length=60"),
        "ipo": of("preference", "preferred-chats-{}.jsonl", "llama", "max_length=120", "objective=ipo"),
        "reward": of("reward", "preferred-chats-{}.jsonl", "llama", "max_length=120"),
        "vit": of("image_classification", "pictures-{}", "vit"),
        "convnext": of("image_classification", "pictures-{}", "convnext"),
        "acceptability": [
            *("recipe=acceptability", "recipe.data.train_samples=37", "recipe.data.eval_samples=12"),
            *("recipe.model.hidden_size=16", "recipe.model.feed_forward_size=16", "recipe.model.layers=1"),
        ],
        "linear": ["recipe=linear"],
    }


CASES = (
    *("text_classification", "multi_label", "text_regression", "token_classification", "squad", "blocks", "documents"),
    *("chat", "t5", "bart", "preference", "ipo", "reward", "vit", "convnext", "acceptability", "linear"),
)
#: Recipes of transformers models on files.
ON_FILES = tuple(name for name in CASES if name not in ("acceptability", "linear"))


@dataclass(frozen=True)
class Case:
    """A recipe with its data tokenised, and its model in fp64 without dropout."""

    name: str
    overrides: list[str]
    recipe: Any
    cache: Cache
    facts: DataFacts
    data: Prepared
    model: nn.Module

    def batch(self, rows: Sequence[int], length: int | None = None, part: str = "train") -> Batch:
        batch: Batch = self.recipe.collate(getattr(self.data, part)[list(rows)], self.data, length)
        return batch

    def predictions(self, size: int, length: int | None = None) -> Tensor:
        """Of the evaluation set, in batches of this size."""
        rows = range(len(self.data.eval))
        batches = [self.batch(rows[start : start + size], length, "eval") for start in rows[::size]]
        with torch.no_grad():
            return torch.cat([self.recipe.predict(self.model, batch) for batch in batches])


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return write_cases(tmp_path_factory.mktemp("cases"))


def recipe_of(overrides: Sequence[str]) -> Any:
    return build_recipe(configured(overrides).recipe, [])


@pytest.fixture(scope="module")
def made(overrides: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """The cases that were used so far."""
    return {}


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest,
    made: dict[str, Case],
    overrides: dict[str, list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    name: str = request.param
    if name not in made:
        recipe, cache = recipe_of(overrides[name]), Cache(tmp_path_factory.mktemp("cache"))
        recipe.check_model()
        facts = recipe.facts(cache)
        data = Prepared.load(recipe.prepare(cache, facts))
        torch.manual_seed(0)
        model = recipe.build_model(data).double().eval()
        with torch.no_grad():
            for weight, values in model.named_parameters():
                values.mul_(1 if "norm" in weight.lower() or "ln_" in weight else 3)  # so that every input shows
        made[name] = Case(name, overrides[name], recipe, cache, facts, data, model)
    return made[name]


on_files = pytest.mark.parametrize("case", ON_FILES, indirect=True)


def gradients(case: Case, batches: Sequence[Batch]) -> tuple[float, int, Tensor]:
    """Loss, count and gradient, added up over micro-batches."""
    case.model.zero_grad()
    total, counted = 0.0, 0
    for batch in batches:
        loss_sum, count = case.recipe.loss(case.model, batch)
        loss_sum.backward()
        total, counted = total + float(loss_sum.detach()), counted + int(count)
    found = [one.grad.flatten() for one in case.model.parameters() if one.grad is not None]
    return total, counted, torch.cat(found)


# --- rows and batches -----------------------------------------------------------------------------------------


def test_rows(case: Case) -> None:
    """As many as were planned, with their numbers, lengths and groups."""
    tables = (case.data.train, case.data.eval)
    assert tuple(map(len, tables)) == (case.facts.train_samples, case.facts.eval_samples)
    for table, groups in zip(tables, (case.facts.train_groups, case.facts.eval_groups), strict=True):
        rows = table[list(range(len(table)))]
        assert list(rows["row"]) == list(range(len(table)))
        if "input_ids" in rows:
            assert [len(ids) for ids in rows["input_ids"]] == list(rows["length"])
        if groups is not None:
            assert sorted(set(rows["group"])) == list(range(groups))


def test_padding(case: Case) -> None:
    """Every tensor has a row for each sample; tokens come first, and the mask is of the tokens."""
    longest = int(case.data.train.column("length")[:5].max())
    for length in (None, longest + 9):
        batch = case.batch(range(5), length)
        assert {len(tensor) for tensor in batch.values()} == {5}
        if "input_ids" in batch:
            mask, ids = batch["attention_mask"], case.data.train[list(range(5))]["input_ids"]
            assert batch["input_ids"].shape == (5, length or longest)
            assert [row[: len(own)].tolist() for row, own in zip(batch["input_ids"], ids, strict=True)] == [
                own.tolist() for own in ids
            ]
            assert torch.equal(mask, (torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)).long())
            assert mask.sum(1).tolist() == case.data.train.column("length")[:5].tolist()


def test_the_loss_is_a_sum_over_rows(case: Case) -> None:
    """The same sum, count and gradient for every split into micro-batches and padding; counts are the table's."""
    rows = list(range(7))
    expected, count, gradient = gradients(case, [case.batch(rows)])
    assert count == label_counts(case.data.train)[rows].sum() > 0
    longest = int(case.data.train.column("length")[rows].max())
    for split in ([[row] for row in rows], [[6, 0, 3], [5, 4, 2, 1]]):
        assert [int(case.recipe.loss(case.model, case.batch(part))[1]) for part in split] == [
            label_counts(case.data.train)[part].sum() for part in split
        ]
        for length in (None, longest + 5):
            total, counted, found = gradients(case, [case.batch(part, length) for part in split])
            assert (total, counted) == (pytest.approx(expected, rel=1e-10), count)
            assert torch.allclose(found, gradient, rtol=1e-8, atol=1e-10 * float(gradient.abs().max()))


@pytest.mark.parametrize("case", ["text_classification", "token_classification", "blocks", "t5", "vit"], indirect=True)
def test_smoothed_labels_are_those_of_transformers(case: Case) -> None:
    """In training, up to their fp32; evaluations do not change."""
    recipe, batch = dataclasses.replace(case.recipe, label_smoothing=0.1), case.batch(range(7))
    with torch.no_grad():
        loss_sum, count = recipe.loss(case.model, batch)
        plain = case.recipe.loss(case.model, batch)[0]
        mean = LabelSmoother(epsilon=0.1)(case.model(**batch), batch["labels"], shift_labels=case.name == "blocks")
    assert float(loss_sum) == pytest.approx(float(mean * count), rel=1e-6)
    assert float(loss_sum) != pytest.approx(float(plain), rel=1e-3)
    assert torch.equal(recipe.predict(case.model, batch), case.recipe.predict(case.model, batch))


def test_fillers_count_nowhere(case: Case) -> None:
    batch, filler = case.batch([0, 1, 2]), np.array([False, True, False])
    expected, count, gradient = gradients(case, [case.batch([0, 2])])
    total, counted, found = gradients(case, [without_targets(batch, filler)])
    assert (total, counted) == (pytest.approx(expected, rel=1e-10), count)
    assert torch.allclose(found, gradient, rtol=1e-8, atol=1e-10 * float(gradient.abs().max()))
    total, counted, found = gradients(case, [without_targets(batch, np.full(3, True))])
    assert (total, counted, bool(found.any())) == (0.0, 0, False)


def test_the_loss_is_that_of_transformers(case: Case) -> None:
    """Sum ÷ count is the mean that the model computes by itself, with its own targets."""
    if case.name in ("squad", "linear", "preference", "ipo", "reward"):
        pytest.skip("transformers counts padding, or has no such model or loss")
    batch = case.batch(range(6))
    loss_sum, count = case.recipe.loss(case.model, batch)
    labels = batch["labels"].double() if case.name in ("multi_label", "text_regression") else batch["labels"]
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = {name: tensor for name, tensor in batch.items() if name in names}
    if "pixel_values" in batch:
        inputs["pixel_values"] = batch["pixel_values"].double()
    own = case.model(**inputs, labels=labels).loss
    assert float((loss_sum / count).detach()) == pytest.approx(float(own.detach()), rel=1e-5)  # some in fp32


def test_reduced_precision(case: Case) -> None:
    """Losses and predictions of a model in 16 bits are computed in fp32 at least, from the same logits."""
    model, batch = copy.deepcopy(case.model).bfloat16(), case.batch(range(3), part="eval")
    with torch.no_grad():
        loss_sum, predictions = case.recipe.loss(model, batch)[0], case.recipe.predict(model, batch)
        expected = case.recipe.loss(case.model, batch)[0]
    if case.name != "linear":  # whose outputs are added up as they are
        assert {loss_sum.dtype, predictions.dtype} <= {torch.float32, torch.float64}
    assert float(loss_sum) == pytest.approx(float(expected), rel=0.3)


@pytest.mark.parametrize("case", ["text_classification", "squad"], indirect=True)
def test_token_types_of_pairs(case: Case) -> None:
    """0 for the first text, 1 for the second, 0 for padding; they reach the model."""
    batch = case.batch(range(4), 60, part="eval")
    for types, mask in zip(batch["token_type_ids"].tolist(), batch["attention_mask"], strict=True):
        second = sum(types)
        first = int(mask.sum()) - second
        assert types == [0] * first + [1] * second + [0] * (60 - first - second)
        assert first > 1 < second
    without = {name: tensor for name, tensor in batch.items() if name != "token_type_ids"}
    with torch.no_grad():
        assert not torch.equal(case.recipe.predict(case.model, batch), case.recipe.predict(case.model, without))


# --- evaluation -----------------------------------------------------------------------------------------------


def test_metrics_do_not_depend_on_batches(case: Case) -> None:
    expected = case.predictions(len(case.data.eval))
    metrics = case.recipe.metrics(expected, case.data.eval)
    assert set(metrics) == set(case.recipe.metrics_of(case.facts))
    assert set(case.recipe.minimised) <= set(metrics)
    for size, length in ((1, None), (5, int(case.data.eval.column("length").max()) + 3)):
        found = case.predictions(size, length)
        if case.name != "token_classification":  # which also predicts tags of padding, and does not use them
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
        again = case.recipe.metrics(found, case.data.eval)
        if "spearman" in again:  # rounding decides the order of equal texts
            again["spearman"] = metrics["spearman"]
        assert again == pytest.approx(metrics, rel=1e-9)
    assert not torch.equal(expected[0], expected[-1])


def test_metrics_by_row(case: Case) -> None:
    """The mean over rows, or over groups of rows, is the metric."""
    predictions = case.predictions(4)
    metrics = case.recipe.metrics(predictions, case.data.eval)
    by_row = case.recipe.row_metrics(predictions, case.data.eval)
    assert "loss" in by_row or case.name == "squad"
    for name, values in by_row.items():
        assert len(values) == (case.facts.eval_groups or case.facts.eval_samples)
        if values.isfinite().all():  # not where a metric is undefined for what is predicted
            assert float(values.double().mean()) == pytest.approx(metrics[name], rel=1e-6)


# --- the cache and what is saved ------------------------------------------------------------------------------


@on_files
def test_entries_of_the_cache(case: Case, overrides: dict[str, list[str]], tmp_path: Path) -> None:
    """One entry for the same data and sizes, found without the data; data that changed after the plan are refused."""

    class Unread:
        def read(self) -> None:
            raise AssertionError("the data are read again")

    assert dataclasses.replace(case.recipe, data=Unread()).prepare(case.cache, case.facts) == case.data.folder
    for limit in getattr(case.recipe, "limits", ())[:1]:
        changed = dataclasses.replace(case.recipe, **{limit: getattr(case.recipe, limit) - 1})
        assert changed.prepare(case.cache, changed.facts(case.cache)) != case.data.folder
    facts = dataclasses.replace(case.facts, digest="of other data")
    with pytest.raises(UserError, match="changed after the run was planned"):
        case.recipe.prepare(Cache(tmp_path / "cache"), facts)
    assert list((tmp_path / "cache").iterdir()) == []


@on_files
def test_saved_models(case: Case, tmp_path: Path) -> None:
    """transformers loads one, with names of its classes; it is evaluated without the training set."""
    case.recipe.save(case.model, case.data, tmp_path)
    auto = getattr(transformers, f"AutoModelFor{case.recipe.head}")
    loaded = auto.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        ours, theirs = (case.recipe.loss(model, case.batch(range(4)))[0] for model in (case.model, loaded))
    assert float(theirs) == pytest.approx(float(ours), rel=1e-9)
    if case.facts.label_names:
        assert loaded.config.id2label == dict(enumerate(case.facts.label_names))
    if "vocabulary" in case.data.properties:
        assert len(transformers.AutoTokenizer.from_pretrained(tmp_path)) == case.data.properties["vocabulary"]

    training = dataclasses.replace(case.recipe.data, train="nowhere")
    saved = dataclasses.replace(case.recipe, data=training).from_saved(str(tmp_path))
    saved.check_model()
    facts = saved.facts(case.cache)
    data = Prepared.load(saved.prepare(case.cache, facts))
    assert (len(data.train), len(data.eval), facts.label_names) == (0, len(case.data.eval), case.facts.label_names)
    again = dataclasses.replace(case, recipe=saved, data=data, model=saved.build_model(data).eval())
    metrics = saved.metrics(again.predictions(4), data.eval)
    assert metrics == case.recipe.metrics(case.predictions(4), case.data.eval)
    columns = saved.for_predictions().prediction_columns(again.predictions(4), data.eval)
    assert {len(values) for values in columns.values()} == {case.facts.eval_groups or case.facts.eval_samples} or (
        case.name == "documents"
    )


#: A sample without what is to be predicted, as a file for `runner.predict` has it, and a column that shows it.
ASKED: dict[str, tuple[Any, str, Any]] = {
    "text_classification": ({"premise": "I like bread", "hypothesis": "I like soup"}, "pair", "I like soup"),
    "multi_label": ({"text": "I like bread"}, "text", "I like bread"),
    "text_regression": ({"text": "I like bread"}, "text", "I like bread"),
    "token_classification": ({"tokens": ["Today", "Ada", "rests"]}, "tokens", ["Today", "Ada", "rests"]),
    "squad": ({"id": "q", "question": "Where does it live?", "context": "In the pond."}, "question", None),
    "documents": ({"text": "a b c"}, "tokens", 4),
    "chat": ({"messages": [{"role": "user", "content": "Where?"}]}, "input", "Where?"),
    "t5": ({"translation": {"en": "The newt lives."}}, "input", "The newt lives."),
    "preference": ({"prompt": "Where?", "chosen": " In the pond."}, "chosen", " In the pond."),
    "reward": (
        {"chosen": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}]},
        "chosen",
        "There.",
    ),
}


@pytest.mark.parametrize("case", ASKED, indirect=True)
def test_predictions_for_a_file(case: Case, tmp_path: Path) -> None:
    """Samples without targets have no loss, and each is predicted for once, in their order."""
    asked, column, value = ASKED[case.name]
    (tmp_path / "asked.jsonl").write_text(2 * (json.dumps(asked) + "\n") if case.name != "squad" else json.dumps(asked))
    case.recipe.save(case.model, case.data, tmp_path / "saved")
    recipe = case.recipe.from_saved(str(tmp_path / "saved"), str(tmp_path / "asked.jsonl")).for_predictions()
    data = Prepared.load(recipe.prepare(case.cache, recipe.facts(case.cache)))
    if case.name not in ("documents", "squad"):  # whose targets are the text itself, and a place in each window
        assert not label_counts(data.eval).any()
    model = recipe.build_model(data).eval()
    with torch.no_grad():
        predictions = recipe.predict(model, recipe.collate(data.eval[list(range(len(data.eval)))], data))
    columns = recipe.prediction_columns(predictions, data.eval)
    assert list(columns[column]) == [value or asked[column]] * len(data.eval)
    assert not {"label", "tags", "reference"} & set(columns)


# --- what is refused ------------------------------------------------------------------------------------------

WRONG = [
    *((name, f"recipe.{limit}={value}") for name, limit, value in (
        ("text_classification", "max_length", 0), ("text_classification", "max_length", 3),
        ("text_classification", "max_length", 129), ("token_classification", "max_length", 0),
        ("token_classification", "max_length", 2), ("token_classification", "max_length", 129),
        ("squad", "max_length", 129), ("squad", "max_length", 16), ("squad", "doc_stride", 32),
        ("squad", "doc_stride", -1), ("squad", "max_query_length", 0), ("squad", "max_answer_length", 0),
        ("blocks", "block_size", 1), ("blocks", "block_size", 65), ("blocks", "packing", "block"),
        ("chat", "max_length", 1), ("chat", "max_length", 3), ("chat", "max_length", 257),
        ("chat", "max_new_tokens", 999), ("chat", "train_on", "most"), ("chat", "chat_template", "nowhere"),
        ("preference", "max_length", 1), ("preference", "objective", "kto"), ("preference", "beta", 0),
        ("preference", "reference", "/nowhere"), ("reward", "chat_template", "nowhere"),
        ("t5", "max_source_length", 0), ("t5", "max_target_length", 1), ("t5", "num_beams", 0),
        ("bart", "max_source_length", 129), ("bart", "max_target_length", 129), ("t5", "model.name", "GPT2"),
        ("text_classification", "padding", "longets"), ("chat", "padding", "max_length"),
        ("text_classification", "metrics_shown", "[acuracy]"), ("text_regression", "metrics_shown", "[accuracy]"),
        ("token_classification", "metrics_shown", "[F1]"), ("multi_label", "metrics_shown", "loss"),
        ("text_classification", "problem", "ranking"), ("text_classification", "label_smoothing", 1),
        ("multi_label", "label_smoothing", 0.1), ("t5", "label_smoothing", -0.1),
        ("vit", "random_crop", 0), ("vit", "random_crop", 2), ("vit", "metrics_shown", "[f1]"),
    )),
    *((name, f"recipe.data.{column}=nowhere") for name, column in (
        ("text_classification", "text_column"), ("text_classification", "label_column"),
        ("token_classification", "tags_column"), ("t5", "source_column"), ("bart", "target_column"),
        ("preference", "chosen_column"), ("reward", "rejected_column"),
        ("vit", "image_column"), ("vit", "label_column"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_wrong_settings(overrides: dict[str, list[str]], name: str, wrong: str, tmp_path: Path) -> None:
    """One sentence that names the setting, before anything is tokenised."""
    wrong = wrong.replace("GPT2", str(Path(overrides["blocks"][-2].partition("=")[2])))
    setting, _, value = wrong.partition("=")

    def use() -> None:
        recipe = recipe_of([*overrides[name], wrong])
        recipe.check_model()
        recipe.facts(Cache(tmp_path / "cache"))

    with pytest.raises(UserError) as caught:
        use()
    message = str(caught.value)
    assert setting.removeprefix("recipe.") in message or value in message
    assert "\n" not in message
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


# --- workers --------------------------------------------------------------------------------------------------

ONE_WORKER = [
    *("batch.global_batch=12", "epochs=1", "precision=fp64", "equivalence=exact", "optimizer=sgd", "optimizer.lr=0.01"),
    *("optimizer.clip_norm=1", "schedule=constant", "schedule.warmup_share=0", "scaling=none", "tracking=none"),
    "device=cpu",
]
LORA = ["adapter=lora", "adapter.rank=2"]
QLORA = ["adapter=qlora", "adapter.rank=2"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, []) for name in ON_FILES),
        *((name, LORA) for name in ("multi_label", "token_classification", "preference")),
        *((name, QLORA) for name in ("squad", "t5", "chat", "reward")),
    ],
)
def test_workers(pool: WorkerPool, overrides: dict[str, list[str]], name: str, more: list[str]) -> None:
    """Weights, metrics and ledger are one worker's, with accumulation, filler rows and dropout by sample."""
    settings = [*overrides[name], *ONE_WORKER, *more]
    (one,) = pool.run(1, train_recipe, settings)
    for result in pool.run(2, train_recipe, [*settings, "accumulation.steps=3"]):
        assert largest_difference(result["weights"], one["weights"]) < 1e-12
        assert result["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
        assert result["ledger"] == one["ledger"]
    assert len(one["losses"]) > 2


def test_dropout_is_on(pool: WorkerPool, overrides: dict[str, list[str]]) -> None:
    """Or the test above would say nothing of it: other masks end elsewhere."""
    settings = [*overrides["token_classification"], *ONE_WORKER, "max_steps=1"]
    exact, standard = (
        pool.run(1, train_recipe, [*settings, f"equivalence={mode}"])[0] for mode in ("exact", "standard")
    )
    assert largest_difference(exact["weights"], standard["weights"]) > 1e-6


@pytest.mark.parametrize("name", ["chat", "t5"])
def test_gradient_checkpointing(pool: WorkerPool, overrides: dict[str, list[str]], name: str) -> None:
    """Models with a cache for generating train the same without keeping their activations, on two workers too."""
    settings = [*overrides[name], *ONE_WORKER, "max_steps=2", "equivalence=standard"]
    kept, again = (
        pool.run(2, train_recipe, [*settings, f"gradient_checkpointing={on}"])[0] for on in ("false", "true")
    )
    assert largest_difference(again["weights"], kept["weights"]) < 1e-12
