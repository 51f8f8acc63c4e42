"""MLflow's pages in a real browser: Debian's chromium, headless, without access to other hosts."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Locator, Page, Route, sync_playwright

#: Milliseconds to wait for an element, generous since the machine can be busy.
TIMEOUT_MS = 120_000


@contextlib.contextmanager
def mlflow_pages(root: Path) -> Iterator[str]:
    """`python -m runner.track ui` in a folder; the address of its pages."""
    port = _free_port()
    command = [sys.executable, "-m", "runner.track", "ui", "--port", str(port)]
    with (root / "ui.log").open("w") as log:
        process = subprocess.Popen(command, cwd=root, stdout=log, stderr=log, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_up(address, process, root / "ui.log")
            yield address
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 15)  # its session: the server and its workers
                process.wait(30)


def _free_port() -> int:
    """A port below those that the system gives out, so that no worker of another test takes it while MLflow starts."""
    start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(start // 2, start)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def _wait_until_up(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{address}/health"):
            return
        time.sleep(0.2)
    raise AssertionError(f"no answer from {address}\n{log.read_text()}")


@contextlib.contextmanager
def browser_page() -> Iterator[tuple[Page, set[str]]]:
    """A page of a new browser, and the set of requests to other hosts, which are blocked."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "these tests need a browser: apt-get install chromium"
    blocked: set[str] = set()

    def block_other_hosts(route: Route) -> None:
        url = route.request.url
        if url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:")):
            route.continue_()
        else:
            blocked.add(url)
            route.abort()

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": 1500, "height": 1000})
        context.set_default_timeout(TIMEOUT_MS)
        # In a new browser MLflow's assistant covers a third of the page.
        context.add_init_script("localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')")
        context.route("**/*", block_other_hosts)
        try:
            yield context.new_page(), blocked
        finally:
            browser.close()


def chart(page: Page, title: str) -> Locator:
    """The card of the metric chart with this title, on a page of charts."""
    page.get_by_placeholder("Search metric charts").fill(title)
    card = (
        page.locator("div", has=page.locator(f"h4[title='{title}']")).filter(has=page.locator(".js-plotly-plot")).last
    )
    card.wait_for()
    return card


def use_as_x_axis(page: Page, card: Locator, metric: str) -> None:
    """Set a chart's x-axis to a metric, in MLflow's dialog for it."""
    card.locator("button[data-component-id*='menu'], button[data-testid*='menu']").first.click()
    page.get_by_role("menuitem", name="Configure").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("radio", name="Metric").check()
    dialog.get_by_role("combobox").first.click()
    options = page.locator(".du-bois-light-select-item-option-content")
    options.first.wait_for()
    for _ in range(100):  # the page has only the options that are in view: scroll to the metric
        if options.filter(has_text=metric).count():
            break
        page.keyboard.press("ArrowDown")
    options.filter(has_text=metric).click()
    page.get_by_role("button", name="Save changes").click()
    dialog.wait_for(state="hidden")


def hide_paths(page: Page) -> None:
    """Hide the folder of an artifact, so that screenshots are the same on every machine."""
    page.get_by_text("Path: file:").evaluate_all("found => found.forEach(one => one.style.visibility = 'hidden')")
