"""Question answering on a tiny BERT: what is cut, trained on, found and measured, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from recipes.models.pretrained import Pretrained
from recipes.sources.squad_files import SquadData
from recipes.tasks.question_answering import QuestionAnswering, answers
from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Batch, Prepared, without_targets
from runner.data.table import ROW
from runner.errors import UserError
from tests.recipes import zoo
from tests.tiny_models import save_bert

#: Windows so short that the zoo's long paragraphs need several.
SIZES = {"max_length": 48, "doc_stride": 8, "max_query_length": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("squad")
    zoo.write(folder)
    save_bert(folder / "bert", zoo.texts())
    return folder


def recipe(folder: Path, **settings: Any) -> QuestionAnswering:
    data = SquadData(str(folder / "zoo-train.json"), str(folder / "zoo-eval.json"))
    return QuestionAnswering(data, Pretrained(str(folder / "bert")), **{**SIZES, **settings})


@pytest.fixture(scope="module")
def prepared(folder: Path) -> Prepared:
    made = recipe(folder)
    cache = Cache(folder / "cache")
    return Prepared.load(made.prepare(cache, made.facts(cache)))


def whole(made: QuestionAnswering, prepared: Prepared, part: str = "train", length: int | None = None) -> Batch:
    table = getattr(prepared, part)
    return made.collate(table[range(len(table))], prepared, length)


# --- what is cut ----------------------------------------------------------------------------------------------


def test_facts_count_windows_and_questions(folder: Path, prepared: Prepared) -> None:
    """Batches are counted in windows; how many questions these belong to is known besides."""
    facts = recipe(folder).facts(Cache(folder / "cache"))
    assert (facts.train_samples, facts.eval_samples) == (len(prepared.train), len(prepared.eval))
    assert (facts.unit, facts.groups, facts.train_groups, facts.eval_groups) == ("windows", "questions", 40, 12)
    assert facts.train_samples > 40
    assert not facts.estimated
    groups = prepared.train.groups()
    assert groups is not None
    assert np.unique(groups).tolist() == list(range(40))


def test_every_answer_is_the_target_of_a_window(folder: Path, prepared: Prepared) -> None:
    """Read back through the offsets, each question's target is its first answer, in one window at least."""
    corpus, table = recipe(folder).data.read(), prepared.eval
    found: dict[int, set[str]] = {}
    for row in range(len(table)):
        window = table[[row]]
        first, last = int(window["answer_first"][0]), int(window["answer_last"][0])
        if first:
            context = corpus.eval.contexts[int(window["paragraph"][0])]
            text = context[window["char_first"][0][first] : window["char_last"][0][last]]
            found.setdefault(int(window["group"][0]), set()).add(text)
    assert found == {i: {question.answers[0][0]} for i, question in enumerate(corpus.eval.questions)}


def test_sizes_are_those_of_the_windows(folder: Path, tmp_path: Path) -> None:
    """Each of the three sizes does what it says, and other sizes are other data."""
    cache = Cache(tmp_path)

    def made(**sizes: int) -> Prepared:
        one = recipe(folder, **sizes)
        return Prepared.load(one.prepare(cache, one.facts(cache)))

    plain = made()
    assert plain.train.column("length").max() == 48
    short, close, cut = made(max_length=40), made(doc_stride=20), made(max_query_length=3)
    assert short.train.column("length").max() == 40
    assert len(close.train) > len(plain.train)
    # [CLS], the question and [SEP] stand before the paragraph.
    assert plain.train.column("context_first").max() > 5
    assert cut.train.column("context_first").max() == 5
    assert len({one.folder for one in (plain, short, close, cut)}) == 4
    # Windows share as many tokens of the paragraph as asked for.
    groups = plain.train.column("group")
    first, second = next((row, row + 1) for row in range(len(groups)) if groups[row] == groups[row + 1])
    tokens = [plain.train[[row]] for row in (first, second)]
    parts = [row["input_ids"][0][row["context_first"][0] : row["context_last"][0] + 1].tolist() for row in tokens]
    assert parts[0][-8:] == parts[1][:8]
    assert parts[0][-9:] != parts[1][:9]


