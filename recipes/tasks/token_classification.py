"""Token classification, such as named entities or parts of speech: a tag for each word of a sentence."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from recipes.models.pretrained import Pretrained
from recipes.tasks.pretrained_recipe import (
    at_least_fp32,
    check_label_smoothing,
    check_metrics_shown,
    evaluation_reader,
    evaluation_source,
    saved_label_names,
    set_label_names,
)
from recipes.tasks.problems import class_loss
from recipes.tasks.row_metrics import ratio, row_metrics
from recipes.tasks.splits import Splits
from recipes.tasks.transformer_recipe import (
    Tokenised,
    TransformerRecipe,
    check_room,
    chunks,
    count_truncated,
    outputs,
    text_batch,
    truncation,
)
from runner.data.cache import Cache, Progress
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.data.table import Table
from runner.errors import UserError, require

#: No entity, or the prefix of an entity's tag: of its beginning, its inside, its end, or its only word.
_ENTITY_TAG = re.compile(r"O|[BIES](-.*)?")

#: Metrics of whole entities, which only tags with such prefixes have.
_OF_ENTITIES = ("precision", "recall", "f1")
METRICS = (*_OF_ENTITIES, "accuracy", "loss")

#: The kind of an entity, and its first and last word.
Entity = tuple[str, int, int]


@dataclass(frozen=True)
class Sentences:
    """Words, and their tags by number; `tags` is None for sentences to predict for."""

    words: Sequence[Sequence[str]]
    tags: Sequence[Sequence[int]] | None

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True)
class TaggedCorpus(Splits[Sentences]):
    """`names`: of the tags, in the order of their numbers."""

    names: tuple[str, ...]

    def content(self) -> Iterable[bytes]:
        yield json.dumps([(part.words, part.tags) for part in (self.train, self.eval)]).encode()

    def train_texts(self) -> Sequence[str]:
        return [" ".join(words) for words in self.train.words]


class TaggedSource(Protocol):
    def read(self) -> TaggedCorpus:
        """Read and check the data. Raises UserError, and Unavailable for data that are not on this machine."""
        ...

    def read_evaluation(self, file: str | None = None, label_names: Sequence[str] | None = None) -> Sentences:
        """The evaluation set, or the sentences of `file`. `label_names`: of the tags; None reads no tags."""
        ...


@dataclass(frozen=True)
class TokenClassification(TransformerRecipe[TaggedCorpus]):
    """A tag for each word of a sentence.

    The tag of a word is predicted at its first token; the others have no loss. `max_length`: tokens kept of a sentence,
    special tokens included: words beyond are neither trained on nor evaluated. `metrics_shown`: names from `METRICS`,
    or None for those that fit the tags; the loss is always added.
    """

    task: ClassVar[str] = "token classification"
    head: ClassVar[str] = "TokenClassification"

    data: TaggedSource
    max_length: int = 128
    metrics_shown: Sequence[str] | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_metrics_shown(self.metrics_shown, METRICS)
        check_label_smoothing(self.label_smoothing)

    @property
    def metric_names(self) -> Sequence[str]:
        return [*dict.fromkeys([*(METRICS if self.metrics_shown is None else self.metrics_shown), "loss"])]

    def metrics_of(self, facts: DataFacts) -> Sequence[str]:
        return self._metric_names(facts.label_names)

    def _metric_names(self, names: Iterable[str]) -> Sequence[str]:
        fits = self.metrics_shown is not None or all(map(_ENTITY_TAG.fullmatch, names))
        return [name for name in self.metric_names if fits or name not in _OF_ENTITIES]

    @property
    def minimised(self) -> Sequence[str]:
        return ["loss"]

    def facts(self, cache: Cache) -> DataFacts:
        corpus = self.data.read()
        other = next((name for name in corpus.names if not _ENTITY_TAG.fullmatch(name)), None)
        for name in _OF_ENTITIES:
            rule = f"{name} is of tags such as B-PER, I-PER and O, and these data have '{other}'; use accuracy"
            ok = other is None or name not in (self.metrics_shown or ())
            require(ok, "recipe.metrics_shown", self.metrics_shown, rule)
        check_room("recipe.max_length", self.max_length, lambda: self.model.tokenizer(corpus.train_texts()))
        self.model.check_head(self.head, len(corpus.names))
        rows = len(corpus.train), len(corpus.eval)
        return DataFacts(*rows, corpus.digest, corpus.source, "sentences", label_names=corpus.names, notes=corpus.notes)

    def tokenised_by(self) -> dict[str, Any]:
        return {"max_length": self.max_length}

    def tokenise(self, splits: TaggedCorpus, tokenizer: Any, progress: Progress) -> Tokenised:
        if not tokenizer.is_fast:
            raise UserError("recipe.model has a slow tokenizer, without word numbers: give it a tokenizer.json")
        tables, lost = [], []
        for name, given in (("train", splits.train), ("eval", splits.eval)):
            part = with_spaces(given, tokenizer)
            columns = columns_of(part, tokenizer, self.max_length, progress)
            empty = next((row for row, words in enumerate(columns["word"]) if not len(words)), None)
            if empty is not None:
                found = " ".join(part.words[empty]).strip()
                raise UserError(f"recipe.data.{name} has a sentence without a single token, {found!r}: remove it")
            lengths = columns["length"]
            longer = count_truncated(tokenizer, part.words, lengths, self.max_length, is_split_into_words=True)
            lost.append((longer, len(part)))
            tables.append(columns)
        truncated = truncation("sentences", "recipe.max_length", self.max_length, *lost)
        return Tokenised(tables[0], tables[1], {"label_names": splits.names, "truncated": truncated})

    def build_model(self, prepared: Prepared) -> nn.Module:
        names = prepared.properties["label_names"]
        model = self.built(prepared, num_labels=len(names))
        set_label_names(model.config, names)
        return self.unpad(model, prepared)

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        batch = text_batch(rows, prepared.properties["pad_id"], length)
        labels = torch.full_like(batch["input_ids"], IGNORED_LABEL)
        for row, (places, tags) in enumerate(zip(rows["place"], rows["tag"], strict=True)):
            labels[row, torch.as_tensor(np.asarray(places, dtype=np.int64))] = torch.as_tensor(
                np.asarray(tags, np.int64)
            )
        return {**batch, "labels": labels}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, labels = at_least_fp32(outputs(model, batch).logits), batch["labels"]
        return class_loss(logits.flatten(0, 1), labels.flatten(), self.label_smoothing)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each row, and the tag at each token, 0 after the last; fp64 of shape [rows, 1 + max_length]."""
        logits, labels = at_least_fp32(outputs(model, batch).logits), batch["labels"]
        losses = cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED_LABEL, reduction="none")
        tags = pad(logits.argmax(-1), (0, self.max_length - labels.shape[1]))
        return torch.cat([losses.double().sum(1, keepdim=True), tags.double()], dim=1)

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        names = json.loads((table.folder.parent / "properties.json").read_text())["label_names"]
        shown = self._metric_names(names)
        predicted, expected = predicted_tags(predictions, table), table[range(len(table))]["tag"]
        correct = sum(int((one == other).sum()) for one, other in zip(predicted, expected, strict=True))
        words = sum(map(len, expected))
        found = {"accuracy": 100 * correct / words, "loss": float(predictions[:, 0].sum()) / words}
        if any(name in shown for name in _OF_ENTITIES):
            parts = ([[names[tag] for tag in row] for row in rows] for rows in (expected, predicted))
            found |= entity_metrics(*parts)
        return {name: found[name] for name in shown}

    def row_metrics(self, predictions: Tensor, table: Table) -> dict[str, Tensor]:
        names = json.loads((table.folder.parent / "properties.json").read_text())["label_names"]
        pairs = list(zip(predicted_tags(predictions, table), table[range(len(table))]["tag"], strict=True))
        words = [(len(tags), int((tags == predicted).sum())) for predicted, tags in pairs]
        counts = torch.cat([predictions[:, :1].double(), torch.tensor(words, dtype=torch.float64)], dim=1)
        found = row_metrics(counts, {"loss": ratio(0, 1), "accuracy": ratio(2, 1, 100)})
        shown = self._metric_names(names)
        if any(name in shown for name in _OF_ENTITIES):
            of_rows = [entity_counts(*([names[tag] for tag in tags] for tags in pair[::-1])) for pair in pairs]
            found |= row_metrics(torch.tensor(of_rows), _ENTITY_METRICS)
        return {name: found[name] for name in shown}

    def evaluation_data(self, model: Pretrained, file: str | None) -> TaggedCorpus:
        names = saved_label_names(model, self.data)
        read: Callable[..., Sentences] = evaluation_reader(self.data, "read_evaluation")
        part = read(file, None if file is not None else names)
        source = evaluation_source(self.data, file)
        return TaggedCorpus(Sentences([], []), part, source, names)

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        """A row for each sentence: its words, the tag of each, None beyond `max_length`; and the true ones if known."""
        corpus = self.data.read()
        words, names = corpus.eval.words, corpus.names
        tags: list[list[str | None]] = [[None] * len(sentence) for sentence in words]
        seen = table[range(len(table))]["word"]
        for own, places, numbers in zip(tags, seen, predicted_tags(predictions, table), strict=True):
            for place, number in zip(places, numbers, strict=True):
                own[place] = names[number]
        true = corpus.eval.tags
        return {
            "tokens": [list(sentence) for sentence in words],
            "predicted": tags,
            **({} if true is None else {"tags": [[names[tag] for tag in row] for row in true]}),
        }


