"""The layout of published tables, and the published file itself where it is available."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.from_csv import read_csv
from runner.tools.compare.published_layout import ONE_WORKER, PublishedTable, published_tables
from runner.tools.compare.results import RunComparison
from tests.tools.compare.make import BASE, certificate, compared, published_file, runs

REAL = Path(__file__).parents[3].parent / "shared" / "reference" / "published_runs.csv"


@pytest.fixture
def published(tmp_path: Path) -> RunComparison:
    return compare_runs(read_csv(published_file(tmp_path)))


def cells(table: PublishedTable, samples: int) -> dict[object, tuple[str, str]]:
    return dict(zip(table.columns, table.texts(samples), strict=True))


def test_one_block_per_condition(published: RunComparison) -> None:
    """Experiment, task, precision, learning rate and samples make a block; its single run is the baseline."""
    assert [one.title for one in published.blocks] == [
        "new · qa · bf16 · learning rate 2e-5 · 1,000 samples",
        "old · qa · 1,000 samples",
        "old · qa · 9,000 samples",
    ]
    assert {(one.baseline.name, one.baseline_note) for one in published.blocks} == {("1 GPU", "")}
    names = ["1 GPU", "4 GPUs · accumulation 1", "4 GPUs · accumulation 2", "4 GPUs · k = 1", "4 GPUs · k = 2"]
    assert [row.setup.name for row in published.blocks[1].rows] == names
    kinds = [[flag.kind for flag in one.flags] for one in published.blocks]
    assert kinds == [[], ["timing outlier", "collapsed", "twins"], ["no time"]]


def test_the_published_layout(published: RunComparison) -> None:
    """Samples down; one worker, accumulation and k across; doubtful cells marked; empty where nothing was run."""
    (table,) = published_tables(published.blocks)
    assert table.workers == 4
    assert table.columns == (ONE_WORKER, ("accumulation", 1), ("accumulation", 2), ("k", 1), ("k", 2))
    assert [samples for samples, _ in table.rows] == [1000, 9000]
    assert table.texts(1000) == [("80.2", ""), ("80.1*", "1.5×"), ("54.7*", "2.7×"), ("80.1", "1.3×"), ("79.1", "4.0×")]
    assert table.texts(9000)[3:] == [("", ""), ("", "")]


def test_a_synchronous_run_of_the_runner_starts_the_methods_that_were_tried() -> None:
    own = {"certificate": certificate()}
    groups = [
        runs("one", [80.0, 80.2], 400.0, **own),
        runs("four", [80.0, 80.1], 200.0, workers=4, **own),
        runs("four · k=4", [79.0, 79.1], 100.0, workers=4, k=4, **own),
    ]
    (table,) = published_tables(compared(*groups).blocks)
    assert table.columns == (ONE_WORKER, ("k", 1), ("k", 4))
    more = runs("four · acc=2", [80.0, 80.1], 150.0, workers=4, accumulation=2, **own)
    (table,) = published_tables(compared(*groups, more).blocks)
    assert table.columns == (ONE_WORKER, ("accumulation", 1), ("accumulation", 2), ("k", 1), ("k", 4))


def test_other_shapes_have_no_such_table() -> None:
    """Several workers as baseline, accumulation and k at once, two setups for one cell, a single column: no table."""
    four = runs("four", [80.0, 80.1], 200.0, workers=4)
    k = runs("four · k=2", [80.0, 80.1], 200.0, workers=4, k=2)
    both = runs("four · acc=2 · k=8", [80.0, 80.1], 200.0, workers=4, k=8, accumulation=2)
    again = runs("four · k=2 · bf16", [80.0, 80.1], 200.0, workers=4, k=2)
    k4 = runs("four · k=4", [80.0, 80.1], 200.0, workers=4, k=4)
    assert published_tables(compared(BASE, k, k4).blocks)
    for groups in ([four, k, k4], [BASE, k, k4, both], [BASE, k, k4, again], [BASE, four, k]):
        assert published_tables(compared(*groups).blocks) == []


@pytest.mark.skipif(not REAL.exists(), reason="the published file is not part of the repository")
def test_the_published_file() -> None:
    """Rows and columns as published: 40,000 samples of 2022, and the anomalies of 2023."""
    found = compare_runs(read_csv(REAL))
    assert sum(len(row.setup.runs) for one in found.blocks for row in one.rows) == 264
    tables = {(table.title.split(" ")[0], table.workers): table for table in published_tables(found.blocks)}
    assert set(tables) == {("kbatch_2022", 4), ("local_sgd_2023", 4), ("local_sgd_2023", 8)}
    row = cells(tables["kbatch_2022", 4], 40000)
    assert row[ONE_WORKER] == ("89.2", "")
    assert row["accumulation", 1] == ("88.6", "2.4×")
    assert row["k", 16] == ("87.3", "3.6×")
    text = " ".join(line for one in found.blocks for flag in one.flags for line in (flag.text, *flag.details))
    assert "seed 0 is slow in 5 of the 8 setups with 4 workers by accumulation" in text
    assert "seed 0: 4,553.6 s, 2.05 × the median of its setup; without it 1.8×, not 1.4×" in text
    assert "8 GPUs · accumulation 1 · 4,000 samples, seed 2 collapsed: 11.87" in text