def test_another_tokenizer_is_another_entry(folder: Path, tmp_path: Path) -> None:
    """The same data under another vocabulary are tokenised anew."""
    save_bert(tmp_path / "other", [*zoo.texts(), "and one word more: elephant"])
    cache = Cache(tmp_path / "cache")
    data = recipe(folder).data
    entries = [
        made.prepare(cache, made.facts(cache))
        for made in (
            QuestionAnswering(data, Pretrained(str(path)), **SIZES) for path in (folder / "bert", tmp_path / "other")
        )
    ]
    assert entries[0] != entries[1]


def test_types_tell_question_and_paragraph_apart(folder: Path, prepared: Prepared) -> None:
    """The model is given types: 1 from the paragraph to its end, 0 for the question and for padding."""
    made = recipe(folder)
    batch = whole(made, prepared, "eval", 60)
    for types, (first, last) in zip(batch["token_type_ids"].tolist(), batch["context"].tolist(), strict=True):
        assert types == [0] * first + [1] * (last + 2 - first) + [0] * (60 - last - 2)
    model = made.build_model(prepared).double().eval()
    without = {name: tensor for name, tensor in batch.items() if name != "token_type_ids"}
    with torch.no_grad():
        assert not torch.equal(made.predict(model, batch), made.predict(model, without))


def test_answers_are_no_longer_than_asked_for(folder: Path, prepared: Prepared) -> None:
    """With `max_answer_length=1` every answer is one token; with more, some are longer."""
    lengths = {}
    for longest in (1, 4):
        made = recipe(folder, max_answer_length=longest)
        torch.manual_seed(0)
        with torch.no_grad():
            spans = made.predict(made.build_model(prepared).double().eval(), whole(made, prepared, "eval"))
        lengths[longest] = (spans[:, 2] - spans[:, 1] + 1).max().item()
    assert lengths[1] == 1
    assert 1 < lengths[4] <= 4


def test_warm_facts_need_no_tokenizer(folder: Path, prepared: Prepared) -> None:
    """Once tokenised, the numbers come from the cache: neither transformers nor torch's models are imported."""
    code = f"""
import sys
from pathlib import Path
from recipes.models.pretrained import Pretrained
from recipes.tasks.question_answering import QuestionAnswering
from recipes.sources.squad_files import SquadData
from runner.data.cache import Cache
folder = Path({str(folder)!r})
data = SquadData(str(folder / "zoo-train.json"), str(folder / "zoo-eval.json"))
made = QuestionAnswering(data, Pretrained(str(folder / "bert")), **{SIZES})
print(made.facts(Cache(folder / "cache")).train_samples, "transformers" in sys.modules)
"""
    root = Path(__file__).parents[2]
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert said.stdout.split() == [str(len(prepared.train)), "False"]


def test_data_that_change_meanwhile_are_refused(folder: Path, tmp_path: Path) -> None:
    """What was planned is what is tokenised, or nothing is."""
    zoo.write(tmp_path)
    data = SquadData(str(tmp_path / "zoo-train.json"), str(tmp_path / "zoo-eval.json"))
    made = QuestionAnswering(data, Pretrained(str(folder / "bert")), **SIZES)
    facts = made.facts(Cache(tmp_path / "cache"))
    zoo.write(tmp_path, train=19)
    with pytest.raises(UserError, match="changed after the run was planned"):
        made.prepare(Cache(tmp_path / "other"), facts)


# --- what is trained ------------------------------------------------------------------------------------------


def test_loss_is_a_sum_over_windows(folder: Path, prepared: Prepared) -> None:
    """The sum over a batch is that of its windows one by one, whatever they are padded to, in fp64."""
    made = recipe(folder)
    model = made.build_model(prepared).double().eval()
    rows = [prepared.train[[i]] for i in range(12)]
    alone = [made.loss(model, made.collate(row, prepared)) for row in rows]
    for length in (None, 48, 60):
        total, count = made.loss(model, made.collate(prepared.train[range(12)], prepared, length))
        assert count == 12
        torch.testing.assert_close(total, torch.stack([one for one, _ in alone]).sum(), rtol=1e-12, atol=1e-12)


