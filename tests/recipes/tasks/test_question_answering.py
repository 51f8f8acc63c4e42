"""Question answering on a tiny BERT: windows, targets, loss, predicted answers and metrics."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from recipes.models.pretrained import Pretrained
from recipes.sources.squad_files import SquadData
from recipes.tasks.question_answering import (
    Paragraphs,
    Question,
    QuestionAnswering,
    TokenWindow,
    answers,
    best_rows,
    best_spans,
    windows,
)
from runner.data.cache import Cache
from runner.data.recipe import Batch, Prepared
from runner.errors import UserError
from tests.recipes import zoo
from tests.tiny_models import pair_tokenizer, save_bert

# --- windows, on a tokenizer whose tokens are words -----------------------------------------------------------

CONTEXT = "a b c d e f g h i j"
LETTERS = CONTEXT.split()


def question(answer: str, text: str = "which letter") -> Paragraphs:
    return Paragraphs([CONTEXT], [Question("q", text, 0, ((answer, CONTEXT.index(answer)),))])


@pytest.fixture
def tokenizer() -> Any:
    return pair_tokenizer([CONTEXT, "which letter of them"])


def answer_of(window: TokenWindow, context: str = CONTEXT) -> str:
    first, last = window.answer
    return context[window.offsets[first, 0] : window.offsets[last, 1]]


def test_neighbouring_windows_share_tokens(tokenizer: Any) -> None:
    """Windows of 10 tokens with 2 of the question and 3 special ones: 5 each, the neighbours sharing 2."""
    found = list(windows(question("e f"), tokenizer, 10, 2, 8))
    contexts = [[CONTEXT[a:b] for a, b in one.offsets[slice(one.context[0], one.context[1] + 1)]] for one in found]
    assert contexts == [LETTERS[0:5], LETTERS[3:8], LETTERS[6:10]]
    assert all(window.types == [0] * 4 + [1] * (len(window.ids) - 4) for window in found)
    # The answer is whole in the second window only; the others point at [CLS].
    assert [window.answer for window in found] == [(0, 0), (5, 6), (0, 0)]
    assert answer_of(found[1]) == "e f"


@pytest.mark.parametrize("answer", ["a", "j", CONTEXT, "d e"])
def test_answers_at_the_edges(tokenizer: Any, answer: str) -> None:
    (window,) = windows(question(answer), tokenizer, 40, 2, 8)
    assert answer_of(window) == answer


@pytest.mark.parametrize(
    ("context", "answer", "target"),
    [
        ("it was 1946 then", "46", "1946"),  # the whole token
        ("cafe\u0301 is a house", "cafe\u0301", "cafe"),
        ("is a house\u200b", "house\u200b", "house"),
        ("\u200bhouse is a cafe", "\u200bhouse", "house"),
        ("is a house today", " house", "house"),
        ("is a house today", "house ", "house"),
    ],
)
def test_edges_of_answers_that_are_not_edges_of_tokens(context: str, answer: str, target: str) -> None:
    """Spaces and characters that the tokenizer drops neither widen a target nor lose it."""
    tokenizer = pair_tokenizer(["cafe is a house today where it was 1946 then"])
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Replace("\u200b", "")]
    )
    part = Paragraphs([context], [Question("q", "where", 0, ((answer, context.index(answer)),))])
    (window,) = windows(part, tokenizer, 20, 2, 8)
    assert window.answer[0] > 0
    assert answer_of(window, context).strip("\u0301\u200b") == target
    with pytest.raises(UserError, match="question 'q'"):
        list(windows(Paragraphs(["\u200b"], part.questions), tokenizer, 20, 2, 8))


def test_long_questions_are_truncated(tokenizer: Any) -> None:
    """Under byte-level BPE a part of a text can have more tokens than within the whole: it is cut until it fits."""
    short, long = (
        list(windows(question("e", text), tokenizer, 10, 2, 2)) for text in ("which letter", "which letter of")
    )
    assert [window.ids for window in short] == [window.ids for window in long]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<pad>"])
    bpe.train_from_iterator(["where is the strengthening", "a b c"] * 20, trainer)
    bpe.post_processor = processors.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>")
    for longest in (1, 3, 7, 11):
        for text in ("where is the strengthening of \U0001f600 things", "\U0001f600\U0001f600\U0001f600"):
            assert all(window.context[0] <= longest for window in windows(question("e", text), fast, 60, 1, longest))


def test_chunks_of_questions(tokenizer: Any) -> None:
    """Questions keep their numbers beyond one call of the tokenizer."""
    contexts = [CONTEXT, "j i h"]
    questions = [Question(str(i), "which", i % 2, ((contexts[i % 2][0], 0),)) for i in range(1100)]
    found = windows(Paragraphs(contexts, questions), tokenizer, 30, 2, 8)
    assert [(window.group, window.paragraph) for window in found] == [(i, i % 2) for i in range(1100)]


def test_the_target_of_no_answer(tokenizer: Any) -> None:
    """[CLS], wherever the tokenizer puts it; the first token if it has none. Types are optional, too."""
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    for pair, expected in (("$A [SEP] $B:1 [SEP]:1 [CLS]:1", -1), ("$A $B:1", 0)):
        post_processor = processors.TemplateProcessing(single="$A", pair=pair, special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = post_processor
        last = list(windows(question("a"), tokenizer, 10, 2, 8))[-1]
        assert last.answer == (range(len(last.ids))[expected],) * 2
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    assert next(windows(question("a"), tokenizer, 10, 2, 8)).types is None


# --- spans ----------------------------------------------------------------------------------------------------


def by_search(start: list[float], end: list[float], first: int, last: int, longest: int) -> list[float]:
    spans = [(i, j) for i in range(first, last + 1) for j in range(i, min(i + longest, last + 1))]
    best = max(spans, key=lambda span: (start[span[0]] + end[span[1]], -span[0], -span[1]))
    return [start[best[0]] + end[best[1]], *map(float, best)]


@pytest.mark.parametrize("longest", [1, 2, 5, 100])
def test_all_spans_are_compared(longest: int) -> None:
    """Random integer scores with many ties, and padding of -inf, against a search span by span."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-6, 6, (2, 200, 12), generator=generator).float()
    context = torch.tensor([[3 + i % 4, 6 + i % 5] for i in range(200)])
    context[:, 1] = context.max(dim=1).values
    scores[:, :, 11:] = -torch.inf
    found = best_spans(scores[0], scores[1], context, longest)
    lists = zip(scores[0].tolist(), scores[1].tolist(), context.tolist(), strict=True)
    assert found.tolist() == [by_search(start, end, *bounds, longest) for start, end, bounds in lists]


