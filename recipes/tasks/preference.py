"""Preferences: a model learns which of two answers is better, directly (DPO) or as a reward model.

A row is a pair. Both answers run in one forward pass of twice as many rows, and a pair is one term of the loss.
"""

from __future__ import annotations

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from recipes.models.pretrained import Pretrained
from recipes.tasks.chat import Chats, ChatTokenizer, own_template
from recipes.tasks.generation import token_losses
from recipes.tasks.language_model import checked_causal, next_labels, next_token_logits
from recipes.tasks.pretrained_recipe import ModelSource, at_least_fp32
from recipes.tasks.row_metrics import ratio, row_metrics
from recipes.tasks.splits import DataSource, Splits
from recipes.tasks.transformer_recipe import Tokenised, TransformerRecipe, outputs, text_batch, truncation
from runner.data.cache import Cache, Progress
from runner.data.layout import padded
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared, Recipe
from runner.data.table import Table
from runner.errors import UserError, require
from runner.exact import rows_per_sample

_ANSWERS = ("chosen", "rejected")
#: Columns of the cached rows.
_TOKENS = tuple(f"{name}_{kind}" for name in _ANSWERS for kind in ("ids", "targets"))

#: Tokens, with padding, of which log-probabilities of the reference model are computed together.
_REFERENCE_TOKENS = 4096


@dataclass(frozen=True)
class Pairs:
    """The same prompts with their chosen and with their rejected answers.

    `compared`: whether there are rejected answers; without, the chosen ones stand in both places. `notes`: on how they
    were read, in sentences.
    """

    chosen: Chats
    rejected: Chats
    compared: bool = True
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.chosen)

    def samples(self) -> Iterator[str]:
        """Each pair as JSON, which is the same in every file that has it."""
        for pair in zip(self.chosen.samples(), self.rejected.samples(), strict=True):
            yield json.dumps(pair)


@dataclass(frozen=True)
class Preferences(Splits[Pairs]):
    def content(self) -> Iterable[bytes]:
        for part in (self.train, self.eval):
            yield b"%d pairs;" % len(part)
            for sample in part.samples():
                yield sample.encode() + b"\n"

    def train_texts(self) -> Sequence[str]:
        return [*self.train.chosen.texts(), *self.train.rejected.texts()]


