"""What all data sources share: a training and an evaluation part, from local files or from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from recipes.sources.rows import NO_DATA, Rows, file_rows, hub_rows
from runner.errors import UserError, require

Part = Literal["train", "eval"]

#: The share of the evaluation set from which on samples that are also in the training set are a leak. CoLA has 1.1%.
_LEAK = 0.05


def wrong_text(text: object, blank: bool = False) -> str | None:
    """What is wrong with a text, after "has"; None if it can be trained on. `blank`: spaces alone are a text."""
    if not isinstance(text, str) or not (text if blank else text.strip()):
        return "no text"
    return "NUL characters (a damaged file?)" if "\0" in text else None


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    `train`, `eval`: a file, a pattern or a folder each, as in `file_rows`. Without them `hub_name` is a data set of the
    Hub: `hub_config` is a part of it, `hub_revision` a branch, tag or commit, and `hub_train`, `hub_eval` are splits or
    parts of splits, such as `train[:10%]`. `eval_share`: there is no evaluation part, and this share of the training
    samples, drawn at random, is held out for it. `max_train_samples`, `max_eval_samples`: keep a random subset of the
    samples in their order; None for all. `subset_seed` determines both, so that they do not depend on the run's seed.
    """

    train: str | None = None
    eval: str | None = None
    eval_share: float | None = None
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
        share = self.eval_share
        require(share is None or 0 < share < 1, "recipe.data.eval_share", share, "use a share such as 0.1, or null")

    def check_both(self) -> None:
        """Check that there are both files, one to hold out a part of, or neither, and some source. Raises UserError."""
        rule = f"recipe.data.eval={self.eval} has the evaluation data; leave out one of the two"
        require(self.eval is None or self.eval_share is None, "recipe.data.eval_share", self.eval_share, rule)
        if (self.train is None) != (self.eval is None) and self._held_out is None:
            given, missing = ("eval", "train") if self.train is None else ("train", "eval")
            raise UserError(
                f"recipe.data.{missing}=null is invalid with recipe.data.{given}={getattr(self, given)}: set both files"
                + (", or recipe.data.eval_share=0.1 to hold out a part of the training data" * (missing == "eval"))
                + (f", or neither to download {self.hub_name}" if self.hub_name else "")
            )
        if self.train is None and not self.hub_name:
            raise UserError(NO_DATA)

    def leak(self, train: Iterable[Hashable], evaluation: Iterable[Hashable]) -> tuple[str, ...]:
        """A note if samples of the evaluation set are also in the training set; both without their labels."""
        known = set(map(hash, train))  # a sample may have been made for this, such as JSON: it is not kept
        found = [hash(sample) in known for sample in evaluation]
        if sum(found) < _LEAK * len(found):
            return ()
        of = f"{sum(found):,} of {len(found):,} {self.unit}s of the evaluation data"
        return (f"{of} are also in the training data: metrics on these say nothing about new data",)

    @property
    def _held_out(self) -> float | None:
        """The share of the training part that is the evaluation part; None if there is one of its own."""
        return self.eval_share if self.eval is None else None

    def file(self, part: Part, file: str | None = None) -> tuple[str, str] | None:
        """The name of a part's file and `setting=name`, or None for a part from the Hub. Raises UserError without both.

        `file`: in place of the configured one.
        """
        if file is not None:
            return file, f"--input={file}"
        part = part if self._held_out is None else "train"
        configured: str | None = getattr(self, part)
        if configured is not None:
            return configured, f"recipe.data.{part}={configured}"
        if not self.hub_name:
            raise UserError(f"recipe.data.{part}=null has no data: set it to a local file")
        return None

    def split(self, part: Part) -> str:
        """The split of the Hub's data set, or the part of one."""
        return self.hub_train if part == "train" or self._held_out is not None else self.hub_eval

    def rows(self, part: Part, file: str | None = None, header: bool = True) -> Rows:
        """The rows of a part, of which none is left out. Arguments as of `file` and `file_rows`."""
        found = self.file(part, file)
        if found is not None:
            return file_rows(*found, header)
        assert self.hub_name is not None
        return hub_rows(self.hub_name, self.hub_config, self.split(part), self.hub_revision)

    def described(self, *parts: Part) -> str:
        """Where these parts come from, for people."""
        files = dict.fromkeys(found[0] for part in parts if (found := self.file(part)) is not None)
        config = f"/{self.hub_config}" if self.hub_config else ""
        hub = f"Hub: {self.hub_name}{config}" + (f"@{self.hub_revision}" if self.hub_revision else "")
        share = self._held_out
        return (", ".join(files) or hub) + (f", of which {100 * share:g}% are held out for evaluation" if share else "")

    def chosen(self, part: Part, samples: int, classes: Sequence[Collection[int]] | None = None) -> Sequence[int]:
        """The numbers of a part's samples that `eval_share` and `max_…_samples` keep, in increasing order.

        `samples`: of the file or split. `classes`: of each sample; one of every class is held out last, so that there
        is something to learn it from. A smaller subset with the same seed is part of a larger one. Raises UserError if
        all samples would be held out.
        """
        limit = self.max_train_samples if part == "train" else self.max_eval_samples
        share = self._held_out
        if share is None and (limit is None or limit >= samples):
            return range(samples)
        order: list[int] = np.random.default_rng(self.subset_seed).permutation(samples).tolist()
        if share is not None:
            held_out = max(1, round(share * samples))
            rule = f"it would hold out all of {samples} {self.unit}{'s' * (samples != 1)}; use less, or give more data"
            require(held_out < samples, "recipe.data.eval_share", share, rule)
            if classes is not None:
                last = set({one: row for row in order for one in classes[row]}.values())
                order.sort(key=last.__contains__)
            order = order[:held_out] if part == "eval" else order[held_out:][::-1]
        return sorted(order[:limit])
