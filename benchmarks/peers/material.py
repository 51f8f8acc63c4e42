"""What all variants train on, made once: models with all their weights, and tokenised rows in the runner's order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from benchmarks.peers.cells import Task
from benchmarks.peers.trained_tokenizer import special_ids, trained_tokenizer
from runner.config.compose import compose, settings
from runner.config.instantiate import build_recipe
from runner.data.cache import Cache
from runner.data.recipe import Prepared
from runner.plan.order import permutation

#: Transformers' class for each task, which peers use as well.
MODELS = {
    "cola": AutoModelForSequenceClassification,
    "squad": AutoModelForQuestionAnswering,
    "gpt2": AutoModelForCausalLM,
}
#: Small, but of GPT-2's architecture.
_GPT2 = {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": 256, "vocab_size": 8192}
#: Evaluation is not measured, and happens once per run of the runner.
_EVAL_ROWS = 16
_EVAL_LINES = 20
#: Arguments of transformers' models -> columns of the runner's tables.
_TOKENS = {"input_ids": "input_ids", "token_type_ids": "token_type_ids"}
_ARGUMENTS = {
    "cola": {**_TOKENS, "labels": "label"},
    "squad": {**_TOKENS, "start_positions": "answer_first", "end_positions": "answer_last"},
    "gpt2": _TOKENS,
}


@dataclass(frozen=True)
class Sources:
    """`train`, `dev`: CoLA's raw files. `squad`: in SQuAD's format. `model`: an encoder's folder."""

    train: Path
    dev: Path
    squad: Path
    model: Path


@dataclass(frozen=True)
class Material:
    """`work`: the folder in which everything is made, and in which the runner's outputs and cache are."""

    sources: Sources
    work: Path

    def model(self, task: Task) -> Path:
        return self.work / f"{task.name}-model"

    def rows(self, task: Task, seed: int) -> Path:
        """JSON: the training rows, in the order in which the runner reads them with this seed."""
        return self.work / f"{task.name}-rows-{seed}.json"

    def shapes(self, task: Task) -> Path:
        """JSON: the sizes of the model's matrix products and weights. See `_shapes`."""
        return self.work / f"{task.name}-shapes.json"

    def overrides(self, task: Task) -> list[str]:
        """The settings of the runner that say what is trained."""
        sources = self.sources
        train, evaluation = {
            "cola": (sources.train, sources.dev),
            "squad": (sources.squad, sources.squad),
            "gpt2": (self.work / "train.txt", self.work / "eval.txt"),
        }[task.name]
        return [
            f"recipe={task.recipe}",
            f"recipe.data.train={train}",
            f"recipe.data.eval={evaluation}",
            f"recipe.data.max_eval_samples={_EVAL_ROWS}",
            f"recipe.model.name={self.model(task)}",
            f"batch.global_batch={task.batch}",
            f"cache_dir={self.work / 'cache'}",
        ]

    def make(self, task: Task, seeds: Sequence[int]) -> None:
        """The model's folder, and the rows of each seed."""
        torch.manual_seed(0)
        (self._gpt2 if task.name == "gpt2" else self._encoder)(task)
        self.shapes(task).write_text(json.dumps(_shapes(MODELS[task.name].from_pretrained(self.model(task)))))
        config = settings(compose(self.overrides(task)))
        recipe, cache = build_recipe(config.recipe, ()), Cache(self.work / "cache")
        table = Prepared.load(recipe.prepare(cache, recipe.facts(cache))).train
        for seed in seeds:
            order = permutation(len(table), seed, 0)
            self.rows(task, seed).write_text(json.dumps(_named(task, table[order.tolist()])), encoding="utf-8")

    def _encoder(self, task: Task) -> None:
        """Also the new weights of the head are the same for all variants."""
        model = MODELS[task.name].from_pretrained(self.sources.model)
        model.save_pretrained(self.model(task))
        AutoTokenizer.from_pretrained(self.sources.model).save_pretrained(self.model(task))

    def _gpt2(self, task: Task) -> None:
        """Text: the paragraphs and questions of SQuAD."""
        articles = json.loads(self.sources.squad.read_text(encoding="utf-8"))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        texts = [" ".join([one["context"], *(qa["question"] for qa in one["qas"])]) for one in paragraphs]
        lines = [" ".join(text.split()) for text in texts]
        for name, part in (("train", lines[_EVAL_LINES:]), ("eval", lines[:_EVAL_LINES])):
            (self.work / f"{name}.txt").write_text("\n".join(part) + "\n", encoding="utf-8")
        GPT2LMHeadModel(GPT2Config(**_GPT2, **special_ids("gpt2"))).save_pretrained(self.model(task))
        trained_tokenizer("gpt2", _GPT2["vocab_size"], lines).save_pretrained(self.model(task))


def _shapes(model: PreTrainedModel) -> dict[str, Any]:
    """`linears`: [per, inputs, outputs] of each linear layer, where `per` is what its input has a row for.

    `attention`: [layers, heads, size of a head, whether it is causal]. `weights`: the shape of each.
    """
    rows, length, found = 2, 7, []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        per = {rows: "sample", rows * length: "token"}[inputs[0].shape[:-1].numel()]
        found.append([per, inputs[0].shape[-1], output.shape[-1]])

    for layer in model.modules():
        if isinstance(layer, nn.Linear | Conv1D):
            layer.register_forward_hook(note)
    model(torch.ones(rows, length, dtype=torch.int64))
    of = model.config
    attention = [of.num_hidden_layers, of.num_attention_heads, of.hidden_size // of.num_attention_heads]
    return {
        "linears": found,
        "attention": [*attention, of.model_type == "gpt2"],
        "weights": [list(weight.shape) for weight in model.parameters()],
    }


def _named(task: Task, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows with the names of transformers' arguments."""
    kept = {new: columns[old] for new, old in _ARGUMENTS[task.name].items() if old in columns}
    rows = [
        {name: np.asarray(value).tolist() for name, value in zip(kept, values, strict=True)}
        for values in zip(*kept.values(), strict=True)
    ]
    if task.name != "gpt2":
        return rows
    longest = max(len(row["input_ids"]) for row in rows)  # the end of the text is shorter: blocks need no padding
    return [{**row, "labels": row["input_ids"]} for row in rows if len(row["input_ids"]) == longest]
