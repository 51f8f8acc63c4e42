"""CSV files of published runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.errors import UserError
from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.from_csv import COLUMNS, read_csv
from tests.tools.compare.make import published_file

HEADER = ",".join(COLUMNS)
GOOD = "e,qa,,,1,10,single,1,0,80.1,40"
#: Content of a file, and what the message must name.
WRONG = {
    "empty": ("", ["cannot be read", "experiment,task"]),
    "binary": (b"\x89PNG\r\n\x1a\n\x00\x00", ["cannot be read"]),
    "open quote": (f'{HEADER}\n"e,qa', ["cannot be read"]),
    "missing column": (HEADER.replace(",seed", ""), ["line 1", "seed"]),
    "misspelt column": (HEADER.replace("train_seconds", "train_secs"), ["train_secs", "did you mean 'train_seconds'"]),
    "no runs": (f"{HEADER}\n", ["holds no run"]),
    "surplus cell": (f"{HEADER}\n{GOOD},1", ["more cells"]),
    "word for a number": (f"{HEADER}\n{GOOD}\ne,qa,,,1,10,single,1,1,high,40", ["line 3", "metric=high"]),
    "metric NaN": (f"{HEADER}\ne,qa,,,1,10,single,1,0,nan,40", ["line 2", "metric=nan"]),
    "half a seed": (f"{HEADER}\ne,qa,,,1,10,single,1,0.5,80,40", ["line 2", "seed=0.5"]),
    "no GPU": (f"{HEADER}\n\ne,qa,,,0,10,single,1,0,80,40", ["line 3", "gpus=0"]),
    "negative seconds": (f"{HEADER}\ne,qa,,,1,10,single,1,0,80,-4", ["line 2", "train_seconds=-4"]),
    "unknown method": (f"{HEADER}\ne,qa,,,4,10,acumulation,1,0,80,40", ["line 2", "method=acumulation"]),
    "single on four": (f"{HEADER}\ne,qa,,,4,10,single,1,0,80,40", ["line 2", "gpus=4"]),
    "single with steps": (f"{HEADER}\ne,qa,,,1,10,single,2,0,80,40", ["line 2", "steps=2"]),
    "a run twice": (f"{HEADER}\n{GOOD}\n{GOOD}", ["line 3", "seed=0"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_names_file_line_and_value(tmp_path: Path, case: str) -> None:
    content, words = WRONG[case]
    path = tmp_path / "x.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        read_csv(path)
    assert all(word in str(error.value) for word in [f"--csv={path}", *words])


def test_files_from_spreadsheets_are_read(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends, another column order, blanks around cells, empty lines, an empty cell."""
    columns = list(reversed(COLUMNS))
    row = dict(zip(COLUMNS, GOOD.split(","), strict=True)) | {"train_seconds": "", "steps": ""}
    text = ",".join(columns) + "\r\n" + " , ".join(row[name] for name in columns) + "\r\n,,,,,,,,,,\r\n\r\n"
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    (one,) = read_csv(path).runs
    assert (one.metric, one.seconds, one.source, one.setup) == (80.1, None, "line 2", "1 GPU")
    assert one.block.conditions == ("qa", "", "")


def test_one_block_per_condition(tmp_path: Path) -> None:
    """Experiment, task, precision, learning rate and samples make a block; its single run is the baseline."""
    blocks = compare_runs(read_csv(published_file(tmp_path))).blocks
    assert [one.title for one in blocks] == [
        "new · qa · bf16 · learning rate 2e-5 · 1,000 samples",
        "old · qa · 1,000 samples",
        "old · qa · 9,000 samples",
    ]
    assert {(one.baseline.name, one.baseline_note) for one in blocks} == {("1 GPU", "")}
    names = ["1 GPU", "4 GPUs · accumulation 1", "4 GPUs · accumulation 2", "4 GPUs · k = 1", "4 GPUs · k = 2"]
    assert [row.setup.name for row in blocks[1].rows] == names
    kinds = [[flag.kind for flag in one.flags] for one in blocks]
    assert kinds == [[], ["timing outlier", "collapsed", "twins"], ["no time"]]
