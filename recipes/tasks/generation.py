"""What the tasks that train a model to write text have in common: scores of target tokens, and generated text."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from recipes.tasks.pretrained_recipe import SplitsType, check_label_smoothing
from recipes.tasks.row_metrics import OF_LOSS, ratio, row_metrics
from recipes.tasks.transformer_recipe import TransformerRecipe
from runner.data.recipe import IGNORED_LABEL, Batch
from runner.data.table import Table
from runner.errors import require

#: In the folder of an evaluation table: texts, which a table of integers cannot hold.
_TEXTS = "texts.json"

#: Of the predictions of a row: the sum of its targets' losses, their number, and how many were predicted.
_SCORES = 3

#: Metrics of generated text.
_OF_TEXT = ("exact_match", "rouge1", "rouge2", "rougeL", "bleu")

#: Settings in a model's generation_config.json, of sampling and of lengths.
_IGNORED = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("max_length", "min_length", "min_new_tokens"),
)


@dataclass(frozen=True, kw_only=True)
class TextGeneration(TransformerRecipe[SplitsType]):
    """The metrics are those of target tokens, each predicted from the true ones before it.

    `generate`: an evaluation also generates a text for each row, by beam search of `num_beams`, 1 being the most
    probable token each time, and compares it with the true one. A text has at most `max_new_tokens` tokens.
    """

    generate: bool = False
    max_new_tokens: int = 128
    num_beams: int = 1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_new_tokens >= 1, "recipe.max_new_tokens", self.max_new_tokens, "use at least 1 token")
        require(self.num_beams >= 1, "recipe.num_beams", self.num_beams, "use at least 1")
        check_label_smoothing(self.label_smoothing)

    @property
    def metric_names(self) -> Sequence[str]:
        return ["perplexity", "loss", "token_accuracy", *(_OF_TEXT if self.generate else ())]

    @property
    def minimised(self) -> Sequence[str]:
        return ["perplexity", "loss"]

    def for_predictions(self) -> TextGeneration:
        return dataclasses.replace(self, generate=True)

    @abstractmethod
    def scored(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits, at least fp32 of shape [rows, length, vocabulary], and the token that each predicts, or no label."""

    @abstractmethod
    def generation_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """What `generate` of transformers continues or answers, padded so that rows do not depend on each other."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        losses, is_target = token_losses(*self.scored(model, batch), self.label_smoothing)
        return losses.sum(), is_target.sum()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Loss sum, targets and predicted targets of each row, and its generated tokens, fp64 of shape [rows, …]."""
        logits, labels = self.scored(model, batch)
        losses, is_target = token_losses(logits, labels)
        correct = is_target & (logits.argmax(-1) == labels)
        scores = torch.stack([part.double().sum(1) for part in (losses, is_target, correct)], dim=1)
        if not self.generate:
            return scores
        tokens = generated(model, self.generation_inputs(batch), self.max_new_tokens, self.num_beams)
        return torch.cat([scores, tokens.double()], dim=1)

    def metrics(self, predictions: Tensor, table: Table) -> dict[str, float]:
        """The mean loss of all targets in nats, its exponential, the predicted share; scores of generated texts."""
        loss_sum, targets, correct = predictions[:, :_SCORES].double().sum(0)
        loss = loss_sum / targets
        metrics = {
            "perplexity": float(loss.exp()),
            "loss": float(loss),
            "token_accuracy": 100 * float(correct / targets),
        }
        if self.generate:
            metrics |= text_metrics(_decoded(predictions, table), _read_texts(table)["reference"])
        return metrics

    def row_metrics(self, predictions: Tensor, table: Table) -> dict[str, Tensor]:
        return row_metrics(predictions[:, :_SCORES], {**OF_LOSS, "token_accuracy": ratio(2, 1, 100)})

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        """Input, generated and true text of each row, and mean loss and perplexity of its targets, if it has any."""
        texts = _read_texts(table)
        columns: dict[str, Sequence[Any]] = {"input": texts["input"], "generated": _decoded(predictions, table)}
        if any(text is not None for text in texts["reference"]):
            columns["reference"] = texts["reference"]
        if predictions[:, 1].any():
            losses = predictions[:, 0] / predictions[:, 1]  # nan without targets
            for name, values in (("loss", losses), ("perplexity", losses.exp())):
                columns[name] = [None if math.isnan(value) else value for value in values.tolist()]
        return columns


def token_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The loss of the label at each position, [rows, length], 0 without one; and whether it has one.

    `logits`: [rows, length, vocabulary]. `label_smoothing`: the share of each target's weight that all tokens get.
    """
    how: Any = {"ignore_index": IGNORED_LABEL, "reduction": "none", "label_smoothing": label_smoothing}
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), **how)
    return losses.view_as(labels), labels != IGNORED_LABEL


def generated(model: Any, inputs: Mapping[str, Tensor], max_new_tokens: int, num_beams: int) -> Tensor:
    """The tokens that the model generates, and -1 after a text that ended; int64 of shape [rows, max_new_tokens].

    No random numbers are drawn: of the model's own settings of generation, those of sampling and lengths are ignored.
    """
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
    own = owner.generation_config
    config = copy.deepcopy(own)
    config.update(**dict.fromkeys(_IGNORED))
    config.update(
        do_sample=False, num_beams=num_beams, max_new_tokens=max_new_tokens, pad_token_id=model.config.pad_token_id
    )
    owner.generation_config = config  # as an argument of `generate`, it would be completed with the model's own
    try:
        # With `compile=true` each layer would need a separate program, which reads its part of the cache.
        with torch.compiler.set_stance("force_eager"):
            tokens = model.generate(**inputs)
    finally:
        owner.generation_config = own
    # Decoders begin with a token that is not generated; language models repeat their input.
    tokens = tokens[:, 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1] :]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    is_end = torch.isin(tokens, torch.tensor([end for end in ends if end is not None], device=tokens.device))
    tokens = tokens.masked_fill(is_end.cumsum(1) > 0, -1)
    return pad(tokens, (0, max_new_tokens - tokens.shape[1]), value=-1)


def text_metrics(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Exact match, ROUGE's F1 and BLEU in percent, as torchmetrics computes them.

    BLEU has sacreBLEU's tokens and no smoothing: it is 0 if no four tokens in a row are right in any text.
    """
    from torchmetrics.functional.text import rouge_score, sacre_bleu_score

    keys = ("rouge1", "rouge2", "rougeL")
    rouge = rouge_score(list(texts), list(references), rouge_keys=keys)
    exact = [text == reference.strip() for text, reference in zip(texts, references, strict=True)]
    return {
        "exact_match": 100 * float(np.mean(exact)),
        **{key: 100 * float(rouge[f"{key}_fmeasure"]) for key in keys},
        "bleu": 100 * float(sacre_bleu_score(list(texts), [[reference] for reference in references])),
    }


def texts_file(texts: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
    """The file next to an evaluation table that says what each row is about, and the text to generate if known."""
    return {_TEXTS: {"input": [one for one, _ in texts], "reference": [one for _, one in texts]}}


def _read_texts(table: Table) -> dict[str, list[Any]]:
    texts: dict[str, list[Any]] = json.loads((table.folder / _TEXTS).read_text(encoding="utf-8"))
    return texts


def _decoded(predictions: Tensor, table: Table) -> list[str]:
    """The generated texts, without special tokens and spaces around them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(table.folder.parent / "tokenizer")
    rows = predictions[:, _SCORES:].long().tolist()
    texts = [tokenizer.decode([token for token in row if token >= 0], skip_special_tokens=True) for row in rows]
    return [text.strip() for text in texts]