def test_loss_by_hand(folder: Path, prepared: Prepared) -> None:
    """With equal scores everywhere each side costs the logarithm of the window's tokens, padding not among them."""
    made = recipe(folder)
    model = made.build_model(prepared).double().eval()
    torch.nn.init.zeros_(model.qa_outputs.weight)
    row = prepared.train[[1]]
    loss, _ = made.loss(model, made.collate(row, prepared, 60))
    assert loss.item() == pytest.approx(np.log(len(row["input_ids"][0])))


def test_filler_counts_nowhere(folder: Path, prepared: Prepared) -> None:
    """A batch of fillers has loss 0 over 0 windows, with a gradient of zeros."""
    made = recipe(folder)
    model = made.build_model(prepared).eval()
    batch = without_targets(whole(made, prepared), np.ones(len(prepared.train), dtype=bool))
    loss, count = made.loss(model, batch)
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert (batch["labels"] == IGNORED_LABEL).all()


def test_training_finds_answers(folder: Path, prepared: Prepared) -> None:
    """A few dozen steps on a handful of windows, and their answers are found word by word."""
    made = recipe(folder)
    torch.manual_seed(0)
    model = made.build_model(prepared)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = whole(made, prepared, "eval")
    with torch.no_grad():
        before = made.metrics(made.predict(model.eval(), batch).double(), prepared.eval)
    model.train()
    for _ in range(120):
        optimizer.zero_grad()
        loss, count = made.loss(model, batch)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        after = made.metrics(made.predict(model.eval(), batch).double(), prepared.eval)
    assert after["f1"] > max(80, before["f1"])
    assert 0 <= after["exact_match"] <= after["f1"] <= 100


# --- what is found --------------------------------------------------------------------------------------------


def spans_for(prepared: Prepared, wanted: dict[int, tuple[float, str]], contexts: list[str]) -> torch.Tensor:
    """Predictions by which a window's best span is given words; all others have a low score and their first word."""
    table = prepared.eval
    rows = torch.zeros(len(table), 3, dtype=torch.float64)
    for row in range(len(table)):
        window = table[[row]]
        first = int(window["context_first"][0])
        rows[row] = torch.tensor([-100.0, first, first])
        if row in wanted:
            score, text = wanted[row]
            start = contexts[int(window["paragraph"][0])].index(text)
            begins = window["char_first"][0].tolist().index(start, first)
            ends = window["char_last"][0].tolist().index(start + len(text), first)
            rows[row] = torch.tensor([score, begins, ends])
    return rows


def test_exact_match_and_f1_by_hand(folder: Path, prepared: Prepared) -> None:
    """Articles, case and signs count for nothing, the best of several answers counts, F1 is by words."""
    made = recipe(folder)
    corpus = made.data.read().eval
    table = prepared.eval
    first_rows = {int(group): row for row, group in reversed(list(enumerate(table.column("group"))))}
    # Short paragraphs: number 22 is at the pond..., each asked "where" and "when".
    short = [i for i, question in enumerate(corpus.questions) if len(corpus.contexts[question.context]) < 150]
    where, when = [i for i in short if i % 2 == 0][:2], [i for i in short if i % 2 == 1][:2]
    place = corpus.questions[where[0]].answers[1][0]
    wanted = {
        first_rows[where[0]]: (1.0, place),  # the second of two answers, without its article: exact
        first_rows[where[1]]: (1.0, corpus.questions[where[1]].answers[0][0] + ", and"),  # one word too many
        first_rows[when[0]]: (1.0, "by day."),  # a sign too many: exact
        first_rows[when[1]]: (1.0, "day"),  # one of two words
    }
    metrics = made.metrics(spans_for(prepared, wanted, corpus.contexts), table)
    words = len(corpus.questions[where[1]].answers[1][0].split())
    f1 = [1.0, 2 * words / (2 * words + 1), 1.0, 2 / 3]
    # All other questions are answered with the first word of their paragraph, which is in no answer.
    assert metrics["exact_match"] == pytest.approx(100 * 2 / 12)
    assert metrics["f1"] == pytest.approx(100 * sum(f1) / 12)


