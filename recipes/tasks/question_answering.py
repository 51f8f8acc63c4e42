"""Extractive question answering: the answer to a question is a span of its paragraph, which is read in windows."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.tasks.pretrained_recipe import at_least_fp32
from recipes.tasks.splits import DataSource, Splits
from recipes.tasks.transformer_recipe import Tokenised, TransformerRecipe, chunks, outputs, text_batch, truncation
from runner.data.cache import Cache, Progress, silent
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.data.table import Table
from runner.errors import UserError, require

#: In the folder of an evaluation table: contexts, ids and answers, which a table of integers cannot hold.
_QUESTIONS = "questions.json"

#: Special tokens around a question and a paragraph, at most: RoBERTa has four, BERT three.
_SPECIAL = 4


@dataclass(frozen=True)
class Question:
    """`context`: its index in the list of paragraphs. `answers`: text and index of its first character; may be none."""

    id: str
    text: str
    context: int
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Paragraphs:
    """Paragraphs, each once, and the questions about them."""

    contexts: list[str]
    questions: list[Question]

    def __len__(self) -> int:
        return len(self.questions)

    def asked(self) -> list[tuple[str, str]]:
        """Each question's paragraph and text."""
        return [(self.contexts[question.context], question.text) for question in self.questions]

    def select(self, rows: Sequence[int]) -> Paragraphs:
        """The questions with these numbers, and the paragraphs that they are about."""
        questions = [self.questions[row] for row in rows]
        kept = sorted({question.context for question in questions})
        number = {context: place for place, context in enumerate(kept)}
        return Paragraphs(
            [self.contexts[context] for context in kept],
            [dataclasses.replace(question, context=number[question.context]) for question in questions],
        )


@dataclass(frozen=True)
class QuestionCorpus(Splits[Paragraphs]):
    def content(self) -> Iterable[bytes]:
        for part in (self.train, self.eval):
            rows = [(one.id, one.text, one.context, one.answers) for one in part.questions]
            yield json.dumps([part.contexts, rows]).encode()

    def train_texts(self) -> Sequence[str]:
        return [*self.train.contexts, *(question.text for question in self.train.questions)]


@dataclass(frozen=True)
class QuestionAnswering(TransformerRecipe[QuestionCorpus]):
    """The answer is a span of the paragraph.

    A long paragraph is read in windows of `max_length` tokens, question and special tokens included. Neighbouring
    windows share `doc_stride` tokens (as in transformers; in BERT's script it is the distance between their starts).
    Questions are truncated to `max_query_length` tokens, and predicted answers have at most `max_answer_length`. The
    target of a window without the whole answer is its first special token (Devlin et al. 2018, "BERT: Pre-training of
    Deep Bidirectional Transformers").
    """

    task: ClassVar[str] = "question answering"
    head: ClassVar[str] = "QuestionAnswering"

    data: DataSource[QuestionCorpus]
    max_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64
    max_answer_length: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_query_length", "max_answer_length"):
            require(getattr(self, name) >= 1, f"recipe.{name}", getattr(self, name), "use at least 1 token")
        room = self.max_length - self.max_query_length - _SPECIAL
        least = self.max_query_length + _SPECIAL + 1
        rule = f"recipe.max_query_length={self.max_query_length} leaves no room for a paragraph; use at least {least}"
        require(room >= 1, "recipe.max_length", self.max_length, rule)
        # Windows that share all of their paragraph tokens would never advance.
        rule = f"windows have room for {room} tokens of a paragraph and must share fewer; use {room // 2}, for example"
        require(0 <= self.doc_stride < room, "recipe.doc_stride", self.doc_stride, rule)

    @property
    def metric_names(self) -> Sequence[str]:
        return ["exact_match", "f1"]

    @property
    def minimised(self) -> Sequence[str]:
        return []

    def facts(self, cache: Cache) -> DataFacts:
        corpus = self.data.read()
        digest = corpus.digest
        windows = self.tokenised(cache, corpus, digest).properties["windows"]
        questions = (len(corpus.train), len(corpus.eval))
        rows = windows["train"], windows["eval"]
        return DataFacts(*rows, digest, corpus.source, "windows", "questions", *questions, notes=corpus.notes)

    def tokenised_by(self) -> dict[str, Any]:
        return {"windows": [self.max_length, self.doc_stride, self.max_query_length]}

    def tokenise(self, splits: QuestionCorpus, tokenizer: Any, progress: Progress) -> Tokenised:
        if not tokenizer.is_fast:
            raise UserError("recipe.model has a slow tokenizer, without character offsets: give it a tokenizer.json")
        parts, longest = (splits.train, splits.eval), self.max_query_length
        train, evaluation = (
            list(windows(part, tokenizer, self.max_length, self.doc_stride, longest, progress)) for part in parts
        )
        lost = [(_count_truncated(part, tokenizer, longest), len(part)) for part in parts]
        properties = {
            "windows": {"train": len(train), "eval": len(evaluation)},
            "truncated": truncation("questions", "recipe.max_query_length", longest, *lost),
        }
        places = {**_columns(evaluation), **_places(evaluation)}
        return Tokenised(_columns(train), places, properties, {_QUESTIONS: _for_metrics(splits.eval)})

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        return {
            **text_batch(rows, prepared.properties["pad_id"], length),
            "context": _pairs(rows, "context_first", "context_last"),
            "labels": _pairs(rows, "answer_first", "answer_last"),
        }

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        sums = [
            cross_entropy(scores, labels[:, side], ignore_index=IGNORED_LABEL, reduction="sum")
            for side, scores in enumerate(_scores(model, batch))
        ]
        return (sums[0] + sums[1]) / 2, (labels[:, 0] != IGNORED_LABEL).sum()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """The best span of each window, [rows, 3]: score, first and last token."""
        start, end = _scores(model, batch)
        return best_spans(start, end, batch["context"], self.max_answer_length)

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        from torchmetrics.functional.text import squad

        return {name: float(value) for name, value in squad(*_answered(predictions, table)).items()}

    def row_metrics(self, predictions: Tensor, table: Table) -> dict[str, Tensor]:
        from torchmetrics.functional.text import squad

        found = [squad(predicted, asked) for predicted, asked in zip(*_answered(predictions, table), strict=True)]
        return {name: torch.stack([one[name] for one in found]) for name in self.metric_names}

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        """Id and text of each question, its answer, and the answer's score: the sum of its first and last token's."""
        part = self.data.read().eval
        best = best_rows(predictions[:, 0].numpy(), np.asarray(table.column("group")))
        return {
            "id": [question.id for question in part.questions],
            "question": [question.text for question in part.questions],
            "answer": answers(predictions.numpy(), table, part.contexts),
            "score": predictions[best, 0].tolist(),
        }