@dataclass(frozen=True)
class Pairwise(TransformerRecipe[Preferences]):
    """A reward for each answer; that of the chosen one should be higher.

    `max_length`: tokens of the longer answer with its prompt; what is longer is truncated at the end. `chat_template`:
    a file with a template in Jinja, in place of the tokenizer's.
    """

    least_tokens: ClassVar[int] = 2
    #: Whether an answer without a token within `max_length` makes a pair worthless.
    needs_answers: ClassVar[bool]

    data: DataSource[Preferences]
    max_length: int = 1024
    chat_template: str | None = None

    @property
    def metric_names(self) -> Sequence[str]:
        return ["reward_accuracy", "reward_margin", "loss"]

    @property
    def minimised(self) -> Sequence[str]:
        return ["loss"]

    @abstractmethod
    def losses(self, predictions: Tensor) -> Tensor:
        """The loss of each pair, [pairs]. `predictions`: as `predict` returns them."""

    @abstractmethod
    def rewards(self, predictions: Tensor) -> Tensor:
        """The rewards of chosen and rejected answers, [pairs, 2]."""

    def facts(self, cache: Cache) -> DataFacts:
        pairs = self.data.read()
        own_template(self.chat_template)
        size = len(pairs.train), len(pairs.eval)
        return DataFacts(*size, pairs.digest, pairs.source, "pairs", notes=pairs.notes)

    def tokenised_by(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "chat_template": own_template(self.chat_template)}

    def tokenise(self, splits: Preferences, tokenizer: Any, progress: Progress) -> Tokenised:
        if (template := own_template(self.chat_template)) is not None:
            tokenizer.chat_template = template
        writer = ChatTokenizer(tokenizer, "completions")
        tables, lost = [], []
        for name, part in (("training", splits.train), ("evaluation", splits.eval)):
            columns, truncated = self._columns(writer, part, progress)
            if part.compared and len(part) and not any(columns["label_count"]):
                rule = f"no {name} pair has a token of both answers within it; use more"
                raise UserError(f"recipe.max_length={self.max_length} is invalid: {rule}")
            tables.append(columns)
            lost.append((truncated, len(part)))
        lost_pairs = truncation("pairs", "recipe.max_length", self.max_length, *lost)
        return Tokenised(tables[0], tables[1], {"truncated": lost_pairs})

    def _columns(self, writer: ChatTokenizer, pairs: Pairs, progress: Progress) -> tuple[dict[str, list[Any]], int]:
        """Tokens and targets of both answers, and how many pairs were truncated."""
        columns: dict[str, list[Any]] = {}
        longest = np.zeros(len(pairs), dtype=np.int64)
        for name, chats in zip(_ANSWERS, (pairs.chosen, pairs.rejected), strict=True):
            ids, targets = list[np.ndarray](), list[np.ndarray]()
            for number, row in enumerate(writer.rows(chats, progress)):
                longest[number] = max(longest[number], len(row.ids))
                is_target = row.is_target & (np.arange(len(row.ids)) >= len(row.prompt))
                is_target[0] = False  # there is no token before it
                ids.append(row.ids[: self.max_length])
                targets.append(is_target[: self.max_length].astype(np.int32))
            columns |= {f"{name}_ids": ids, f"{name}_targets": targets}
        answered = [
            not self.needs_answers or bool(chosen.any() and rejected.any())
            for chosen, rejected in zip(*(columns[f"{name}_targets"] for name in _ANSWERS), strict=True)
        ]
        columns["length"] = np.minimum(longest, self.max_length).tolist()
        columns["label_count"] = [int(one and pairs.compared) for one in answered]
        return columns, int((longest > self.max_length).sum())

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        if length is None:
            length = int(max(rows["length"]))
        batch = _pair_batch(rows, prepared.properties["pad_id"], length)
        # The number of the better answer, which is the first.
        counted = torch.from_numpy(np.array(rows["label_count"], dtype=np.int64))
        batch["labels"] = torch.where(counted > 0, 0, IGNORED_LABEL)
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        counts = batch["labels"] != IGNORED_LABEL
        # Without the others, whose losses may be infinite.
        losses = self.losses(self.predict(model, batch))
        return losses.masked_fill(~counts, 0.0).sum(), counts.sum()

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        """The share of pairs whose chosen answer has the higher reward; the mean of the difference and of the loss."""
        return {name: float(values.mean()) for name, values in self.row_metrics(predictions, table).items()}

    def row_metrics(self, predictions: Tensor, table: Table) -> dict[str, Tensor]:
        counted = torch.tensor(np.asarray(table.column("label_count")), dtype=torch.float64)
        margins, losses = self._margins(predictions), self.losses(predictions)
        values = {"reward_accuracy": 100.0 * (margins > 0), "reward_margin": margins, "loss": losses}
        counts = torch.stack([*(one.double() * counted for one in values.values()), counted], dim=1)
        return row_metrics(counts, {name: ratio(number, len(values)) for number, name in enumerate(values)})

    def _margins(self, predictions: Tensor) -> Tensor:
        chosen, rejected = self.rewards(predictions).unbind(1)
        return chosen - rejected

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        """Prompt and answers of each pair with what is predicted for both, and the margin between their rewards."""
        pairs: Pairs = self.data.read().eval
        texts = [list(map(_prompt_and_answer, chats.rows)) for chats in (pairs.chosen, pairs.rejected)]
        columns: dict[str, Sequence[Any]] = {"prompt": [prompt for prompt, _ in texts[0]]}
        for place, name in enumerate(_ANSWERS[: 1 + pairs.compared]):
            columns[name] = [answer for _, answer in texts[place]]
            columns |= {f"{name}_{what}": values.tolist() for what, values in self.shown(predictions, place).items()}
        return {**columns, **({"margin": self._margins(predictions).tolist()} if pairs.compared else {})}

    def shown(self, predictions: Tensor, place: int) -> dict[str, Tensor]:
        """Named values of the chosen (0) or the rejected answers (1) for people, each [pairs]."""
        return {"reward": self.rewards(predictions)[:, place]}


