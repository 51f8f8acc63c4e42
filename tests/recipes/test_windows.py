"""Windows of paragraphs, on a tokenizer whose tokens are words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from recipes.sources.squad_sizes import windows_of, windows_per_question
from recipes.tasks.windows import Window, WindowSizes, windows
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from recipes.sources.squad_files import Paragraphs, Question
from runner.errors import UserError
from tests.tiny_models import pair_tokenizer

CONTEXT = "a b c d e f g h i j"
LETTERS = CONTEXT.split()


def question(answer: str, text: str = "which letter") -> Paragraphs:
    return Paragraphs([CONTEXT], [Question("q", text, 0, ((answer, CONTEXT.index(answer)),))])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return pair_tokenizer([CONTEXT, "which letter of them"])


def letters(window: Window) -> list[str]:
    first, last = window.context
    return [CONTEXT[a:b] for a, b in window.offsets[first : last + 1]]


def test_neighbours_share_as_many_tokens_as_asked_for(tokenizer: Any) -> None:
    """Ten tokens, windows of 10 with 2 of the question and 3 special ones: 5 each, the neighbours sharing 2."""
    found = list(windows(question("e"), tokenizer, WindowSizes(10, 2, 8)))
    assert [letters(window) for window in found] == [LETTERS[0:5], LETTERS[3:8], LETTERS[6:10]]
    assert [len(window.ids) for window in found] == [10, 10, 9]
    assert all(window.types == [0] * 4 + [1] * (len(window.ids) - 4) for window in found)


def test_where_the_answer_is_whole_it_is_the_target(tokenizer: Any) -> None:
    """`e f` lies whole in the second window only; the others point at their first token."""
    found = list(windows(question("e f"), tokenizer, WindowSizes(10, 2, 8)))
    assert [window.answer for window in found] == [(0, 0), (5, 6), (0, 0)]
    first, last = found[1].answer
    assert CONTEXT[found[1].offsets[first, 0] : found[1].offsets[last, 1]] == "e f"


@pytest.mark.parametrize("answer", ["a", "j", "a b c d e f g h i j", "d e"])
def test_answers_at_the_edges(tokenizer: Any, answer: str) -> None:
    """The first and the last token of a paragraph, and all of it, are found in one window that holds them."""
    (window,) = windows(question(answer), tokenizer, WindowSizes(40, 2, 8))
    first, last = window.answer
    assert CONTEXT[window.offsets[first, 0] : window.offsets[last, 1]] == answer


def test_part_of_a_token_is_answered_with_the_token(tokenizer: Any) -> None:
    """`46` in `1946`: the target is the token that holds it."""
    part = Paragraphs(["it was 1946 then"], [Question("q", "when", 0, (("46", 9),))])
    (window,) = windows(part, pair_tokenizer(["it was 1946 then when"]), WindowSizes(20, 2, 8))
    first, last = window.answer
    assert first == last
    assert window.offsets[first].tolist() == [7, 11]


def test_long_questions_are_cut(tokenizer: Any) -> None:
    """To as many tokens as allowed, and the paragraph has the rest."""
    found = list(windows(question("e", "which letter of them of them"), tokenizer, WindowSizes(10, 2, 2)))
    plain = list(windows(question("e"), tokenizer, WindowSizes(10, 2, 2)))
    assert [window.ids for window in found] == [window.ids for window in plain]


def test_many_questions_keep_their_numbers(tokenizer: Any) -> None:
    """Beyond what is tokenised together, a window still knows its question and its paragraph."""
    contexts = [CONTEXT, "j i h"]
    questions = [Question(str(i), "which", i % 2, ((contexts[i % 2][0], 0),)) for i in range(1100)]
    found = list(windows(Paragraphs(contexts, questions), tokenizer, WindowSizes(30, 2, 8)))
    assert [(window.group, window.paragraph) for window in found] == [(i, i % 2) for i in range(1100)]


def test_a_model_without_token_types_gets_none() -> None:
    """Where the tokenizer names no token types, none are kept."""
    tokenizer = pair_tokenizer([CONTEXT, "which letter"])
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    (window,) = windows(question("e"), tokenizer, WindowSizes(30, 2, 8))
    assert window.types is None
    assert isinstance(window.offsets, np.ndarray)


def test_estimated_sizes_are_near_the_counted_ones() -> None:
    """Under the published 384/128, SQuAD's 87,599 questions are known to make 88,524 windows with BERT's tokens."""
    assert 87599 * windows_per_question(WindowSizes(384, 128, 64)) == pytest.approx(88_524, rel=0.01)
    # SQuAD's first 4,370 questions make 9,131 windows at 128/32 with the same tokens.
    assert 4370 * windows_per_question(WindowSizes(128, 32, 64)) == pytest.approx(9_131, rel=0.03)
    assert windows_of(question("e"), WindowSizes(384, 128, 64)) == 1
    long = Paragraphs([CONTEXT * 100], question("e").questions)
    assert windows_of(long, WindowSizes(384, 128, 64)) > 3


@pytest.fixture(scope="module")
def accents() -> Any:
    """Tokens that stand for less than the text between them: accents and marks of no width are dropped, as by BERT."""
    tokenizer = pair_tokenizer(["cafe is a house today where"])
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Replace("\u200b", "")]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("context", "answer", "read_back"),
    [
        ("cafe\u0301 is a house", "cafe\u0301", "cafe"),
        ("a cafe\u0301", "cafe\u0301", "cafe"),
        ("is a house\u200b", "house\u200b", "house"),
        ("\u200bhouse is a cafe", "\u200bhouse", "house"),
        ("is a house today", " house", "house"),
        ("is a house today", "house ", "house"),
        ("is a house today", "a house today", "a house today"),
    ],
)
def test_edges_that_are_no_tokens_edges(accents: Any, context: str, answer: str, read_back: str) -> None:
    """Blanks and dropped marks around an answer neither widen its target nor lose it."""
    part = Paragraphs([context], [Question("q", "where", 0, ((answer, context.index(answer)),))])
    (window,) = windows(part, accents, WindowSizes(20, 2, 8))
    first, last = window.answer
    assert first > 0
    text = context[window.offsets[first, 0] : window.offsets[last, 1]]
    assert text.strip("\u0301\u200b") == read_back


def test_the_token_that_stands_for_no_answer_may_be_the_last() -> None:
    """Some models have theirs at the end; a model without one is pointed at its first token."""
    tokenizer = pair_tokenizer([CONTEXT, "which letter"])
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP] [CLS]", pair="$A [SEP] $B:1 [SEP]:1 [CLS]:1", special_tokens=special
    )
    found = list(windows(question("a"), tokenizer, WindowSizes(10, 2, 8)))
    assert len(found) > 1
    assert found[-1].answer == (len(found[-1].ids) - 1, len(found[-1].ids) - 1)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    assert list(windows(question("a"), tokenizer, WindowSizes(10, 2, 8)))[-1].answer == (0, 0)


def test_a_question_cut_in_two_may_have_more_tokens() -> None:
    """Under byte-level BPE part of a word can be more tokens than it was of the word: it is cut until it fits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<pad>"])
    tokenizer.train_from_iterator(["where is the strengthening", "a b c"] * 20, trainer)
    tokenizer.post_processor = processors.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    for longest in range(1, 12):
        for text in ("where is the strengthening of \U0001f600 things", "\U0001f600\U0001f600\U0001f600"):
            for window in windows(question("e", text), fast, WindowSizes(60, 1, longest)):
                assert window.context[0] <= longest


def test_a_paragraph_without_tokens_is_named(accents: Any) -> None:
    part = Paragraphs(["\u200b"], [Question("q7", "where", 0, (("\u200b", 0),))])
    with pytest.raises(UserError, match="question 'q7' has a paragraph of which the tokenizer leaves nothing"):
        list(windows(part, accents, WindowSizes(20, 2, 8)))