def test_the_best_window_answers(folder: Path, prepared: Prepared) -> None:
    """Of a question's windows the one with the highest score gives the text, wherever the others point."""
    corpus, table = recipe(folder).data.read().eval, prepared.eval
    groups = table.column("group").tolist()
    several = next(group for group in groups if groups.count(group) > 2)
    rows = [row for row, group in enumerate(groups) if group == several]
    predictions = spans_for(prepared, {rows[-1]: (2.0, "by day")}, corpus.contexts).numpy()
    predictions[rows[0], 0] = 1.0
    texts = answers(predictions, table, corpus.contexts)
    assert len(texts) == 12
    assert texts[several] == "by day"


def test_predictions_do_not_depend_on_padding(folder: Path, prepared: Prepared) -> None:
    """The same spans and, in fp64, the same scores, however much padding there is."""
    made = recipe(folder)
    model = made.build_model(prepared).double().eval()
    with torch.no_grad():
        short, long = (made.predict(model, whole(made, prepared, "eval", length)) for length in (None, 64))
    torch.testing.assert_close(short, long, rtol=1e-12, atol=1e-12)
    assert torch.equal(short[:, 1:], long[:, 1:])


def test_saved_model_can_be_loaded(folder: Path, prepared: Prepared, tmp_path: Path) -> None:
    """Weights and tokenizer are where `from_pretrained` looks for them."""
    made = recipe(folder)
    model = made.build_model(prepared)
    made.save(model, prepared, tmp_path / "model")
    again = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    tokens = prepared.train[[0]]
    asked = recipe(folder).data.read().train
    encoded = AutoTokenizer.from_pretrained(tmp_path / "model")(asked.questions[0].text, asked.contexts[0])
    question = slice(tokens["context_first"][0])
    assert encoded["input_ids"][question] == tokens["input_ids"][0][question].tolist()
    assert tokens[ROW].tolist() == [0]


# --- what is refused, and what is only estimated ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 129}, "129 is more than the 128 positions"),
        ({"max_length": 16}, "leaves no room"),
        ({"doc_stride": 32}, r"recipe\.doc_stride=32 cannot be"),
        ({"doc_stride": -1}, r"recipe\.doc_stride=-1 cannot be"),
        ({"max_query_length": 0}, r"recipe\.max_query_length=0 cannot be"),
        ({"max_answer_length": 0}, r"recipe\.max_answer_length=0 cannot be"),
        ({"max_query_length": 48}, "leaves no room"),
    ],
)
def test_sizes_that_cannot_be(folder: Path, tmp_path: Path, settings: dict[str, int], message: str) -> None:
    """Each is one sentence, said before anything is tokenised."""
    with pytest.raises(UserError, match=message):
        recipe(folder, **settings).facts(Cache(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_expected_sizes_without_data_or_tokenizer(folder: Path, prepared: Prepared) -> None:
    """Nothing here: the Hub's size; data without a tokenizer: questions are exact and windows near."""
    of = "rajpurkar/squad (train, validation)"
    hub = SquadData(hub_name="rajpurkar/squad", hub_samples_of=of, hub_train_samples=87599, hub_eval_samples=10570)
    facts = QuestionAnswering(hub, Pretrained("bert-large-uncased")).expected_facts()
    assert facts is not None
    assert facts.estimated
    assert (facts.train_groups, facts.eval_groups) == (87599, 10570)
    assert 87599 < facts.train_samples < 1.03 * 87599
    assert QuestionAnswering(SquadData(hub_name="a/b"), Pretrained("bert-large-uncased")).expected_facts() is None
    data = SquadData(str(folder / "zoo-train.json"), str(folder / "zoo-eval.json"))
    near = QuestionAnswering(data, Pretrained("bert-large-uncased"), **SIZES).expected_facts()
    assert near is not None
    assert (near.train_groups, near.estimated) == (40, True)
    assert near.train_samples == pytest.approx(len(prepared.train), rel=0.3)
    assert "number of words" in near.source