def with_spaces(part: Sentences, tokenizer: Any) -> Sentences:
    """Tokenise with a space before each word, if the tokenizer makes that a part of the word, as byte-level ones do."""

    def last(words: str | list[str]) -> list[int]:
        encoded = tokenizer(words, is_split_into_words=isinstance(words, list), add_special_tokens=False)
        ids: list[int] = encoded["input_ids"][-1:]
        return ids

    if last(["a", " a"]) != last("a a") or last("a a") == last(["a", "a"]):
        return part
    return dataclasses.replace(part, words=[[f" {word}" for word in words] for words in part.words])


def columns_of(part: Sentences, tokenizer: Any, max_length: int, progress: Progress) -> dict[str, list[Any]]:
    """The columns of a table: the tokens, and for each word that has some its number, its tag and its first token."""
    columns: dict[str, list[Any]] = {name: [] for name in ("input_ids", "word", "place", "tag")}
    for some in chunks(len(part), progress):
        words = part.words[some]
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
        for row, ids in enumerate(encoded["input_ids"]):
            own = encoded.word_ids(row)
            before = [None, *own]
            places = [place for place, word in enumerate(own) if word is not None and word != before[place]]
            seen = [own[place] for place in places]
            columns["input_ids"].append(np.asarray(ids, dtype=np.int32))
            columns["word"].append(np.asarray(seen, dtype=np.int32))
            columns["place"].append(np.asarray(places, dtype=np.int32))
            tags = None if part.tags is None else part.tags[some.start + row]
            columns["tag"].append(
                np.asarray([IGNORED_LABEL if tags is None else tags[word] for word in seen], np.int32)
            )
    columns["length"] = [len(row) for row in columns["input_ids"]]
    columns["label_count"] = [0 if part.tags is None else len(row) for row in columns["word"]]
    return columns


