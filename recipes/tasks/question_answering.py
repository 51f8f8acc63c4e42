"""Extractive question answering: the answer to a question is a span of its paragraph, read in windows of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.models.transformer import ModelSource, check_model, notes_of, outputs, save, text_batch, widened
from recipes.sources.squad_files import Paragraphs, QuestionCorpus
from recipes.sources.squad_sizes import windows_of, windows_per_question
from recipes.tasks.spans import best_rows, best_spans
from recipes.tasks.windows import Window, WindowSizes, windows
from runner.data.cache import Cache
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.data.table import Table, write_table
from runner.errors import Unavailable, UserError

#: In an evaluation table's folder: what metrics need to know of questions, beside the numbers of the table.
_QUESTIONS = "questions.json"

#: Special tokens around a question and a paragraph, at most: RoBERTa has four, BERT three.
_SPECIAL = 4


class QuestionSource(Protocol):
    def read(self) -> QuestionCorpus:
        """Read and check the data. Raises UserError, Unavailable for data that are not here."""
        ...

    def expected_sizes(self) -> tuple[int, int, str] | None:
        """Questions to train on and to evaluate where the data are not here, and who says so; None if not known."""
        ...


class SpanModelSource(ModelSource, Protocol):
    def build_span_model(self, vocabulary: int, pad_id: int) -> nn.Module:
        """A transformers model with a start and an end score for each token, in fp32."""
        ...


@dataclass(frozen=True)
class QuestionAnswering:
    """Spans of paragraphs as answers.

    Long paragraphs are read in windows of `max_length` tokens, question and special tokens included, of which
    neighbours share `doc_stride` (the meaning of transformers' `stride`; BERT's first script called the distance
    between their beginnings so). A question is cut to `max_query_length` tokens, an answer found is no longer than
    `max_answer_length`. A window without the whole answer is trained to point at its first special token (Devlin et al.
    2018, "BERT: Pre-training of Deep Bidirectional Transformers").
    """

    data: QuestionSource
    model: SpanModelSource
    max_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64
    max_answer_length: int = 30

    def __post_init__(self) -> None:
        for name in ("max_query_length", "max_answer_length"):
            if getattr(self, name) < 1:
                raise UserError(f"recipe.{name}={getattr(self, name)} cannot be: it must be at least 1 token")
        # The paragraph's part of a window has to be longer than what windows share, or they would never move on.
        room = self.max_length - self.max_query_length - _SPECIAL
        if room < 1:
            least = self.max_query_length + _SPECIAL + 1
            raise UserError(
                f"recipe.max_length={self.max_length} leaves no room for a paragraph beside a question of "
                f"recipe.max_query_length={self.max_query_length} tokens: set {least} or more"
            )
        if self.doc_stride < 0:
            raise UserError(f"recipe.doc_stride={self.doc_stride} cannot be: windows share at least 0 tokens")
        if self.doc_stride >= room:
            raise UserError(
                f"recipe.doc_stride={self.doc_stride} cannot be: of recipe.max_length={self.max_length} tokens a "
                f"question of recipe.max_query_length={self.max_query_length} leaves {room} to the paragraph, and "
                f"windows have to share fewer: set recipe.doc_stride={room // 2} or so"
            )

    @property
    def metric_names(self) -> Sequence[str]:
        return ["exact_match", "f1"]

    @property
    def minimised(self) -> Sequence[str]:
        return []

    @property
    def has_dropout(self) -> bool:
        return self.model.has_dropout

    @property
    def notes(self) -> Sequence[str]:
        return notes_of(self.model)

    @property
    def _sizes(self) -> WindowSizes:
        return WindowSizes(self.max_length, self.doc_stride, self.max_query_length)

    def check_model(self) -> None:
        check_model(self.model, "recipe.max_length", self.max_length)

    def facts(self, cache: Cache) -> DataFacts:
        corpus = self.data.read()
        self.check_model()  # before anything is tokenised, which only then tells how many windows there are
        digest = corpus.digest  # a hash over all texts
        entry = self._entry(cache, corpus, digest)
        windows = json.loads((entry / "properties.json").read_text())["windows"]
        questions = (len(corpus.train), len(corpus.eval))
        return _facts((windows["train"], windows["eval"]), questions, digest, corpus.source)

    def expected_facts(self) -> DataFacts | None:
        """What `runner.plan` can say without data, or without the tokenizer that cuts them."""
        try:
            corpus = self.data.read()
        except Unavailable:
            sizes = self.data.expected_sizes()
            if sizes is None:
                return None
            train, evaluation, whose = sizes
            share = windows_per_question(self._sizes)
            source = f"{whose}, and windows as paragraphs of SQuAD's lengths make them"
            rows = (round(train * share), round(evaluation * share))
            return _facts(rows, (train, evaluation), "not read", source, estimated=True)
        rows = (windows_of(corpus.train, self._sizes), windows_of(corpus.eval, self._sizes))
        source = f"{corpus.source}, windows from the number of words"
        return _facts(rows, (len(corpus.train), len(corpus.eval)), corpus.digest, source, estimated=True)

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        return self._entry(cache, None, facts.digest)

    def _entry(self, cache: Cache, corpus: QuestionCorpus | None, digest: str) -> Path:
        key = {
            "task": "question answering",
            "data": digest,
            "tokenizer": self.model.tokenizer_identity(),
            "windows": [self.max_length, self.doc_stride, self.max_query_length],
        }
        return cache.get(key, lambda folder: self._tokenize(folder, corpus or self.data.read(), digest))

    def _tokenize(self, folder: Path, corpus: QuestionCorpus, digest: str) -> None:
        if corpus.digest != digest:
            raise UserError(f"the data ({corpus.source}) changed after the run was planned: start it again")
        texts = [*corpus.train.contexts, *(question.text for question in corpus.train.questions)]
        tokenizer = self.model.tokenizer(texts)
        if not tokenizer.is_fast:
            raise UserError(
                "recipe.model has a slow tokenizer, which cannot tell where tokens stand in a text: give a model "
                "whose folder has a tokenizer.json"
            )
        counts = {}
        for name, part in (("train", corpus.train), ("eval", corpus.eval)):
            rows = list(windows(part, tokenizer, self._sizes))
            write_table(folder / name, _columns(rows, with_offsets=name == "eval"))
            counts[name] = len(rows)
        (folder / "eval" / _QUESTIONS).write_text(json.dumps(_for_metrics(corpus.eval)))
        properties = {"windows": counts, "vocabulary": len(tokenizer), "pad_id": tokenizer.pad_token_id}
        (folder / "properties.json").write_text(json.dumps(properties))
        tokenizer.save_pretrained(folder / "tokenizer")

    def build_model(self, prepared: Prepared) -> nn.Module:
        return self.model.build_span_model(prepared.properties["vocabulary"], prepared.properties["pad_id"])

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

        questions = json.loads((table.folder / _QUESTIONS).read_text())
        texts = answers(predictions.numpy(), table, questions["contexts"])
        found = [
            {"id": one["id"], "prediction_text": text} for one, text in zip(questions["asked"], texts, strict=True)
        ]
        wanted = [{"id": one["id"], "answers": one["answers"]} for one in questions["asked"]]
        return {name: float(value) for name, value in squad(found, wanted).items()}

    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        save(model, prepared, folder)


def _facts(
    windows: tuple[int, int], questions: tuple[int, int], digest: str, source: str, estimated: bool = False
) -> DataFacts:
    return DataFacts(*windows, digest, source, "windows", "questions", *questions, estimated=estimated)


def answers(predictions: np.ndarray, table: Table, contexts: Sequence[str]) -> list[str]:
    """The text of each question's best span, by question number. `predictions`: [windows, 3], from `predict`."""
    groups = np.asarray(table.column("group"))
    texts = []
    for row in best_rows(predictions[:, 0], groups):
        window = table[[int(row)]]
        first, last = (int(place) for place in predictions[row, 1:])
        context = contexts[int(window["paragraph"][0])]
        texts.append(context[window["char_first"][0][first] : window["char_last"][0][last]])
    return texts


