"""A sweep in MLflow's pages and in its report, in a real browser.

RUNNER_SCREENSHOTS: a folder to keep the screenshots. RUNNER_SWEPT: a folder in which a sweep over devices and seeds was
run, with its output in `sweep.log`; otherwise a small sweep is run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Page

from tests.browser.pages import browser_page, chart, hide_paths, mlflow_pages, use_as_x_axis
from tests.runs import TRACKED, stored_runs

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Swept:
    """A finished sweep: its folder, the address of MLflow, the ids of its parent and of four runs, and its output."""

    folder: Path
    address: str
    parent: str
    runs: dict[str, str]
    output: str

    @property
    def setup(self) -> str:
        """The name of a setup that is not the baseline."""
        return re.sub(r" · s\d.*", "", list(self.runs)[-1])


def run_small_sweep(root: Path) -> None:
    grid = ["device=cpu,cpu2", "seed=0,1", "sync.k=2", "evaluation.metric=loss", "evaluation.goal=min"]
    command = [sys.executable, "-m", "runner", "-m", *TRACKED, *grid]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (root / "sweep.log").write_text(done.stdout)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swept]:
    given = os.environ.get("RUNNER_SWEPT")
    root = Path(given) if given else tmp_path_factory.mktemp("swept")
    if not given:
        run_small_sweep(root)
    found = stored_runs(root)
    (parent,) = (run.info.run_id for run in found if "sweep.jobs" in run.data.tags)
    jobs = [run for run in found if run.data.params.get("seed") in ("0", "1")]
    jobs = [run for run in jobs if run.data.params["device"] in ("cpu", "cpu2")]
    runs = {run.info.run_name: run.info.run_id for run in sorted(jobs, key=lambda run: run.info.run_name)}
    assert len(runs) == 4
    (folder,) = (root / "outputs" / "sweeps").iterdir()
    with mlflow_pages(root) as address:
        yield Swept(folder, address, parent, runs, (root / "sweep.log").read_text())


@pytest.fixture
def page() -> Iterator[Page]:
    with browser_page() as (page, blocked):
        yield page
    assert blocked == set(), "a page requested something from another host"


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("RUNNER_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_the_comparison_page_names_setups_and_what_differs(swept: Swept, page: Page, screenshots: Path) -> None:
    """MLflow's page for several runs has our run names, and few parameters, those that differ; none is nested."""
    runs = quote(json.dumps(list(swept.runs.values()), separators=(",", ":")))
    page.goto(
        f"{swept.address}/#/compare-runs?runs={runs}&experiments={quote(json.dumps(['1']))}&workflowType=machine_learning"
    )
    page.get_by_text("Comparing 4 Runs").wait_for()
    for name in swept.runs:
        page.get_by_text(name, exact=True).first.wait_for()
    params = page.locator("table", has=page.get_by_text("world_size", exact=True))
    params.first.scroll_into_view_if_needed()
    page.get_by_role("switch").first.check()
    shown = params.first.inner_text()
    assert {"device", "world_size", "micro_batch", "seed"} <= set(re.findall(r"^\w+", shown, re.MULTILINE)), shown
    assert "recipe" not in shown
    page.screenshot(path=screenshots / "mlflow-compare-runs.png", full_page=True)


def test_the_table_of_runs(swept: Swept, page: Page, screenshots: Path) -> None:
    """The address that `runner.track ui` prints shows runs, in columns that say how good they are; names have room."""
    log = (swept.folder.parents[2] / "ui.log").read_text()
    page.goto(re.findall(r"http://127\.0\.0\.1:\d+/#/\S+", log)[0])
    page.get_by_text("sweep · ").first.wait_for()
    for column in ("sweep.verdict", "eval/loss", "sweep/speed_up", "train/loss"):
        page.get_by_role("columnheader", name=column).first.wait_for()
    page.get_by_text(re.compile("^cpu2 .*: (undecided|equivalent|different)")).first.wait_for()
    assert page.get_by_role("columnheader", name="Run Name").first.bounding_box()["width"] >= 300  # type: ignore[index]
    page.screenshot(path=screenshots / "mlflow-runs.png")


def test_the_page_of_a_run(swept: Swept, page: Page, screenshots: Path) -> None:
    """Its description says how it ended, what the certificate says, and the plan; its metrics are listed."""
    run = list(swept.runs.values())[-1]
    page.goto(f"{swept.address}/#/experiments/1/runs/{run}?workflowType=machine_learning")
    for word in ("Finished", "Certificate", "Plan"):
        page.get_by_text(re.compile(f"^{word}:")).first.wait_for()
    page.get_by_text("eval/accuracy", exact=True).first.wait_for()
    page.screenshot(path=screenshots / "mlflow-run.png")


