"""What all data sources share: a training and an evaluation part, from local files or from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from recipes.sources.rows import NO_DATA, Rows, file_rows, hub_rows
from runner.errors import UserError, require

Part = Literal["train", "eval"]


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    `train`, `eval`: a file, a pattern or a folder each, as in `file_rows`. Without them `hub_name` is a data set of the
    Hub: `hub_config` is a part of it, `hub_revision` a branch, tag or commit, and `hub_train`, `hub_eval` are splits or
    parts of splits, such as `train[:10%]`. `max_train_samples`, `max_eval_samples`: keep a random subset of the samples
    in their order, which `subset_seed` determines; None for all.
    """

    train: str | None = None
    eval: str | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    subset_seed: int = 0
    hub_name: str | None = None
    hub_config: str | None = None
    hub_revision: str | None = None
    hub_train: str = "train"
    hub_eval: str = "validation"

    #: What `max_…_samples` counts.
    unit: ClassVar[str] = "row"

    def __post_init__(self) -> None:
        for name in ("max_train_samples", "max_eval_samples"):
            count = getattr(self, name)
            require(count is None or count >= 1, f"recipe.data.{name}", count, f"use at least 1 {self.unit}, or null")
        require(self.subset_seed >= 0, "recipe.data.subset_seed", self.subset_seed, "must be at least 0")

    def check_both(self) -> None:
        """Check that there are both files or neither, and some source. Raises UserError."""
        if (self.train is None) != (self.eval is None):
            given, missing = ("eval", "train") if self.train is None else ("train", "eval")
            raise UserError(
                f"recipe.data.{missing}=null is invalid with recipe.data.{given}={getattr(self, given)}: set both files"
                + (f", or neither to download {self.hub_name}" if self.hub_name else "")
            )
        if self.train is None and not self.hub_name:
            raise UserError(NO_DATA)

    @property
    def notes(self) -> tuple[str, ...]:
        """What may surprise about the choice of data, in sentences."""
        same = self.train == self.eval if self.train is not None else self.hub_train == self.hub_eval
        return ("the training data are also the evaluation data: metrics say nothing about new data",) if same else ()

    def file(self, part: Part, file: str | None = None) -> tuple[str, str] | None:
        """The name of a part's file and `setting=name`, or None for a part from the Hub. Raises UserError without both.

        `file`: in place of the configured one.
        """
        if file is not None:
            return file, f"--input={file}"
        configured: str | None = getattr(self, part)
        if configured is not None:
            return configured, f"recipe.data.{part}={configured}"
        if not self.hub_name:
            raise UserError(f"recipe.data.{part}=null has no data: set it to a local file")
        return None

    def split(self, part: Part) -> str:
        """The split of the Hub's data set, or the part of one."""
        return self.hub_train if part == "train" else self.hub_eval

    def rows(self, part: Part, file: str | None = None, header: bool = True) -> Rows:
        """The rows of a part, of which none is left out. Arguments as of `file` and `file_rows`."""
        found = self.file(part, file)
        if found is not None:
            return file_rows(*found, header)
        assert self.hub_name is not None
        return hub_rows(self.hub_name, self.hub_config, self.split(part), self.hub_revision)

    def described(self, *parts: Part) -> str:
        """Where these parts come from, for people."""
        files = [found[0] for part in parts if (found := self.file(part)) is not None]
        if files:
            return ", ".join(files)
        config = f"/{self.hub_config}" if self.hub_config else ""
        return f"Hub: {self.hub_name}{config}" + (f"@{self.hub_revision}" if self.hub_revision else "")

    def chosen(self, part: Part, samples: int) -> Sequence[int]:
        """The numbers of the samples that `max_…_samples` keeps, in increasing order.

        A smaller subset with the same seed is part of a larger one.
        """
        limit = self.max_train_samples if part == "train" else self.max_eval_samples
        if limit is None or limit >= samples:
            return range(samples)
        found: list[int] = sorted(np.random.default_rng(self.subset_seed).permutation(samples)[:limit].tolist())
        return found
