"""The report's content security policy in a real browser: it blocks nothing of the report, and everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.tools.compare.report import write_report
from tests.browser.pages import browser_page
from tests.tools.compare.make import BASE, compared, runs

pytestmark = pytest.mark.long

HOSTILE = """<script>document.title = "ran"</script><img id="outside" src="metric_vs_speed.png">
<p onclick="document.title = 'ran'" id="click">click</p><iframe src="data:text/html,x"></iframe>"""


def test_a_narrow_frame(tmp_path: Path) -> None:
    """MLflow leaves 800 pixels of a window of 1,400 to a report: a table with all columns fits."""
    known = {"tokens_per_s": 123456.0, "model_flops_utilization": 0.31, "peak_memory_bytes": 2**31}
    base, four = (
        runs(name, [80.0, 80.4, 78.2], 400.0, workers=n, predicted_seconds=250.0, **known)
        for name, n in (("cpu · lr=0.001", 1), ("gpu4 · k=4 · lr=0.001", 4))
    )
    write_report(compared(base, four), tmp_path, "python -m runner.compare x")
    with browser_page() as (page, _):
        page.set_viewport_size({"width": 800, "height": 900})
        page.goto(f"file://{tmp_path}/report.html")
        assert page.locator(".wide").first.evaluate("one => one.scrollWidth <= one.clientWidth")


def test_the_policy(tmp_path: Path) -> None:
    """Styles and pictures of the report are shown without a complaint; what a hostile name might add does nothing."""
    four = runs("four", [80.1, 80.3, 80.2], [200.0, 420.0, 202.0], workers=4)
    write_report(compared(BASE, four), tmp_path, "python -m runner.compare x")
    text = (tmp_path / "report.html").read_text()
    (tmp_path / "hostile.html").write_text(text.replace("</body>", f"{HOSTILE}</body>"))
    with browser_page() as (page, blocked):
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(f"file://{tmp_path}/report.html")
        page.screenshot(path=tmp_path / "report.png", full_page=True)
        widths = page.locator("figure img").evaluate_all("images => images.map(one => one.naturalWidth)")
        assert widths
        assert min(widths) > 100
        assert page.locator("table").first.evaluate("one => getComputedStyle(one).borderCollapse") == "collapse"
        assert complaints == []

        page.goto(f"file://{tmp_path}/hostile.html")
        page.locator("#click").click()
        assert page.title() != "ran"
        assert page.locator("#outside").evaluate("one => one.naturalWidth") == 0
        assert len(complaints) >= 4
        assert blocked == set()
