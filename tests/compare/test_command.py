"""The command: what it writes and prints, and what it says to wrong input."""

from __future__ import annotations

import csv
import io
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from runner import cli
from runner.compare.from_csv import read_csv
from runner.compare.terminal import print_comparison
from tests.compare.make import PUBLISHED, certificate, compared, published_file, runs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compare(*arguments: str) -> int:
    return cli.compare_main(list(arguments))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_files_of_a_comparison(here: Path) -> None:
    """The default folder, one row per run and per setup, every number in full; only plots for which there are data."""
    published_file(here)
    assert compare("--csv", "published.csv") == 0
    (folder,) = (here / "outputs" / "compare").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "metric_vs_speed.png",
        "report.html",
        "runs.csv",
        "setups.csv",
    ]
    runs = rows(folder / "runs.csv")
    assert len(runs) == len(read_csv(here / "published.csv").runs)
    flags = {(row["block"], row["setup"], row["seed"]): row["flags"] for row in runs if row["flags"]}
    assert flags == {
        ("old · qa · 1,000 samples", "4 GPUs · accumulation 1", "1"): "timing outlier",
        ("old · qa · 1,000 samples", "4 GPUs · accumulation 2", "1"): "collapsed",
        ("old · qa · 9,000 samples", "1 GPU", "1"): "no time",
    }
    setups = {(row["block"], row["setup"]): row for row in rows(folder / "setups.csv")}
    row = setups["old · qa · 1,000 samples", "4 GPUs · k = 2"]
    # By hand: seeds 79.0, 79.3, 79.1 against 80.1, 80.3, 80.2, so differences of −1.1, −1.0, −1.1.
    assert float(row["difference"]) == pytest.approx(-3.2 / 3)
    half = 2.919986 * (1 / 300) ** 0.5 / 3**0.5
    assert float(row["difference_low_90"]) == pytest.approx(-3.2 / 3 - half, rel=1e-6)
    assert float(row["difference_high_90"]) == pytest.approx(-3.2 / 3 + half, rel=1e-6)
    assert row["verdict"] == "different: worse"
    assert float(row["speed_up"]) == pytest.approx((4.0 * 402 / 101 * 4.01) ** (1 / 3))
    assert setups["old · qa · 1,000 samples", "1 GPU"]["verdict"] == ""


def test_plots_of_real_runs(sweep_folder: Path, here: Path) -> None:
    """Runs of the runner have a loss curve; each picture is a PNG."""
    assert compare(str(sweep_folder), "--out", "result", "--no-log") == 0
    pictures = sorted((here / "result").glob("*.png"))
    assert "loss_vs_samples.png" in [path.name for path in pictures]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_terminal_is_readable(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    """No line beyond the width, nothing cut short, every verdict and finding there."""
    monkeypatch.setenv("COLUMNS", str(width))
    published_file(here)
    assert compare("--csv", "published.csv", "--out", "result") == 0
    output = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in output.splitlines()) <= width
    assert "…" not in output
    words = " ".join(output.split())
    assert words.split().count("notes") == 3  # no heading is cut either
    for text in (
        "old · qa · 1,000 samples",
        "speed-up",
        "timing outlier",
        "collapsed",
        "twins",
        "3 seeds rarely decide",
    ):
        assert text in words
    # The published layout: metrics over speed-ups.
    lines = [line.split() for line in output.splitlines()]
    at = next(i for i, line in enumerate(lines) if line[:2] == ["80.2", "80.1*"])
    assert lines[at] == ["80.2", "80.1*", "54.7*", "80.1", "79.1"]
    assert lines[at + 1] == ["1,000", "1.5×", "2.7×", "1.3×", "4.0×"]