#: objective -> the loss of each pair, from the difference of rewards ÷ beta, by answer and by token, and beta.
_LOSSES: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "dpo": lambda whole, by_token, beta: -logsigmoid(beta * whole),
    "ipo": lambda whole, by_token, beta: (by_token - 1 / (2 * beta)) ** 2,
}


@dataclass(frozen=True)
class Preference(Pairwise):
    """Direct preference optimisation (Rafailov et al. 2023); with `objective=ipo` that of Azar et al. 2023.

    The reward of an answer is `beta` × (its log-probability − that by the reference model): the model that training
    starts from, or `reference`, a folder or a name on the Hub with the same tokenizer. The reference's
    log-probabilities are columns of the cached rows, computed once, in fp32 and without dropout, by the worker that
    tokenises. The entry is named by the reference's weights. So they are the same numbers for any number of workers,
    after resuming and in later runs with other settings, a step costs no second model, and none is in memory. A
    model with an adapter has the same reference: the model that the adapter was added to.
    """

    task: ClassVar[str] = "preference"
    head: ClassVar[str] = "CausalLM"
    needs_answers: ClassVar[bool] = True

    objective: str = "dpo"
    beta: float = 0.1
    reference: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.objective in _LOSSES, "recipe.objective", self.objective, f"use {' or '.join(_LOSSES)}")
        require(self.beta > 0, "recipe.beta", self.beta, "use more than 0, such as 0.1")

    @property
    def _reference(self) -> ModelSource:
        if self.reference is None:
            return self.model
        return Pretrained(self.reference) if isinstance(self.reference, str) else self.reference

    def check_model(self) -> None:
        super().check_model()
        if self.reference is not None:
            self._reference.check()
            self._reference.check_head(self.head)

    def from_saved(self, model: str, file: str | None = None) -> Recipe:
        saved = super().from_saved(model, file)
        assert isinstance(saved, Preference)
        return dataclasses.replace(saved, reference=self._reference)

    def tokenised_by(self) -> dict[str, Any]:
        return {**super().tokenised_by(), "reference": self._reference.weights_identity()}

    def tokenise(self, splits: Preferences, tokenizer: Any, progress: Progress) -> Tokenised:
        found = super().tokenise(splits, tokenizer, progress)
        model = self._reference.build_model(self.head, len(tokenizer), tokenizer.pad_token_id).eval()
        # A worker that trains on a GPU has initialised it by now.
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        model = checked_causal(model).to(device)
        tables = [
            {**columns, **_reference_columns(model, columns, tokenizer.pad_token_id, device, progress)}
            for columns in (found.train, found.eval)
        ]
        return Tokenised(tables[0], tables[1], found.properties)

    def build_model(self, prepared: Prepared) -> nn.Module:
        return self.unpad(checked_causal(self.built(prepared)), prepared)

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        of_answers = [np.array(rows[f"{name}_reference"]) for name in _ANSWERS]
        return {**super().collate(rows, prepared, length), "reference": torch.from_numpy(np.stack(of_answers, axis=1))}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Log-probabilities of both answers, the reference's, and the numbers of their tokens; [pairs, 6]."""
        log_probs, tokens = answer_log_probs(model, batch)
        others = (batch["reference"], tokens)
        return torch.cat([log_probs, *(one.to(log_probs.dtype) for one in others)], dim=1)

    def losses(self, predictions: Tensor) -> Tensor:
        log_probs, reference, tokens = predictions.split(2, dim=1)
        whole, by_token = log_probs - reference, (log_probs - reference) / tokens
        return _LOSSES[self.objective](whole[:, 0] - whole[:, 1], by_token[:, 0] - by_token[:, 1], self.beta)

    def rewards(self, predictions: Tensor) -> Tensor:
        return self.beta * (predictions[:, :2] - predictions[:, 2:4])

    def shown(self, predictions: Tensor, place: int) -> dict[str, Tensor]:
        return {"log_probability": predictions[:, place], **super().shown(predictions, place)}


