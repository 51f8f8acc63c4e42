"""The loader on a cached table: rows in the given order, fillers where rows are missing, few shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.synthetic.acceptability import GrammarCorpus, SmallTransformer
from recipes.tasks.classification import SequenceClassification
from runner.data.cache import Cache
from runner.data.layout import Layout
from runner.data.loader import FILLER, batches
from runner.data.recipe import IGNORED_LABEL, Batch, Prepared
from runner.data.table import ROW, SEED, Table, write_table

#: For a device that does not compile: as many rows as samples, padded to the longest.
LOOSE = Layout(None, None)
#: Micro-batches with tails, and workers without a sample, as the order deals them.
LISTS = [[7, 3, 21, 5], [40, 14], [], [11], [59, 30, 57, 56], []]


def recipe() -> SequenceClassification:
    model = SmallTransformer(16, 16, 1, 2, dropout=0.0, attention_dropout=0.0, initializer_range=0.3)
    return SequenceClassification(GrammarCorpus(0, 60, 10), model, max_length=32)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    cache = Cache(tmp_path_factory.mktemp("loader"))
    return Prepared.load(recipe().prepare(cache, recipe().facts(cache)))


def loaded(prepared: Prepared, ids: Any, layout: Layout) -> list[tuple[np.ndarray, Batch]]:
    return list(batches(prepared.train, ids, recipe(), prepared, layout))


def is_row(prepared: Prepared, batch: Batch, place: int, row: int) -> bool:
    """Whether the inputs at this place of the batch are that row's, padded."""
    ids, mask = batch["input_ids"][place], batch["attention_mask"][place]
    own = prepared.train[[row]]["input_ids"][0].tolist()
    return ids[: len(own)].tolist() == own and int(mask.sum()) == len(own) and not ids[len(own) :].any()


@pytest.mark.parametrize("kind", [list, np.array])
def test_rows_come_in_the_given_order(prepared: Prepared, kind: Any) -> None:
    """One batch per list with its rows' tokens, labels and numbers, and no draw from torch's global generator."""
    lists = [ids for ids in LISTS if ids]
    lengths = prepared.train.column("length")
    before = torch.get_rng_state()
    found = loaded(prepared, map(kind, lists), LOOSE)
    assert torch.equal(torch.get_rng_state(), before)
    assert [numbers.tolist() for numbers, _ in found] == lists
    for ids, (_, batch) in zip(lists, found, strict=True):
        assert batch["labels"].tolist() == prepared.train.column("label")[ids].tolist()
        assert all(is_row(prepared, batch, place, row) for place, row in enumerate(ids))
        assert batch["input_ids"].shape == (len(ids), lengths[ids].max())


@pytest.mark.parametrize("rows", [None, 4, 8])
@pytest.mark.parametrize("lengths", [None, (14,), (6, 8, 10, 14, 32)])
def test_fillers_and_buckets(prepared: Prepared, rows: int | None, lengths: tuple[int, ...] | None) -> None:
    """Fillers are the shortest row without its label, follow the samples, and make no batch longer."""
    own = prepared.train.column("length")
    shortest = int(np.argmin(own))
    assert shortest != 0
    for ids, (numbers, batch) in zip(LISTS, loaded(prepared, LISTS, Layout(lengths, rows)), strict=True):
        missing = (rows or max(len(ids), 1)) - len(ids)
        assert numbers.tolist() == ids + [FILLER] * missing
        expected = [int(label) for label in prepared.train.column("label")[ids]]
        assert batch["labels"].tolist() == expected + [IGNORED_LABEL] * missing
        assert all(is_row(prepared, batch, place, row) for place, row in enumerate([*ids, *[shortest] * missing]))
        longest = int(own[ids].max()) if ids else int(own.min())
        bucket = longest if lengths is None else min(length for length in lengths if length >= longest)
        assert batch["input_ids"].shape[1] == bucket


def test_lists_longer_than_the_layout(prepared: Prepared) -> None:
    """They end the run: cutting them would lose samples silently."""
    with pytest.raises(ValueError, match="broadcast"):
        loaded(prepared, [[0, 1, 2]], Layout(None, 2))


def test_batches_are_made_on_demand(prepared: Prepared) -> None:
    """A recipe that draws random numbers while collating draws for the batch that is used next."""
    asked: list[int] = []

    def lists() -> Any:
        for row in range(3):
            asked.append(row)
            yield [row]

    loader = batches(prepared.train, lists(), recipe(), prepared, LOOSE)
    for row in range(3):
        assert asked == list(range(row))
        assert next(loader)[0].tolist() == [row]


class TokenTargets:
    """A recipe with a label for every token, which remembers its arguments."""

    computes_padding = True

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int | None]] = []

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Any, length: int | None = None) -> dict[str, Tensor]:
        self.asked.append((rows[ROW].tolist(), length))
        labels = torch.full((len(rows[ROW]), length or 0), IGNORED_LABEL)
        for place, ids in enumerate(rows["input_ids"]):
            labels[place, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        return {"labels": labels}


def test_fillers_lose_the_labels_of_all_tokens(tmp_path: Path) -> None:
    write_table(tmp_path / "table", {"input_ids": [[1, 2, 3], [4], [5, 6]], "length": [3, 1, 2]})
    tokens_of, of, none = TokenTargets(), None, IGNORED_LABEL
    loader = batches(Table(tmp_path / "table"), [[2], [0, 2], []], tokens_of, of, Layout((2, 4), 2))  # type: ignore[arg-type]
    assert [(numbers.tolist(), batch["labels"].tolist()) for numbers, batch in loader] == [
        ([2, FILLER], [[5, 6], [none, none]]),
        ([0, 2], [[1, 2, 3, none], [5, 6, none, none]]),
        ([FILLER, FILLER], [[none, none], [none, none]]),
    ]
    assert tokens_of.asked == [([2, 1], 2), ([0, 2], 4), ([1, 1], 2)]


def test_seeds_are_those_of_the_rows(tmp_path: Path) -> None:
    """In training only: evaluation gives none."""

    class Seeds(TokenTargets):
        def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Any, length: int | None = None) -> Any:
            return {"labels": torch.tensor([int(seed) for seed in rows.get(SEED, [])])}

    write_table(tmp_path / "table", {"input_ids": [[1], [4], [5]], "length": [1, 1, 1]})
    table, of, seeds = Table(tmp_path / "table"), None, lambda rows: rows + 10
    loader = batches(table, [[2], [0, 1]], Seeds(), of, LOOSE, seeds)  # type: ignore[arg-type]
    assert [batch["labels"].tolist() for _, batch in loader] == [[12], [10, 11]]
    without = batches(table, [[2]], Seeds(), of, LOOSE)  # type: ignore[arg-type]
    assert [batch["labels"].tolist() for _, batch in without] == [[]]


def test_numbers_are_of_the_fetched_rows(tmp_path: Path) -> None:
    """The ledger detects a table that returns other rows than those asked for."""

    class Repeating(Table):
        def __getitem__(self, rows: Sequence[int]) -> dict[str, Any]:
            return super().__getitem__([0 if row == 1 else row for row in rows])

    write_table(tmp_path / "table", {"input_ids": [[1, 2, 3], [4, 7], [5]], "length": [3, 2, 1]})
    table, of = Repeating(tmp_path / "table"), None
    loader = batches(table, [[1, 2]], TokenTargets(), of, Layout((4,), 3))  # type: ignore[arg-type]
    assert [numbers.tolist() for numbers, _ in loader] == [[0, 2, FILLER]]