def test_best_window_of_each_question() -> None:
    """The highest score, and the first of equal ones."""
    scores, groups = np.array([1.0, 3.0, 2.0, 2.0, 7.0, 3.0]), np.array([0, 0, 1, 1, 2, 0])
    assert best_rows(scores, groups).tolist() == [1, 2, 4]


# --- the recipe -----------------------------------------------------------------------------------------------

#: Windows so short that the long paragraphs of the zoo need several.
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
    cache = Cache(folder / "cache")
    return Prepared.load(recipe(folder).prepare(cache, recipe(folder).facts(cache)))


def evaluation(made: QuestionAnswering, prepared: Prepared, length: int | None = None) -> Batch:
    return made.collate(prepared.eval[range(len(prepared.eval))], prepared, length)


def test_facts_and_tables(folder: Path, prepared: Prepared) -> None:
    """Rows are windows, grouped by question; every question's target is its first answer, in some window."""
    facts = recipe(folder).facts(Cache(folder / "cache"))
    assert (facts.train_samples, facts.eval_samples) == (len(prepared.train), len(prepared.eval))
    assert (facts.unit, facts.groups, facts.train_groups, facts.eval_groups) == ("windows", "questions", 40, 12)
    assert facts.train_samples > 40
    assert np.unique(prepared.train.column("group")).tolist() == list(range(40))
    corpus = recipe(folder).data.read().eval
    found: dict[int, set[str]] = {}
    for row in range(len(prepared.eval)):
        window = prepared.eval[[row]]
        first, last = int(window["answer_first"][0]), int(window["answer_last"][0])
        if first:
            context = corpus.contexts[int(window["paragraph"][0])]
            text = context[window["char_first"][0][first] : window["char_last"][0][last]]
            found.setdefault(int(window["group"][0]), set()).add(text)
    assert found == {number: {one.answers[0][0]} for number, one in enumerate(corpus.questions)}