def _columns(rows: Sequence[Window], with_offsets: bool) -> dict[str, Sequence[Any]]:
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
    if rows[0].types is not None:
        columns["token_type_ids"] = [row.types for row in rows]
    if with_offsets:
        columns["char_first"] = [row.offsets[:, 0] for row in rows]
        columns["char_last"] = [row.offsets[:, 1] for row in rows]
        columns["paragraph"] = [row.paragraph for row in rows]
    return columns


def _for_metrics(part: Paragraphs) -> dict[str, Any]:
    asked = [
        {
            "id": question.id,
            "answers": {
                "text": [text for text, _ in question.answers],
                "answer_start": [start for _, start in question.answers],
            },
        }
        for question in part.questions
    ]
    return {"contexts": part.contexts, "asked": asked}


def _pairs(rows: Mapping[str, Sequence[Any]], first: str, second: str) -> Tensor:
    return torch.from_numpy(np.stack([rows[first], rows[second]], axis=1).astype(np.int64))


def _scores(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Start and end scores, [rows, tokens]; padding cannot be chosen, or the loss would depend on how much there is."""
    out = outputs(model, batch)
    padding = batch["attention_mask"] == 0
    return (
        widened(out.start_logits).masked_fill(padding, -torch.inf),
        widened(out.end_logits).masked_fill(padding, -torch.inf),
    )
