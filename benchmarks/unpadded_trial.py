"""A trial: an encoder's layers on the tokens of a batch alone, with padding for attention only, without its own code.

Usage: python -m benchmarks.unpadded_trial MODEL FILE.tsv (texts in the last column).

A hook before the first layer removes padding, one after the last puts it back, and a function that transformers calls
for attention pads queries, keys and values. Both ways train on the same batches in turns.
"""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.side_by_side import spread

ROUNDS, STEPS, BATCH = 7, 8, 32


class Layout:
    """Where the tokens of the current batch are in the padded one."""

    def set(self, mask: Tensor) -> None:
        self.rows, self.length = mask.shape
        self.places = mask.flatten().nonzero()[:, 0]
        self.mask = mask.bool()[:, None, None, :]

    def padded(self, tokens: Tensor) -> Tensor:
        """[tokens, …] → [rows, length, …], with zeros."""
        flat = tokens.new_zeros(self.rows * self.length, *tokens.shape[1:]).index_copy(0, self.places, tokens)
        return flat.view(self.rows, self.length, *tokens.shape[1:])

    def unpadded(self, rows: Tensor) -> Tensor:
        """The inverse."""
        return rows.flatten(0, 1).index_select(0, self.places)


def unpad(model: Any, layout: Layout) -> None:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any
    ) -> tuple[Tensor, None]:
        parts = (layout.padded(one[0].transpose(0, 1)).transpose(1, 2) for one in (query, key, value))
        dropout, scale = settings.get("dropout", 0.0), settings.get("scaling")
        out = scaled_dot_product_attention(*parts, attn_mask=layout.mask, dropout_p=dropout, scale=scale)
        return layout.unpadded(out.transpose(1, 2)).unsqueeze(0), None

    def before(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return (layout.unpadded(inputs[0]).unsqueeze(0), *inputs[1:]), named

    def after(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (layout.padded(output[0][0]), *output[1:])
        return layout.padded(output[0])

    AttentionInterface.register("unpadded", attention)
    model.set_attn_implementation("unpadded")
    layers = model.base_model.encoder.layer
    layers[0].register_forward_pre_hook(before, with_kwargs=True)
    layers[-1].register_forward_hook(after)


def main(name: str, file: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    with Path(file).open(encoding="utf-8", newline="") as lines:
        texts = [row[-1] for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]
    batches = [
        tokenizer(texts[i : i + BATCH], padding=True, truncation=True, max_length=128, return_tensors="pt")
        for i in range(0, ROUNDS * STEPS * BATCH, BATCH)
    ]
    layout, models = Layout(), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(AutoModelForSequenceClassification.from_pretrained(name, num_labels=2).float())
    unpad(models[1], layout)
    layout.set(batches[0]["attention_mask"])
    with torch.no_grad():
        padded, unpadded = (model.eval()(**batches[0]).logits for model in models)
    share = sum(float(one["attention_mask"].float().mean()) for one in batches) / len(batches)
    difference = float((padded - unpadded).abs().max())
    print(f"largest difference of logits {difference:.1e}; {share:.0%} of positions are tokens")
    print("| precision | padded, samples/s | unpadded, samples/s | ratio |\n| --- | --- | --- | --- |")
    for dtype in (torch.float32, torch.bfloat16):
        optimizers = [torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True) for model in models]
        speeds: list[list[float]] = [[], []]
        for number in range(ROUNDS):
            for model, optimizer, found in zip(models, optimizers, speeds, strict=True):
                start = time.perf_counter()
                for batch in batches[number * STEPS :][:STEPS]:
                    layout.set(batch["attention_mask"])
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                        loss = model(**batch, labels=torch.zeros(BATCH, dtype=torch.int64)).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(STEPS * BATCH / (time.perf_counter() - start))
        ratios = [after / before for before, after in zip(*speeds, strict=True)]
        print(f"| {dtype} | {spread(speeds[0])} | {spread(speeds[1])} | {spread(ratios)} |")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
