"""The HTML report: one file, well formed, that fetches nothing and believes no name."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from runner import __version__
from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.report import MAX_TAG_CHARACTERS, logged_metrics, logged_tags, markdown, write_report
from runner.tools.compare.results import RunComparison
from runner.tools.compare.runs import FoundRuns, SkippedRun
from tests.tools.compare.make import BASE, compared, run, runs

VOID = {"meta", "img", "br", "link", "input", "hr"}
#: Attributes that make a browser fetch something.
FETCHED = {"src", "href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects text, tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report(folder: Path, comparison: RunComparison, command: str = "python -m runner.compare x") -> tuple[str, Page]:
    write_report(comparison, folder, command)
    text = (folder / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture
def usual(tmp_path: Path) -> tuple[str, Page]:
    four = runs("four", [80.1, 80.3, 80.2], [200.0, 420.0, 202.0], workers=4)
    return report(tmp_path, compared(BASE, four))


def test_it_is_well_formed_and_fetches_nothing(usual: tuple[str, Page]) -> None:
    """Every tag is closed; no script; images are in the file itself; no style reaches out either."""
    text, page = usual
    assert page.open == []
    assert "script" not in page.tags
    assert "link" not in page.tags
    fetched = [value for name, value in page.attributes if name in FETCHED]
    assert fetched
    assert all(value.startswith("data:image/png;base64,") for value in fetched)
    assert base64.b64decode(fetched[0].partition(",")[2]).startswith(b"\x89PNG")
    assert not re.search(r"url\(|@import|https?://", text)


def test_it_says_everything(usual: tuple[str, Page]) -> None:
    """Table, verdict, findings, remarks, the rule in full, the command, version and date."""
    text, page = usual
    words = " ".join(page.text.split())
    for expected in (
        "Comparison of 2 setups",
        "equivalent",
        "seed 1: 420.0 s, 2.08 × the median of its setup",
        "3 seeds are rarely enough",
        "Schuirmann 1987",
        "of 20 setups",
        "±1 (percentage points, default)",
        "python -m runner.compare x",
        f"runner {__version__}",
    ):
        assert expected in words
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d", words)
    assert "prefers-color-scheme: dark" in text


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    """Hostile names of setups, experiments, metrics, runs and commands stand in the text as they are."""
    evil = '<script>alert("1")</script>'
    key = replace(BASE[0].block, experiment=evil, metric=f"{evil}m")
    one = [run("one", seed, 80.0 + seed, block=key) for seed in range(3)]
    four = [run(f"four{evil}", seed, 90.0 - 20 * seed, 10.0 + 50 * seed, block=key, workers=4) for seed in range(3)]
    found = FoundRuns([*one, *four], [SkippedRun(evil, f"{evil}r")])
    text, page = report(tmp_path, compare_runs(found, None, 0.5), f"python -m runner.compare '{evil}'")
    assert "script" not in page.tags
    assert page.open == []
    assert "<script" not in text
    for name in (f"four{evil}", f"{evil}m", f"{evil}r", f"compare '{evil}'"):
        assert name in page.text


def test_odd_comparisons_have_reports_too(tmp_path: Path) -> None:
    """A single run; a diverged baseline; a loss of 1e-5; a metric of 0: no error, and the numbers can be read."""
    cases = {
        "single": [run("one", 0, 80.0)],
        "diverged": [*runs("one", [float("nan"), 80.0]), *runs("four", [80.0, 81.0], workers=4)],
        "small": [*runs("one", [1e-5, 2e-5]), *runs("four", [3e-5, 2e-5], workers=4)],
        "zero": [*runs("one", [0.0, 0.0]), *runs("four", [0.0, 0.0], workers=4)],
    }
    pages = {}
    for name, group in cases.items():
        (tmp_path / name).mkdir()
        pages[name] = report(tmp_path / name, compared(group))[1].text
    assert "Only one setup, one." in pages["single"]
    assert "NaN" in pages["diverged"]
    assert "0.0000150" in pages["small"]
    assert pages["zero"].count("undecided (the metric is 0 in every run") == 2  # at the top, and below the table


def test_the_markdown_for_mlflow() -> None:
    """A table first, with escaped names and a line for each setup; no tables if they would be too long for a tag."""
    four = runs("four|*x*", [80.1, 80.3, 80.2], 200.0, workers=4)
    header, _, _, row, *_ = markdown(compared(BASE, four)).splitlines()
    assert header == "| setup | verdict | speed-up | accuracy | difference |"
    assert row.startswith("| four\\|\\*x\\*\N{NO-BREAK SPACE}(3\N{NO-BREAK SPACE}seeds) | equivalent | 2.0")
    many = [runs(f"setup {i}", [80.0, 80.1], 200.0, workers=4) for i in range(100)]
    text = markdown(compared(BASE, *many))
    assert len(text) <= MAX_TAG_CHARACTERS
    assert "100" in text
    assert "compare/report.html" in text


def test_what_the_list_of_runs_shows() -> None:
    """Verdict and speed-up of every setup in a tag, and as metrics, in whose names MLflow allows few characters."""
    four = runs("gpu4 · k=2", [80.1, 80.5, 80.3], 200.0, workers=4)
    bad = runs("bad", [70.0, 70.4, 70.2], 100.0, workers=4)
    assert logged_tags(compared(BASE, four))["sweep.verdict"] == "gpu4 · k=2: equivalent, 2.00×"
    expected = {"sweep/difference": 0.1, "sweep/speed_up": 2.005}
    assert logged_metrics(compared(BASE, four)) == pytest.approx(expected, rel=1e-4)
    both = compared(BASE, four, bad)
    verdicts = {"gpu4 · k=2: equivalent, 2.00×", "bad: different (worse), 4.01×"}
    assert set(logged_tags(both)["sweep.verdict"].split("; ")) == verdicts
    assert {"sweep/speed_up/gpu4_k_2", "sweep/difference/bad"} < logged_metrics(both).keys()
    assert logged_metrics(compared(BASE)) == {}


def test_predictions_have_a_column(tmp_path: Path) -> None:
    """The mean prediction of a setup and its mean error; no column without predictions."""
    fast = [run("fast", seed, 80.0, 100.0, predicted_seconds=predicted) for seed, predicted in enumerate((90.0, 96.0))]
    folder = tmp_path / "with"
    folder.mkdir()
    _, page = report(folder, compared(BASE, fast))
    assert "predictederror" in page.text
    assert "93−7%" in page.text
    rows = (folder / "runs.csv").read_text().splitlines()
    assert "predicted_seconds,prediction_error" in rows[0]
    assert sum(",90.0,-0.0" in row or ",96.0,-0.0" in row for row in rows) == 2
    assert "predictederror" not in report(tmp_path, compared(BASE))[1].text