@dataclass(frozen=True)
class TokenWindow:
    """A question with a part of its paragraph, one row of a table.

    `group`, `paragraph`: indices of the question and of its paragraph. `types`: None if the tokenizer makes none.
    `context`: first and last token of the paragraph's part. `offsets`: [tokens, 2], characters of the paragraph that
    each token covers, valid within `context`. `answer`: first and last token of the target.
    """

    group: int
    paragraph: int
    ids: list[int]
    types: list[int] | None
    context: tuple[int, int]
    offsets: np.ndarray
    answer: tuple[int, int]


def windows(
    part: Paragraphs,
    tokenizer: Any,
    max_length: int,
    doc_stride: int,
    max_query_length: int,
    progress: Progress = silent,
) -> Iterator[TokenWindow]:
    """All windows, question by question. Sizes as in `QuestionAnswering`."""
    for some in chunks(len(part), progress):
        questions = part.questions[some]
        encoded = tokenizer(
            _truncated([question.text for question in questions], tokenizer, max_query_length),
            [part.contexts[question.context] for question in questions],
            truncation="only_second",
            max_length=max_length,
            stride=doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        types = encoded.get("token_type_ids")
        samples = encoded["overflow_to_sample_mapping"]
        for row, sample in enumerate(samples):
            ids = encoded["input_ids"][row]
            question = questions[sample]
            sequences = encoded.sequence_ids(row)
            if 1 not in sequences:
                raise UserError(f"question '{question.id}' has a paragraph without a single token: remove it")
            context = (sequences.index(1), len(sequences) - 1 - sequences[::-1].index(1))
            offsets = np.asarray(encoded["offset_mapping"][row], dtype=np.int32)
            no_answer = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
            is_first, is_last = samples[row - 1 : row] != [sample], samples[row + 1 : row + 2] != [sample]
            answer = answer_tokens(question, context, offsets, is_first, is_last) or (no_answer, no_answer)
            kinds = types[row] if types else None
            yield TokenWindow(some.start + sample, question.context, ids, kinds, context, offsets, answer)


def _truncated(texts: list[str], tokenizer: Any, longest: int) -> list[str]:
    """The beginnings of texts that have at most `longest` tokens."""

    def offsets_of(text: str | list[str]) -> Any:
        return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]

    found = []
    for text, offsets in zip(texts, offsets_of(texts), strict=True):
        # A part of a text can have more tokens by itself than within the whole: shorten it until it fits.
        keep = longest
        while len(offsets) > longest:
            text = text[: offsets[keep - 1][1]] if keep else ""
            offsets = offsets_of(text)
            keep -= 1
        found.append(text)
    return found


def _count_truncated(part: Paragraphs, tokenizer: Any, longest: int) -> int:
    """How many questions have more than `longest` tokens."""
    count = 0
    for some in chunks(len(part), silent):
        texts = [question.text for question in part.questions[some]]
        count += sum(map(operator.ne, texts, _truncated(texts, tokenizer, longest)))
    return count


