"""The settings that all runs share: data, model, learning rate and epochs."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sync_table.setups import Setup

TRAIN_SAMPLES = 2000
#: Samples of one worker's forward pass, as published; also the reference batch of the base learning rate.
MICRO_BATCH = 8
BASE_LR = 5.0e-5
EPOCHS = 5
_SUBSET_SEED = 0
#: More steps than any run has, so that it is evaluated at its end only; and a multiple of every k.
_NEVER = 2**20
_LABEL = 1


@dataclass(frozen=True)
class Experiment:
    """`train`, `dev`: TSV files with CoLA's columns, `train` the subset; `model`: a folder, and `model_name` what it is
    called in a digest, since a folder lies elsewhere on the next machine; `base_lr`: at `MICRO_BATCH` samples."""

    train: Path
    dev: Path
    model: Path
    model_name: str
    base_lr: float = BASE_LR
    epochs: int = EPOCHS

    @property
    def data_digest(self) -> str:
        return _digest([_content(self.train), _content(self.dev), self.model_name])

    def overrides(self, setup: Setup) -> list[str]:
        """The overrides of this setup, without seed and folder."""
        files = [f"recipe.data.train={self.train}", f"recipe.data.eval={self.dev}", f"recipe.model.name={self.model}"]
        return [*files, *self._numbers(), *setup.overrides]

    def digest(self, setup: Setup) -> str:
        """Of settings and data; independent of where the files are."""
        return _digest([self.data_digest, *self._numbers(), *setup.overrides])

    def _numbers(self) -> list[str]:
        batch = ["batch=per_device", f"batch.micro_batch={MICRO_BATCH}", f"scaling.reference_batch={MICRO_BATCH}"]
        rest = [f"optimizer.lr={self.base_lr:g}", f"epochs={self.epochs}", f"evaluation.every_steps={_NEVER}"]
        return ["recipe=cola", *batch, *rest, "tracking=none"]


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(facts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(facts)).encode()).hexdigest()[:12]


def write_subset(source: Path, target: Path, samples: int = TRAIN_SAMPLES) -> None:
    """Always the same lines of `source`, in their order there."""
    lines = _lines(source)
    if len(lines) < samples:
        raise SystemExit(f"{source} has {len(lines):,} lines, and the table needs {samples:,}")
    picked = sorted(random.Random(_SUBSET_SEED).sample(range(len(lines)), samples))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(f"{lines[i]}\n" for i in picked), encoding="utf-8")


def majority(dev: Path) -> float:
    """The accuracy in percent of always predicting the majority class."""
    labels = [line.split("\t")[_LABEL] for line in _lines(dev)]
    return 100 * max(labels.count(label) for label in set(labels)) / len(labels)


def _lines(path: Path) -> list[str]:
    # Not splitlines(), which also splits at characters that sentences may contain.
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]
