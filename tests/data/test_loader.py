"""The loader on a real cached table: rows in the order asked for, fillers where they are missing, few shapes."""

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
from runner.data.table import ROW, Table, write_table

#: As many rows as there are, padded to the longest: what a device gets that compiles nothing.
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


def tokens(prepared: Prepared, row: int) -> list[int]:
    found: list[int] = prepared.train[[row]]["input_ids"][0].tolist()
    return found


def is_row(prepared: Prepared, batch: Batch, place: int, row: int) -> bool:
    """Whether the inputs at this place of the batch are that row's, padded."""
    ids, shown = batch["input_ids"][place], batch["attention_mask"][place]
    own = tokens(prepared, row)
    return ids[: len(own)].tolist() == own and int(shown.sum()) == len(own) and not ids[len(own) :].any()


def test_the_data_are_of_many_lengths(prepared: Prepared) -> None:
    """The tests below would prove little if all rows were of one length, or if row 0 were the shortest."""
    lengths = prepared.train.column("length")
    assert len(np.unique(lengths)) >= 6
    assert int(np.argmin(lengths)) != 0
    assert len({int(lengths[ids].max()) for ids in LISTS if ids}) >= 3


@pytest.mark.parametrize("kind", [list, np.array])
def test_rows_come_in_the_order_asked_for(prepared: Prepared, kind: Any) -> None:
    """One batch per list, in order, with just these rows' tokens and labels, and their numbers beside them."""
    lists = [ids for ids in LISTS if ids]
    labels = prepared.train.column("label")
    found = loaded(prepared, map(kind, lists), LOOSE)
    assert [numbers.tolist() for numbers, _ in found] == lists
    for ids, (numbers, batch) in zip(lists, found, strict=True):
        assert numbers.dtype == np.int64
        assert batch["labels"].tolist() == labels[ids].tolist()
        assert all(is_row(prepared, batch, place, row) for place, row in enumerate(ids))
        assert batch["input_ids"].shape == (len(ids), max(len(tokens(prepared, row)) for row in ids))


def test_a_list_without_rows_becomes_one_filler(prepared: Prepared) -> None:
    """A worker without a sample runs one row, the shortest there is, without its label."""
    ((numbers, batch),) = loaded(prepared, [[]], LOOSE)
    assert numbers.tolist() == [FILLER]
    assert batch["labels"].tolist() == [IGNORED_LABEL]
    shortest = int(np.argmin(prepared.train.column("length")))
    assert is_row(prepared, batch, 0, shortest)
    assert batch["input_ids"].shape == (1, prepared.train.column("length").min())


@pytest.mark.parametrize("rows", [4, 5, 8])
@pytest.mark.parametrize("lengths", [None, (14,), (6, 8, 10, 14, 32)])
def test_fixed_rows(prepared: Prepared, rows: int, lengths: tuple[int, ...] | None) -> None:
    """Where rows are fixed every batch has so many: samples first, and then fillers, which make no batch longer."""
    own = prepared.train.column("length")
    for ids, (numbers, batch) in zip(LISTS, loaded(prepared, LISTS, Layout(lengths, rows)), strict=True):
        assert numbers.tolist() == ids + [FILLER] * (rows - len(ids))
        assert {len(tensor) for tensor in batch.values()} == {rows}
        expected = [int(label) for label in prepared.train.column("label")[ids]]
        assert batch["labels"].tolist() == expected + [IGNORED_LABEL] * (rows - len(ids))
        shortest = int(np.argmin(own))
        for place, row in enumerate([*ids, *[shortest] * (rows - len(ids))]):
            assert is_row(prepared, batch, place, row)
        longest = int(own[ids].max()) if ids else int(own.min())
        bucket = longest if lengths is None else min(length for length in lengths if length >= longest)
        assert batch["input_ids"].shape[1] == bucket


def test_labels_are_those_of_the_table_but_for_fillers(prepared: Prepared) -> None:
    """Over all rows, in lists of all sizes, the labels left are exactly the table's, each once."""
    ids = np.random.default_rng(0).permutation(60)
    lists = np.split(ids, np.cumsum([5, 1, 0, 8, 3, 0, 7, 8, 8, 2, 6, 4]))
    kept = []
    for numbers, batch in loaded(prepared, lists, Layout((14,), 8)):
        counts = numbers != FILLER
        assert (batch["labels"].numpy() != IGNORED_LABEL).tolist() == counts.tolist()
        kept += list(zip(numbers[counts].tolist(), batch["labels"].numpy()[counts].tolist(), strict=True))
    assert kept == [(row, int(prepared.train.column("label")[row])) for row in ids]


