"""CSV files of published runs: reading, the published layout, and the real file where it lies beside the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.compare.comparison import Comparison, compare_runs
from runner.compare.from_csv import COLUMNS, read_csv
from runner.compare.published_layout import ONE_WORKER, PublishedTable, published_tables
from runner.compare.shown import published_cell
from runner.errors import UserError
from tests.compare.make import BASE, certificate, compared, published_file, runs

REAL = Path(__file__).parents[2].parent / "shared" / "reference" / "published_runs.csv"


def comparison(path: Path) -> Comparison:
    return compare_runs(read_csv(path), None, 1.0)


def cells(table: PublishedTable, samples: int) -> dict[object, tuple[str, str]]:
    return {column: published_cell(cell) for column, cell in dict(table.rows)[samples].items()}


def test_one_block_per_condition(tmp_path: Path) -> None:
    """Experiment, task, precision, learning rate and samples make a block; its single run is the baseline."""
    found = comparison(published_file(tmp_path))
    assert [one.title for one in found.blocks] == [
        "new · qa · bf16 · learning rate 2e-5 · 1,000 samples",
        "old · qa · 1,000 samples",
        "old · qa · 9,000 samples",
    ]
    assert {one.baseline.name for one in found.blocks} == {"1 GPU"}
    assert {one.baseline_note for one in found.blocks} == {""}
    assert [row.setup.name for row in found.blocks[1].rows] == [
        "1 GPU",
        "4 GPUs · accumulation 1",
        "4 GPUs · accumulation 2",
        "4 GPUs · k = 1",
        "4 GPUs · k = 2",
    ]


def test_the_oddities_are_found(tmp_path: Path) -> None:
    """The slow seed, the collapsed one, the twins and the missing time of the small file, and nothing else."""
    found = comparison(published_file(tmp_path))
    kinds = [[finding.kind for finding in one.findings] for one in found.blocks]
    assert kinds == [[], ["timing outlier", "collapsed", "twins"], ["no time"]]


def test_the_published_layout(tmp_path: Path) -> None:
    """Samples down; one worker, accumulation and k across; odd cells marked; empty where nothing was run."""
    (table,) = published_tables(comparison(published_file(tmp_path)).blocks)
    assert table.workers == 4
    assert table.columns == (ONE_WORKER, ("accumulation", 1), ("accumulation", 2), ("k", 1), ("k", 2))
    assert [samples for samples, _ in table.rows] == [1000, 9000]
    small, large = cells(table, 1000), cells(table, 9000)
    assert small[ONE_WORKER] == ("80.2", "")
    assert small["accumulation", 1] == ("80.1*", "1.5×")
    assert small["accumulation", 2][0] == "54.7*"
    assert small["k", 2] == ("79.1", "4.0×")
    assert large["accumulation", 2] == ("90.0", "4.4×")
    assert ("k", 2) not in large


def test_runs_of_the_runner_stand_in_both_halves() -> None:
    """A synchronous run of the runner is accumulation 1 and k = 1 at once."""
    own = {"certificate": certificate()}
    groups = [
        runs("one", [80.0, 80.2], 400.0, **own),
        runs("four", [80.0, 80.1], 200.0, workers=4, **own),
        runs("four · k=4", [79.0, 79.1], 100.0, workers=4, k=4, **own),
    ]
    (table,) = published_tables(compared(*groups).blocks)
    assert table.columns == (ONE_WORKER, ("accumulation", 1), ("k", 1), ("k", 4))


def test_other_shapes_have_no_such_table() -> None:
    """A baseline of several workers, accumulation and k at once, two setups for one cell, a single column: no table."""
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
    """Rows and columns as published: 40,000 samples of 2022, and what is odd about 2023."""
    found = comparison(REAL)
    assert sum(len(row.setup.runs) for one in found.blocks for row in one.rows) == 264
    tables = {(table.title.split(" ")[0], table.workers): table for table in published_tables(found.blocks)}
    assert set(tables) == {("kbatch_2022", 4), ("local_sgd_2023", 4), ("local_sgd_2023", 8)}
    row = cells(tables["kbatch_2022", 4], 40000)
    assert row[ONE_WORKER] == ("89.2", "")
    assert row["accumulation", 1] == ("88.6", "2.4×")
    assert row["k", 16] == ("87.3", "3.6×")
    text = " ".join(line for one in found.blocks for f in one.findings for line in (f.text, *f.details))
    assert "seed 0 is slow in 5 of the 8 setups with 4 workers by accumulation" in text
    assert (
        "4 GPUs · accumulation 1 · 40,000 samples, seed 0: 4,553.6 s, 2.05 × the median of its setup; "
        "without it 1.8×, not 1.4×"
    ) in text
    assert "8 GPUs · accumulation 1 · 4,000 samples, seed 2 collapsed: 11.87" in text


GOOD = "e,qa,,,1,10,single,1,0,80.1,40"
#: Lines below the header, and what the sentence must name.
WRONG = {
    "a word for a number": ("e,qa,,,1,10,single,1,0,high,40", "line 2: metric='high' is no number"),
    "a word for a count": ("e,qa,,,one,10,single,1,0,80,40", "line 2: gpus='one' is no number"),
    "no metric": ("e,qa,,,1,10,single,1,0,,40", "line 2: metric='' is no number"),
    "negative seconds": (f"{GOOD}\ne,qa,,,1,10,single,1,1,80,-4", "line 3: train_seconds=-4"),
    "no number at all": ("e,qa,,,1,10,single,1,0,nan,40", "line 2: metric=nan is out of range"),
    "half a seed": ("e,qa,,,1,10,single,1,0.5,80,40", "line 2: seed=0.5 cannot be"),
    "no GPU": ("e,qa,,,0,10,single,1,0,80,40", "line 2: gpus=0 cannot be"),
    "an unknown method": ("e,qa,,,4,10,acumulation,1,0,80,40", "line 2: method='acumulation'"),
    "single on four": ("e,qa,,,4,10,single,1,0,80,40", "line 2: method=single with gpus=4"),
    "accumulating single": ("e,qa,,,1,10,single,2,0,80,40", "line 2: method=single with steps=2"),
    "a cell too few": ("e,qa,,,1,10,single,1,0,80", "line 2: 10 cells under 11 column names"),
    "a run twice": (f"{GOOD}\n{GOOD}", "line 3: 1 GPU with seed 0 stands on line 2 already"),
    "an open quote": ('"e,qa', "line 2: this is no row of a CSV file"),
    "no runs": ("", "holds no run"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_a_line_is_one_sentence(tmp_path: Path, case: str) -> None:
    """Each names file, line, column and value."""
    lines, words = WRONG[case]
    path = tmp_path / "x.csv"
    path.write_text(f"{','.join(COLUMNS)}\n{lines}\n")
    with pytest.raises(UserError) as error:
        read_csv(path)
    assert words in str(error.value)
    assert f"--csv={path}" in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "line 1: this is no text in UTF-8"),
        (b"a,b\0c\n", "line 1: this is a binary file"),
        (",".join(COLUMNS[:-1]).encode(), "missing column(s) train_seconds"),
        (",".join([*COLUMNS[:-1], "train_secs"]).encode(), "no column 'train_secs'; did you mean 'train_seconds'"),
        (",".join([*COLUMNS, "seed"]).encode(), "the column 'seed' is there twice"),
    ],
)
def test_a_file_that_is_no_table(tmp_path: Path, content: bytes, words: str) -> None:
    """Empty, binary, wrong or missing columns."""
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_csv(path)
    assert words in str(error.value)


def test_spreadsheets_files_are_read(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends, another order of columns, blanks around cells, empty lines at the end."""
    columns = list(reversed(COLUMNS))
    row = dict(zip(COLUMNS, GOOD.split(","), strict=True))
    text = ",".join(columns) + "\r\n" + " , ".join(row[name] for name in columns) + "\r\n,,,,,,,,,,\r\n\r\n"
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    (one,) = read_csv(path).runs
    assert (one.metric, one.seconds, one.source) == (80.1, 40.0, "line 2")
