"""Preferences and rewards beside TRL: `python -m benchmarks.preferences_beside_trl MODEL ROWS.jsonl`.

MODEL: a folder with a causal language model without dropout; ROWS: with the texts prompt, chosen and rejected. Needs
`trl`, of which nothing else needs to know. Compares tokens, targets, losses and gradients of batches of eight pairs,
and the time of a forward and backward pass, alternating; TRL also has its log-probabilities of the reference before.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from recipes.models.pretrained import Pretrained
from recipes.sources.preferences import PreferenceFiles
from recipes.tasks.preference import Pairwise, Preference, Reward
from runner.data.cache import Cache
from runner.data.recipe import Prepared

PAIRS, REPEATS, MAX_LENGTH, BETA = 8, 15, 512, 0.1


def changed(model: Any, dtype: torch.dtype) -> Any:
    """The model after some training, as if: its rewards are not 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    return model.to(dtype).train()


def trainer_of(kind: str, model: Any, rows: Dataset, tokenizer: Any, dtype: torch.dtype) -> Any:
    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": PAIRS,
        "max_length": MAX_LENGTH,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
    }
    if kind == "reward":
        settings = RewardConfig(**common, disable_dropout=True)
        return RewardTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer)
    loss = {"dpo": "sigmoid"}.get(kind, kind)
    settings = DPOConfig(**common, beta=BETA, loss_type=[loss], precompute_ref_log_probs=True)
    return DPOTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def compare(kind: str, folder: str, file: str, dtype: torch.dtype) -> dict[str, Any]:
    data, source = PreferenceFiles(train=file, eval=file), Pretrained(folder)
    recipe: Pairwise = (
        Reward(data=data, model=source, max_length=MAX_LENGTH)
        if kind == "reward"
        else Preference(data=data, model=source, max_length=MAX_LENGTH, objective=kind, beta=BETA)
    )
    cache = Cache(Path(tempfile.mkdtemp()))
    prepared = Prepared.load(recipe.prepare(cache, recipe.facts(cache)))
    rows = Dataset.from_list([json.loads(line) for line in Path(file).read_text().splitlines()])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    more = {"num_labels": 1} if kind == "reward" else {}
    torch.manual_seed(0)
    start = auto.from_pretrained(folder, dtype=torch.float32, **more)
    start.config.pad_token_id = tokenizer.pad_token_id
    trainer = trainer_of(kind, start, rows, tokenizer, dtype)
    batches = list(trainer.get_train_dataloader().__class__(  # in order, where the trainer's own shuffles
        trainer.train_dataset, batch_size=PAIRS, collate_fn=trainer.data_collator
    ))  # fmt: skip
    model = changed(start, dtype)
    worst: dict[str, float] = {"tokens": 0.0, "loss": 0.0, "gradient": 0.0}
    seconds: dict[str, list[float]] = {"runner": [], "trl": []}
    for repeat in range(REPEATS):
        for number, theirs in enumerate(batches):
            ids = range(number * PAIRS, min((number + 1) * PAIRS, len(rows)))
            ours = recipe.collate(prepared.train[list(ids)], prepared)
            found: dict[str, tuple[float, dict[str, Tensor]]] = {}
            for name in ("runner", "trl") if (repeat + number) % 2 else ("trl", "runner"):
                model.zero_grad()
                began = time.perf_counter()
                if name == "runner":
                    total, count = recipe.loss(model, ours)
                    loss = total / count
                else:
                    loss = trainer.compute_loss(model, dict(theirs))
                loss.backward()
                seconds[name].append(time.perf_counter() - began)
                found[name] = float(loss.detach()), gradients(model)
            if repeat == 0:
                pairs = torch.cat([ours["chosen_input_ids"], ours["rejected_input_ids"]])
                mask = torch.cat([ours["chosen_attention_mask"], ours["rejected_attention_mask"]])
                differs = [(pairs * mask != theirs["input_ids"] * theirs["attention_mask"]).sum()]
                if kind != "reward":
                    targets = torch.cat([ours["chosen_targets"], ours["rejected_targets"]])
                    differs.append((targets != theirs["completion_mask"]).sum())
                worst["tokens"] += float(sum(differs))
                worst["loss"] = max(worst["loss"], abs(found["runner"][0] / found["trl"][0] - 1))
                of = [torch.cat([one.flatten() for one in found[name][1].values()]) for name in ("runner", "trl")]
                worst["gradient"] = max(worst["gradient"], float((of[0] - of[1]).norm() / of[1].norm()))
    ratios = [trl / runner for trl, runner in zip(seconds["trl"], seconds["runner"], strict=True)][len(batches) :]
    quartiles = statistics.quantiles(ratios, n=4)
    return {"objective": kind, "dtype": str(dtype), **worst, "times as fast as TRL, quartiles": quartiles}


if __name__ == "__main__":
    for kind in ("dpo", "ipo", "reward"):
        for dtype in (torch.float64, torch.float32):
            print(json.dumps(compare(kind, *sys.argv[1:3], dtype)), flush=True)