@dataclass(frozen=True)
class Reward(Pairwise):
    """A model with one output, the reward of a text, learned from pairs (Bradley and Terry 1952)."""

    task: ClassVar[str] = "reward"
    head: ClassVar[str] = "SequenceClassification"
    needs_answers: ClassVar[bool] = False

    def check_model(self) -> None:
        super().check_model()
        self.model.check_head(self.head, 1)

    def build_model(self, prepared: Prepared) -> nn.Module:
        model = self.built(prepared, num_labels=1)
        config: Any = model.config
        config.problem_type = "regression"  # pipelines then return the reward as it is
        return self.unpad(model, prepared)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """The rewards of both answers, [pairs, 2]."""
        with rows_per_sample(2):
            scores = outputs(model, _answers(batch)).logits
        return at_least_fp32(scores).view(-1, 2)

    def losses(self, predictions: Tensor) -> Tensor:
        return -logsigmoid(self._margins(predictions))

    def rewards(self, predictions: Tensor) -> Tensor:
        return predictions


def _pair_batch(rows: Mapping[str, Sequence[Any]], pad_id: int, length: int) -> Batch:
    """The tokens, attention mask and targets of both answers of each pair, each [pairs, length]."""
    batch: Batch = {}
    for name in _ANSWERS:
        text = text_batch({"input_ids": rows[f"{name}_ids"]}, pad_id, length)
        text["targets"] = padded(rows[f"{name}_targets"], 0, length)
        batch |= {f"{name}_{key}": tensor for key, tensor in text.items()}
    return batch


def _answers(batch: Batch) -> Batch:
    """Tensors of [2 × pairs, length]: the chosen and the rejected answer of the first pair, and so on."""
    names = ("input_ids", "attention_mask", "targets")
    return {
        name: torch.stack([batch[f"{answer}_{name}"] for answer in _ANSWERS], dim=1).flatten(0, 1) for name in names
    }


def answer_log_probs(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The log-probabilities of both answers to their prompt and the numbers of their tokens, [pairs, 2] each."""
    answers = _answers(batch)
    labels = torch.where(answers["targets"] > 0, answers["input_ids"], IGNORED_LABEL)
    with rows_per_sample(2):
        logits = next_token_logits(model, answers)
    losses, is_target = token_losses(logits, next_labels({"labels": labels}))
    return -losses.sum(1).view(-1, 2), is_target.sum(1).view(-1, 2)


@torch.no_grad()
def _reference_columns(
    model: nn.Module, columns: Mapping[str, Sequence[Any]], pad_id: int, device: torch.device, progress: Progress
) -> dict[str, Sequence[float]]:
    """The log-probabilities of both answers of each pair, as columns of floats."""
    found = torch.zeros((len(columns["length"]), 2), dtype=torch.float64)
    order = np.argsort(columns["length"], kind="stable").tolist()
    while order:
        longest = columns["length"][order[-1]]
        some = order[-max(1, _REFERENCE_TOKENS // (2 * longest)) :]
        del order[-len(some) :]
        rows = {name: [columns[name][row] for row in some] for name in _TOKENS}
        batch = {name: tensor.to(device) for name, tensor in _pair_batch(rows, pad_id, longest).items()}
        found[some] = answer_log_probs(model, batch)[0].cpu().double()
        progress(len(found) - len(order), len(found))
    return {f"{name}_reference": found[:, place].tolist() for place, name in enumerate(_ANSWERS)}


def _prompt_and_answer(row: Mapping[str, Any]) -> tuple[str, str]:
    """For people: the last message before the answer, or the prompt; and the answer."""
    if "messages" not in row:
        return row["prompt"], row["completion"]
    before = row["messages"][-2:-1]
    return (before[0].get("content") or "") if before else "", row["messages"][-1].get("content") or ""