@pytest.mark.parametrize("lengths", [(14,), (8, 14, 32), (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)])
def test_lengths_by_bucket(prepared: Prepared, lengths: tuple[int, ...]) -> None:
    """A batch is as long as the first bucket that its longest row fits in, with as many rows as it has samples."""
    lists = [[row] for row in range(60)]
    for (row,), (_, batch) in zip(lists, loaded(prepared, lists, Layout(lengths, None)), strict=True):
        own = len(tokens(prepared, row))
        assert batch["input_ids"].shape == (1, min(length for length in lengths if length >= own))
        assert is_row(prepared, batch, 0, row)


def test_more_rows_than_planned_are_not_lost(prepared: Prepared) -> None:
    """A list that is longer than the layout's rows ends the run, where cutting it would lose samples in silence."""
    with pytest.raises(ValueError, match="broadcast"):
        loaded(prepared, [[0, 1, 2]], Layout(None, 2))


def test_batches_are_made_when_they_are_asked_for(prepared: Prepared) -> None:
    """Nothing is read ahead: a recipe that draws while collating draws for the batch that is trained on next."""
    asked: list[int] = []

    def lists() -> Any:
        for row in range(3):
            asked.append(row)
            yield [row]

    loader = batches(prepared.train, lists(), recipe(), prepared, LOOSE)
    assert asked == []
    for row in range(3):
        assert next(loader)[0].tolist() == [row]
        assert asked == list(range(row + 1))


def test_no_random_stream_is_moved(prepared: Prepared) -> None:
    """Fetching draws nothing from torch's stream, which would shift every later dropout."""
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    loaded(prepared, LISTS, Layout(None, 8))
    assert torch.rand(2).tolist() == expected


# --- a table made by hand -------------------------------------------------------------------------------------


class TokenTargets:
    """A recipe with a label for every token, which remembers what it was given."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int | None]] = []

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Any, length: int | None = None) -> dict[str, Tensor]:
        self.asked.append((rows[ROW].tolist(), length))
        labels = torch.full((len(rows[ROW]), length or 0), IGNORED_LABEL)
        for place, ids in enumerate(rows["input_ids"]):
            labels[place, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        return {"labels": labels}


def test_labels_of_tokens_go_row_by_row(tmp_path: Path) -> None:
    """A filler loses the labels of all its tokens, a sample none; a recipe is always told the length."""
    write_table(tmp_path / "table", {"input_ids": [[1, 2, 3], [4], [5, 6]], "length": [3, 1, 2]})
    table, tokens_of = Table(tmp_path / "table"), TokenTargets()
    of: Any = None
    loader = batches(table, [[2], [0, 2], []], tokens_of, of, Layout((2, 4), 2))  # type: ignore[arg-type]
    found = [(numbers.tolist(), batch["labels"].tolist()) for numbers, batch in loader]
    none = IGNORED_LABEL
    assert found == [
        ([2, FILLER], [[5, 6], [none, none]]),
        ([0, 2], [[1, 2, 3, none], [5, 6, none, none]]),
        ([FILLER, FILLER], [[none, none], [none, none]]),
    ]
    assert tokens_of.asked == [([2, 1], 2), ([0, 2], 4), ([1, 1], 2)]
    loose = batches(table, [[2], []], tokens_of, of, LOOSE)  # type: ignore[arg-type]
    assert [batch["labels"].shape for _, batch in loose] == [(1, 2), (1, 1)]


def test_the_numbers_are_of_the_rows_that_were_fetched(tmp_path: Path) -> None:
    """The ledger is to prove what was trained on: a table that gives another row than was asked for is found out."""

    class Repeating(Table):
        def __getitem__(self, rows: Sequence[int]) -> dict[str, Any]:
            return super().__getitem__([0 if row == 1 else row for row in rows])

    write_table(tmp_path / "table", {"input_ids": [[1, 2, 3], [4, 7], [5]], "length": [3, 2, 1]})
    of: Any = None
    loader = batches(Repeating(tmp_path / "table"), [[1, 2]], TokenTargets(), of, Layout((4,), 3))  # type: ignore[arg-type]
    assert [numbers.tolist() for numbers, _ in loader] == [[0, 2, FILLER]]