def test_facts_in_the_cache_need_no_tokenizer(folder: Path, prepared: Prepared) -> None:
    """Once tokenised, planning does not import transformers."""
    code = f"""
import sys
from recipes.models.pretrained import Pretrained
from recipes.sources.squad_files import SquadData
from pathlib import Path
from recipes.tasks.question_answering import QuestionAnswering
from runner.data.cache import Cache
folder = Path({str(folder)!r})
data = SquadData(str(folder / "zoo-train.json"), str(folder / "zoo-eval.json"))
facts = QuestionAnswering(data, Pretrained(str(folder / "bert")), **{SIZES}).facts(Cache(folder / "cache"))
print(facts.train_samples, "transformers" in sys.modules)
"""
    root = Path(__file__).parents[3]
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert said.stdout.split() == [str(len(prepared.train)), "False"]


def test_padding_has_no_probability(folder: Path, prepared: Prepared) -> None:
    """With equal scores each side costs the logarithm of the number of tokens."""
    made = recipe(folder)
    model: Any = made.build_model(prepared).double().eval()
    torch.nn.init.zeros_(model.qa_outputs.weight)
    row = prepared.train[[1]]
    loss, _ = made.loss(model, made.collate(row, prepared, 60))
    assert loss.item() == pytest.approx(np.log(len(row["input_ids"][0])))


def test_length_of_answers_and_questions(folder: Path, prepared: Prepared, tmp_path: Path) -> None:
    """Predicted answers have at most `max_answer_length` tokens; longer questions are cut, which is counted."""
    model = recipe(folder).build_model(prepared).double().eval()
    batch = evaluation(recipe(folder), prepared)
    with torch.no_grad():
        longest, one = (recipe(folder, max_answer_length=most).predict(model, batch) for most in (30, 1))
    assert (longest[:, 2] - longest[:, 1]).max() > 0
    assert torch.equal(one[:, 1], one[:, 2])
    made = recipe(folder, max_query_length=3)
    cut = Prepared.load(made.prepare(Cache(tmp_path), made.facts(Cache(tmp_path))))
    assert [one.properties["truncated"]["train"] for one in (prepared, cut)] == [[0, 40], [40, 40]]


def spans_for(prepared: Prepared, wanted: dict[int, tuple[float, str]], contexts: list[str]) -> torch.Tensor:
    """Predictions with these texts as the best spans of windows; all others have a low score and their first word."""
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
    """Articles, case and punctuation are ignored, the best of several answers counts, F1 is over words."""
    corpus, table = recipe(folder).data.read().eval, prepared.eval
    first_rows = {int(group): row for row, group in reversed(list(enumerate(table.column("group"))))}
    short = [i for i, one in enumerate(corpus.questions) if len(corpus.contexts[one.context]) < 150]
    where, when = [i for i in short if i % 2 == 0][:2], [i for i in short if i % 2 == 1][:2]
    wanted = {
        first_rows[where[0]]: (1.0, corpus.questions[where[0]].answers[1][0]),  # the second answer: exact
        first_rows[where[1]]: (1.0, corpus.questions[where[1]].answers[0][0] + ", and"),  # one word too many
        first_rows[when[0]]: (1.0, "by day."),  # punctuation: exact
        first_rows[when[1]]: (1.0, "day"),  # one of two words
    }
    metrics = recipe(folder).metrics(spans_for(prepared, wanted, corpus.contexts), table)
    words = len(corpus.questions[where[1]].answers[1][0].split())
    # All other questions are answered with the first word of their paragraph, which is in no answer.
    assert metrics["exact_match"] == pytest.approx(100 * 2 / 12)
    assert metrics["f1"] == pytest.approx(100 * sum([1.0, 2 * words / (2 * words + 1), 1.0, 2 / 3]) / 12)


def test_the_best_window_answers(folder: Path, prepared: Prepared) -> None:
    corpus, groups = recipe(folder).data.read().eval, prepared.eval.column("group").tolist()
    several = next(group for group in groups if groups.count(group) > 2)
    rows = [row for row, group in enumerate(groups) if group == several]
    predictions = spans_for(prepared, {rows[-1]: (2.0, "by day")}, corpus.contexts).numpy()
    predictions[rows[0], 0] = 1.0
    texts = answers(predictions, prepared.eval, corpus.contexts)
    assert (len(texts), texts[several]) == (12, "by day")