def test_the_charts_of_a_sweep(swept: Swept, page: Page, screenshots: Path) -> None:
    """The address that a sweep prints shows every job in every chart, and samples seen can be the x-axis."""
    (link,) = re.findall(r"http://127\.0\.0\.1:5000(/#/\S+)", swept.output)
    page.goto(swept.address + link)
    for name in swept.runs:
        page.get_by_text(name, exact=True).first.wait_for()
    assert page.get_by_text("sweep · ").count() == 0, "the parent has no metrics, so it must not be a row"
    page.get_by_text("eval/accuracy", exact=True).first.wait_for()
    page.screenshot(path=screenshots / "mlflow-charts.png")
    titles = page.locator("h4[title*='/']").evaluate_all("found => found.map(one => one.title)")
    assert [title for title in titles if not title.startswith(("eval/", "train/"))] == []
    assert titles[:2] == ["eval/loss", "eval/accuracy"], "the objective is not the first"
    for metric in ("eval/accuracy", "train/samples_per_s", "train/comm/bytes"):
        chart(page, metric)
    card = chart(page, "train/loss")
    use_as_x_axis(page, card, "train/samples_seen")
    card = chart(page, "train/loss")
    card.get_by_text("train/samples_seen", exact=True).first.wait_for()
    ticks = card.locator(".xtick text")
    ticks.first.wait_for()
    most = max(float(text.replace("k", "e3")) for text in ticks.all_text_contents())
    assert most >= 100, "hundreds of samples, not ten steps"
    drawn = card.locator(".scatterlayer .trace").filter(has=page.locator("path.js-line"))
    lengths = drawn.locator("path.js-line").evaluate_all("lines => lines.map(line => line.getTotalLength())")
    assert sum(length > 0 for length in lengths) >= 4, "a run has no line"
    page.screenshot(path=screenshots / "mlflow-samples-seen.png")


def test_the_report_is_in_the_artifact_pane(swept: Swept, page: Page, screenshots: Path) -> None:
    """The parent run shows the report in MLflow's preview, with table, verdict and plots, and each plot by itself."""
    where = f"{swept.address}/#/experiments/1/runs/{swept.parent}/artifacts/compare"
    page.goto(f"{where}/report.html?workflowType=machine_learning")
    preview = page.frame_locator("iframe").first
    preview.get_by_text(swept.setup).first.wait_for()
    preview.get_by_text(re.compile("equivalent|different|undecided")).first.wait_for()
    assert preview.locator("img").count() >= 2
    widths = preview.locator("img").evaluate_all("images => images.map(image => image.naturalWidth)")
    assert min(widths) > 100, "a plot was not drawn"
    hide_paths(page)
    page.screenshot(path=screenshots / "mlflow-report.png")
    page.goto("about:blank")  # a change after the # alone loads nothing
    page.goto(f"{where}/loss_vs_samples.png")
    page.locator("img[src*='loss_vs_samples'], img[src^='blob:'], img[src^='data:image/png']").first.wait_for()


def test_parent_run_has_the_verdicts(swept: Swept, page: Page, screenshots: Path) -> None:
    """Its page has the verdicts as description, all of which is in view, the sweep's tags, and links to its jobs."""
    page.goto(f"{swept.address}/#/experiments/1/runs/{swept.parent}?workflowType=machine_learning")
    page.get_by_text("sweep.varied").first.wait_for()
    description = page.locator("table", has=page.get_by_text("verdict"))
    description.first.wait_for()
    assert swept.setup in description.first.inner_text()
    last, more = description.locator("tr").last.bounding_box(), page.get_by_text("Show more").bounding_box()
    assert last is not None
    assert more is None or last["y"] + last["height"] < more["y"]
    page.get_by_text("Child runs").first.wait_for()
    page.get_by_role("link", name=re.compile(r"cpu\d? .*s\d")).first.wait_for()
    page.screenshot(path=screenshots / "mlflow-sweep.png")


def test_report_file(swept: Swept, page: Page, screenshots: Path) -> None:
    """Without server or network: table, verdict, rule, the command that made it; light and dark."""
    report = swept.folder / "compare" / "report.html"
    page.goto(report.as_uri())
    shown = page.locator("body").inner_text()
    for text in (swept.setup, "loss", "two one-sided tests", "python -m runner.compare"):
        assert text in shown, text
    page.screenshot(path=screenshots / "report.png", full_page=True)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.set_viewport_size({"width": 420, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 420, "it does not fit a narrow pane"