def answer_tokens(
    question: Question, context: tuple[int, int], offsets: np.ndarray, is_first: bool, is_last: bool
) -> tuple[int, int] | None:
    """First and last token of the question's first answer; None without one, or if the window lacks a part of it.

    `is_first`, `is_last`: whether the paragraph begins or ends in this window.
    """
    if not question.answers:
        return None
    first, last = context
    text, start = question.answers[0]
    end = start + len(text.rstrip())
    start += len(text) - len(text.lstrip())
    inside = offsets[first : last + 1]
    # Characters that a tokenizer drops, such as accents, belong to no token, so that edges of answer and tokens can
    # differ: take the first token that ends after the answer's start, and the last that begins before its end.
    begins = int(np.searchsorted(inside[:, 1], start, side="right"))
    ends = int(np.searchsorted(inside[:, 0], end, side="left")) - 1
    whole = (is_first or start >= inside[0, 0]) and (is_last or end <= inside[-1, 1])
    return (first + begins, first + ends) if whole and begins <= ends else None


def best_spans(start: Tensor, end: Tensor, context: Tensor, max_answer_length: int) -> Tensor:
    """The span with the highest start score plus end score in each row; [rows, 3]: score, first and last token.

    `start`, `end`: scores, [rows, tokens]. `context`: first and last token that an answer may contain, [rows, 2]. All
    spans of 1 to `max_answer_length` tokens are compared; the first of equal ones is taken.
    """
    tokens = start.shape[1]
    longest = min(max_answer_length, tokens)
    place = torch.arange(tokens, device=start.device)
    inside = (context[:, :1] <= place) & (place <= context[:, 1:])
    lowest = torch.finfo(start.dtype).min
    # Half of the lowest number, so that the sum of two is still finite.
    start, end = (scores.masked_fill(~inside, lowest / 2) for scores in (start, end))
    beyond = end.new_full((len(end), longest - 1), lowest / 2)
    # sums[r, s, w]: the span from token s to token s + w.
    sums = start[:, :, None] + torch.cat([end, beyond], dim=1).unfold(1, longest, 1)
    score, at = sums.flatten(1).max(dim=1)
    first = torch.div(at, longest, rounding_mode="floor")
    return torch.stack([score, first.to(score.dtype), (first + at % longest).to(score.dtype)], dim=1)


def best_rows(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The row with the highest score in each group, from 0 on, the first of equal ones; int64 of shape [groups].

    `scores`, `groups`: [rows]; every group has a row.
    """
    order = np.lexsort((np.arange(len(scores)), -scores, groups))
    found = order[np.unique(groups[order], return_index=True)[1]]
    assert np.array_equal(groups[found], np.arange(len(found)))
    return found


def answers(predictions: np.ndarray, table: Table, contexts: Sequence[str]) -> list[str]:
    """The text of each question's best span, in the order of questions. `predictions`: [windows, 3], from `predict`."""
    texts = []
    for row in best_rows(predictions[:, 0], np.asarray(table.column("group"))):
        window = table[[int(row)]]
        first, last = (int(token) for token in predictions[row, 1:])
        context = contexts[int(window["paragraph"][0])]
        texts.append(context[window["char_first"][0][first] : window["char_last"][0][last]])
    return texts


def _answered(predictions: Tensor, table: Table) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers and questions in the form that torchmetrics takes."""
    questions = json.loads((table.folder / _QUESTIONS).read_text())
    texts = answers(predictions.numpy(), table, questions["contexts"])
    asked = questions["asked"]
    return [{"id": one["id"], "prediction_text": text} for one, text in zip(asked, texts, strict=True)], asked


def _columns(rows: Sequence[TokenWindow]) -> dict[str, Sequence[Any]]:
    columns: dict[str, Sequence[Any]] = {
        "input_ids": [row.ids for row in rows],
        "length": [len(row.ids) for row in rows],
        "label_count": [1] * len(rows),
        "group": [row.group for row in rows],
        "context_first": [row.context[0] for row in rows],
        "context_last": [row.context[1] for row in rows],
        "answer_first": [row.answer[0] for row in rows],
        "answer_last": [row.answer[1] for row in rows],
    }
    if rows and rows[0].types is not None:
        columns["token_type_ids"] = [row.types for row in rows]
    return columns


def _places(rows: Sequence[TokenWindow]) -> dict[str, Sequence[Any]]:
    """What the metrics need to turn tokens back into text."""
    return {
        "char_first": [row.offsets[:, 0] for row in rows],
        "char_last": [row.offsets[:, 1] for row in rows],
        "paragraph": [row.paragraph for row in rows],
    }


def _for_metrics(part: Paragraphs) -> dict[str, Any]:
    """Contexts, and questions in the form that torchmetrics takes."""
    asked = []
    for question in part.questions:
        texts, starts = [text for text, _ in question.answers], [start for _, start in question.answers]
        asked.append({"id": question.id, "answers": {"text": texts, "answer_start": starts}})
    return {"contexts": part.contexts, "asked": asked}


def _pairs(rows: Mapping[str, Sequence[Any]], first: str, second: str) -> Tensor:
    return torch.from_numpy(np.stack([rows[first], rows[second]], axis=1).astype(np.int64))


def _scores(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Start and end scores, [rows, tokens]; -inf for padding, or the loss would depend on how much there is."""
    output = outputs(model, batch)
    padding = batch["attention_mask"] == 0
    start, end = (
        at_least_fp32(scores).masked_fill(padding, -torch.inf) for scores in (output.start_logits, output.end_logits)
    )
    return start, end
