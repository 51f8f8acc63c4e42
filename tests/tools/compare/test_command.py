"""The command: what it writes and prints, and how it answers wrong input."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from runner import cli
from runner.tools.compare.terminal import print_comparison
from tests.tools.compare.make import PUBLISHED, certificate, compared, published_file, runs


def compare(*arguments: str) -> int:
    return cli.run_tool("compare", list(arguments))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_names_send_no_commands_to_the_terminal(
    here: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Also not in the warnings of libraries that draw the names."""
    published_file(here)
    text = Path("published.csv").read_text()
    Path("published.csv").write_text(text.replace("qa", "q\x1b]0;evil\x07a"))
    assert compare("--csv", "published.csv") == 0
    shown = "".join([*capfd.readouterr(), *(str(warning.message) for warning in recwarn)])
    assert "q]0;evila" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_verdicts_can_be_corrected_for_their_number(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the option; without it the table says what their number means."""
    published_file(here)
    assert compare("--csv", "published.csv") == 0
    assert "--family-wise" in capsys.readouterr().out
    assert compare("--csv", "published.csv", "--family-wise") == 0
    assert "Holm" in capsys.readouterr().out


def test_the_files_of_a_comparison(here: Path) -> None:
    """The default folder, one row per run and per setup, every number in full; only plots for which there are data."""
    published_file(here)
    assert compare("--csv", "published.csv") == 0
    (folder,) = (here / "outputs" / "compare").iterdir()
    names = ["metric_vs_speed.png", "report.html", "runs.csv", "setups.csv"]
    assert sorted(path.name for path in folder.iterdir()) == names
    runs = rows(folder / "runs.csv")
    assert len(runs) == len(PUBLISHED.splitlines()) - 1
    flags = {(row["block"], row["setup"], row["seed"]): row["flags"] for row in runs if row["flags"]}
    assert flags == {
        ("old · qa · 1,000 samples", "4 GPUs · accumulation 1", "1"): "timing outlier",
        ("old · qa · 1,000 samples", "4 GPUs · accumulation 2", "1"): "collapsed",
        ("old · qa · 9,000 samples", "1 GPU", "1"): "no time",
    }
    setups = {(row["block"], row["setup"]): row for row in rows(folder / "setups.csv")}
    row = setups["old · qa · 1,000 samples", "4 GPUs · k = 2"]
    # By hand: seeds 79.0, 79.3, 79.1 against 80.1, 80.3, 80.2, so differences of −1.1, −1.0, −1.1.
    half = 2.919986 * (1 / 300) ** 0.5 / 3**0.5
    assert float(row["difference"]) == pytest.approx(-3.2 / 3)
    assert float(row["difference_low_90"]) == pytest.approx(-3.2 / 3 - half, rel=1e-6)
    assert float(row["difference_high_90"]) == pytest.approx(-3.2 / 3 + half, rel=1e-6)
    assert row["verdict"] == "different: worse"
    assert float(row["speed_up"]) == pytest.approx((4.0 * 402 / 101 * 4.01) ** (1 / 3))
    assert (row["margin"], row["margin_unit"], row["margin_source"]) == ("1.0", "percentage points", "default")
    assert setups["old · qa · 1,000 samples", "1 GPU"]["verdict"] == ""


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_is_readable(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    """No line is wider than the terminal, nothing is cut off, names are text and not markup."""
    monkeypatch.setenv("COLUMNS", str(width))
    published_file(here).write_text(PUBLISHED.replace("new,", "[red]new[/],"))
    assert compare("--csv", "published.csv", "--out", "result") == 0
    output = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in output.splitlines()) <= width
    assert "…" not in output
    for text in ("[red]new[/] · qa", "speed-up", "timing outlier", "collapsed", "twins", "3 seeds are rarely enough"):
        assert text in " ".join(output.split())


def test_no_word_is_broken() -> None:
    """At 80 columns cells fold between words: the longest verdicts, a rehearsed setup, large times."""
    base = runs("one", [80.0, 80.1], 123456.0, certificate=certificate())
    other = runs("gpu8 · acc=16 · bf16", [10.0, 80.0], 1.0, workers=8, certificate=certificate(samples_seen=7))
    tpu = runs("tpu8 · k=4", [80.0, 80.1], 1.0, workers=8, rehearsed=True, certificate=certificate())
    equal = runs("four", [80.0, 80.1], 61234.5, workers=4, jobs_at_once=2, certificate=certificate())
    output = io.StringIO()
    print_comparison(compared(base, other, tpu, equal), Console(width=80, file=output, highlight=False))
    words = set(output.getvalue().split())
    assert {"verdict:", "comparable", "rehearsed", "equivalent:", "(61,234)", "123,456", "(2.02×)"} <= words
    assert {"acc=16", "bf16"} <= words


def test_in_its_own_process(here: Path) -> None:
    """Piped: 120 columns and nothing on the error stream; a wrong option is answered without heavy libraries."""
    published_file(here)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment["PYTHONPATH"] = str(Path(cli.__file__).parents[1])
    heavy = "print(sorted({'scipy', 'matplotlib', 'mlflow', 'torch', 'pandas', 'hydra'} & set(sys.modules)))"
    code = f"import sys; from runner.cli import run_tool; run_tool('compare', ['--margin', 'x']); {heavy}; "
    code += f"run_tool('compare', ['--csv', 'published.csv']); {heavy}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0], lines[-1]) == (0, "[]", "['matplotlib', 'pandas', 'scipy']")
    assert "--margin" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert 100 < max(len(line.rstrip()) for line in lines) <= cli.PIPED_WIDTH