def test_no_word_is_broken() -> None:
    """At 80 columns cells fold between words: the longest verdicts, a rehearsed setup, large times."""
    base = runs("one", [80.0, 80.1], 123456.0, certificate=certificate())
    other = runs("gpu8 · acc=16 · bf16", [10.0, 80.0], 1.0, workers=8, certificate=certificate(samples_seen=7))
    tpu = runs("tpu8 · k=4", [80.0, 80.1], 1.0, workers=8, rehearsed=True, certificate=certificate())
    equal = runs("four", [80.0, 80.1], 61234.5, workers=4, jobs_at_once=2, certificate=certificate())
    console = Console(width=80, file=io.StringIO(), highlight=False)
    print_comparison(compared(base, other, tpu, equal), console)
    assert isinstance(console.file, io.StringIO)
    words = set(console.file.getvalue().split())
    assert {"verdict:", "comparable", "rehearsed", "equivalent:", "(61,234)", "123,456", "(2.02×)"} <= words
    assert {"acc=16", "bf16"} <= words


def test_a_wide_published_table_is_split(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixteen steps do not fit into 80 columns: accumulation and k below each other, one worker in both."""
    monkeypatch.setenv("COLUMNS", "80")
    header, *_ = PUBLISHED.splitlines()
    lines = ["e,qa,,,1,10,single,1,0,50,100"]
    lines += [f"e,qa,,,4,10,{m},{2**i},0,{50 + i},{40 - i}" for m in ("accumulation", "k_batch") for i in range(8)]
    (here / "x.csv").write_text("\n".join([header, *lines]))
    assert compare("--csv", "x.csv", "--out", "result") == 0
    headings = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" samples ")]
    steps = [str(2**i) for i in range(8)]
    assert headings == [["samples", "one", "acc", *steps], ["samples", "one", "k", *steps]]


def test_as_one_types_it(here: Path) -> None:
    """A process of its own, piped: 120 columns, exit code 0, and help."""
    published_file(here)
    command = [sys.executable, "-m", "runner.compare"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment["PYTHONPATH"] = str(Path(cli.__file__).parents[1])
    done = subprocess.run(
        [*command, "--csv", "published.csv"], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert 100 < max(len(line.rstrip()) for line in done.stdout.splitlines()) <= cli.PIPED_WIDTH
    usage = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert usage.returncode == 0
    assert "--margin POINTS" in usage.stdout


def test_names_are_text_and_no_markup(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name with rich's markup is printed as it stands."""
    (here / "x.csv").write_text(PUBLISHED.replace("old,", "[red]old[/],"))
    assert compare("--csv", "x.csv", "--out", "result") == 0
    assert "[red]old[/] · qa" in capsys.readouterr().out


def make_files(root: Path) -> None:
    """What wrong input refers to."""
    published_file(root)
    (root / "empty.csv").touch()
    (root / "binary.csv").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    (root / "wrong.csv").write_text("a,b\n1,2\n")
    (root / "text.csv").write_text(PUBLISHED.replace("80.1,400", "good,400", 1))
    (root / "twice.csv").write_text(PUBLISHED + PUBLISHED.splitlines()[1] + "\n")
    (root / "folder").mkdir()
    (root / "full").mkdir()
    (root / "full" / "report.html").touch()
    (root / "text.db").write_text("no database at all, but long enough to be read as the header of one " * 3)
    sqlite3.connect(root / "other.db").execute("create table x (y)").connection.close()
    (root / "failed").mkdir()
    (root / "failed" / "summary.json").write_text('{"status": "FAILED", "error": "x"}')


NO_RUN = "0" * 32
#: What is typed, and what the sentence must name.
WRONG: list[tuple[list[str], list[str]]] = [
    ([], ["which runs?", "--csv FILE"]),
    (["nothing"], ["nothing", "neither a folder nor an MLflow run id"]),
    (["folder"], ["folder", "holds no run"]),
    (["published.csv"], ["published.csv", "--csv="]),
    (["failed"], ["no finished run", "failed: FAILED"]),
    (["folder", "--csv", "published.csv"], ["RUN and --csv", "one source"]),
    (["--sweep", "a", "--experiment", "b"], ["--experiment and --sweep"]),
    (["--csv", "missing.csv"], ["--csv=missing.csv", "does not exist"]),
    (["--csv", "folder"], ["--csv=folder", "is a folder"]),
    (["--csv", "empty.csv"], ["--csv=empty.csv", "is empty"]),
    (["--csv", "binary.csv"], ["--csv=binary.csv", "line 1"]),
    (["--csv", "wrong.csv"], ["line 1", "no column 'a'"]),
    (["--csv", "text.csv"], ["line 2", "metric='good'"]),
    (["--csv", "twice.csv"], ["line 24", "stands on line 2"]),
    (["--csv", "published.csv", "--margin", "0"], ["--margin=0", "above 0"]),
    (["--csv", "published.csv", "--margin", "nan"], ["--margin=nan"]),
    (["--csv", "published.csv", "--margin", "wide"], ["--margin", "'wide'"]),
    (["--csv", "published.csv", "--metric", "f1"], ["--metric=f1", "one column 'metric'"]),
    (["--csv", "published.csv", "--baseline", "1 GPUs"], ["--baseline=1 GPUs", "did you mean '1 GPU'"]),
    (["--csv", "published.csv", "--out", "full"], ["--out=full", "holds files already"]),
    (["--csv", "published.csv", "--out", "published.csv/x"], ["--out=published.csv/x", "is a file"]),
    (["--csv", "published.csv", "--outt", "x"], ["--outt"]),
    (["--experiment", ""], ["--experiment is empty"]),
    (["--experiment", "x"], ["outputs/mlflow.db", "no such store"]),
    (["--sweep", "x"], ["outputs/mlflow.db", "no such store"]),
    ([NO_RUN], ["outputs/mlflow.db", "no such store", "--tracking-uri"]),
    ([NO_RUN, "--tracking-uri", "sqlite:///text.db"], ["--tracking-uri=sqlite:///text.db", "no SQLite database"]),
    ([NO_RUN, "--tracking-uri", "sqlite:///other.db"], ["sqlite:///other.db", "no store of MLflow's"]),
    ([NO_RUN, "--tracking-uri", "mlruns"], ["--tracking-uri=mlruns", "no folder mlruns"]),
    ([NO_RUN, "--tracking-uri", "ftp://x"], ["--tracking-uri=ftp://x", "scheme 'ftp'"]),
    ([NO_RUN, "--tracking-uri", "http://127.0.0.1:9"], ["--tracking-uri=http://127.0.0.1:9", "does not answer"]),
    ([NO_RUN, "--tracking-uri", "http://me:secret@127.0.0.1:9"], ["http://***@127.0.0.1:9", "give the runs' folders"]),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(one) or "nothing" for one, _ in WRONG])