def predicted_tags(predictions: Tensor, table: Table) -> list[np.ndarray]:
    """The tags at the first tokens of each row's words. `predictions`: of `TokenClassification.predict`."""
    tags = predictions[:, 1:].numpy().astype(np.int64)
    return [row[places] for row, places in zip(tags, table[range(len(table))]["place"], strict=True)]


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities that a sentence's tags mark, read as CoNLL's script and seqeval do.

    IOB2: B begins an entity, I continues it. An I without a beginning, or after another kind, begins one too, as in
    IOB1. E and S end one, as in IOBES.
    """
    found: list[Entity] = []
    before, open_kind = "O", ""
    for place, tag in enumerate(tags):
        prefix, _, kind = tag.partition("-")
        if prefix != "O":
            if prefix in "IE" and before in "BI" and kind == open_kind:
                found[-1] = (kind, found[-1][1], place)
            else:
                found.append((kind, place, place))
        before, open_kind = prefix, kind
    return set(found)


def entity_counts(expected: Sequence[str], predicted: Sequence[str]) -> tuple[int, int, int]:
    """The numbers of a sentence's entities that are right, that there are, and that are predicted."""
    of_own, of_others = entities(expected), entities(predicted)
    return len(of_own & of_others), len(of_own), len(of_others)


#: The same as `entity_metrics`, of the means of `entity_counts`.
_ENTITY_METRICS = {
    "precision": ratio(0, 2, 100),
    "recall": ratio(0, 1, 100),
    "f1": lambda means: 200 * means[0] / (means[1] + means[2]),
}


def entity_metrics(expected: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 over all entities of all sentences, in percent: kind and both ends must be right.

    0 where there is nothing to divide by, as in seqeval.
    """
    counts = [entity_counts(own, others) for own, others in zip(expected, predicted, strict=True)]
    correct, true, claimed = (sum(column) for column in zip(*counts, strict=True))
    return {
        "precision": 100 * correct / max(claimed, 1),
        "recall": 100 * correct / max(true, 1),
        "f1": 200 * correct / max(true + claimed, 1),
    }