def test_wrong_input_is_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    """Exit code 2, one line on the error stream that names option, value and mend, nothing printed, nothing made."""
    make_files(here)
    before = sorted(here.rglob("*"))
    assert compare(*arguments) == cli.EXIT_USER_ERROR
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("error: ")
    assert output.out == ""
    for word in words:
        assert word in line
    assert "secret" not in line
    assert sorted(here.rglob("*")) == before


def test_an_unknown_run_of_a_store_that_is_there(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids, experiments and sweeps that the store does not know; a misspelt experiment gets a suggestion."""
    monkeypatch.chdir(sweep)
    cases: list[tuple[list[str], str]] = [
        ([NO_RUN], f"{NO_RUN} is no run of"),
        (["--experiment", "runer"], "did you mean 'runner'?"),
        (["--sweep", "1999"], "--sweep=1999 has no runs"),
        (["--experiment", "runner", "--metric", "accuracy"], "--metric=accuracy was measured in none of the runs"),
    ]
    for arguments, words in cases:
        assert compare(*arguments) == cli.EXIT_USER_ERROR
        assert words in capsys.readouterr().err


def test_wrong_input_is_answered_quickly(here: Path) -> None:
    """A mistake in the options needs none of the heavy libraries."""
    code = "import sys; from runner.cli import compare_main; compare_main(['--margin', 'x']); "
    code += "print(sorted({'scipy', 'matplotlib', 'mlflow', 'torch', 'pandas', 'hydra'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stdout.strip() == "[]", done.stderr
    assert time.monotonic() - start < 10
