"""A real MLflow server that dies, stays away, or takes something and never answers: nothing is lost or doubled."""

from __future__ import annotations

import collections
import contextlib
import http.client
import http.server
import io
import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from runner import cli
from runner.folder.metrics_log import Metric, MetricsLog, MetricsReader
from runner.track import tracker as tracker_module
from runner.track.card import RunCard
from runner.track.tracker import Tracker
from tests.processes import start_noted
from tests.sweep.gated import GATED, hold, release, wait_until

BIN = Path(sys.executable).parent
#: The command line with less patience for a server at the end of a run: 30 seconds are long for a test.
IMPATIENT = """
import sys, time
from runner import cli
from runner.track import tracker
tracker._FINISH_TIMEOUT_S = 2.0
sys.exit(cli.main(sys.argv[1:], time.time()))
"""
HELD, HELD_AGAIN, STEPS = 10, 20, 30


class Server:
    """`mlflow server` on SQLite, as a process group of its own that can die and come back."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.database = folder / "server.db"
        self.artifacts = folder / "artifacts"
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.database}", "--artifacts-destination", str(self.artifacts)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        wait_until(self._answers, f"the server does not start: see {self._log}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def die(self) -> None:
        """As by power cut."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def ensure(self) -> None:
        if self._process is None:
            self.start()

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Straight from the database, past everything that might put double rows together."""
        with sqlite3.connect(self.database) as connection:
            return connection.execute(query, values).fetchall()


@pytest.fixture(scope="module")
def the_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.die()


@pytest.fixture
def server(the_server: Server) -> Server:
    the_server.ensure()
    return the_server


def command(root: Path, server: Server, *overrides: str, script: Sequence[str] = ("-m", "runner")) -> Any:
    """A run of the recipe that can be held, in `root`, logged to the server under the folder's name."""
    settings = [f"tracking.uri={server.uri}", f"tracking.experiment={root.name}", f"epochs={STEPS}"]
    return start(root, *script, *GATED, *settings, *overrides)


def start(root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return start_noted(root, *arguments, apart=False)


def said(root: Path) -> str:
    return (root / "said.txt").read_text()


def comes_to(root: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the run waits before this step."""

    def there() -> bool:
        assert process.poll() is None, said(root)
        return (root / f"at-0-{step}").exists()

    wait_until(there, f"it never came to step {step}: {said(root)}")


def sync(root: Path, *arguments: str) -> str:
    """`python -m runner.track sync` in this process, which must succeed; its output."""
    output = io.StringIO()
    with contextlib.chdir(root), contextlib.redirect_stdout(output):
        assert cli.track_main(["sync", *arguments]) == 0, output.getvalue()
    return output.getvalue()


Value = tuple[str, int, int, Any]


def as_stored(metric: Metric) -> Value:
    """What a SQL store makes of a value: NaN has no number, and infinity is the largest one."""
    value: Any = "nan" if math.isnan(metric.value) else metric.value
    if value in (math.inf, -math.inf):
        value = math.copysign(sys.float_info.max, value)
    return metric.key, metric.step, metric.timestamp, value


def in_folder(folder: Path) -> list[Value]:
    return sorted(map(as_stored, MetricsReader(folder).read()), key=repr)


def in_store(server: Server, run_id: str) -> list[Value]:
    query = "SELECT key, step, timestamp, value, is_nan FROM metrics WHERE run_uuid = ?"
    rows = server.rows(query, run_id)
    return sorted(((key, step, at, "nan" if nan else value) for key, step, at, value, nan in rows), key=repr)


def runs_of(server: Server, experiment: str) -> list[tuple[str, str, int, int]]:
    """Id, status, start and end of each run."""
    return server.rows(
        "SELECT run_uuid, status, start_time, end_time FROM runs JOIN experiments USING (experiment_id)"
        "WHERE experiments.name = ? ORDER BY start_time",
        experiment,
    )


def tags_of(server: Server, run_id: str) -> dict[str, str]:
    return dict(server.rows("SELECT key, value FROM tags WHERE run_uuid = ?", run_id))


def files_of(server: Server, run_id: str) -> dict[str, bytes]:
    (folder,) = server.artifacts.glob(f"*/{run_id}/artifacts")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def everything(server: Server) -> dict[str, Any]:
    """All that the store holds, to see whether something changes it."""
    tables = ("experiments", "runs", "metrics", "latest_metrics", "params", "tags", "datasets", "inputs", "input_tags")
    held: dict[str, Any] = {table: sorted(server.rows(f"SELECT * FROM {table}"), key=repr) for table in tables}
    held["files"] = {path: path.read_bytes() for path in server.artifacts.rglob("*") if path.is_file()}
    return held


# --- Whole runs ---------------------------------------------------------------------------------------------


def test_a_server_that_dies_and_comes_back(tmp_path: Path, server: Server) -> None:
    """Killed in mid-run and started again: training goes on, every value arrives once, the run is FINISHED."""
    hold(tmp_path, HELD)
    hold(tmp_path, HELD_AGAIN)
    process = command(tmp_path, server)
    comes_to(tmp_path, HELD, process)
    last = "SELECT 1 FROM metrics JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id) "
    last += "WHERE experiments.name = ? AND step = ?"
    wait_until(lambda: server.rows(last, tmp_path.name, HELD - 1), "nothing is shipped while it trains")
    server.die()
    release(tmp_path, HELD)
    comes_to(tmp_path, HELD_AGAIN, process)  # without a server
    wait_until(lambda: "MLflow cannot be reached" in said(tmp_path), "nobody misses the server")
    server.start()
    release(tmp_path, HELD_AGAIN)
    assert process.wait(timeout=120) == 0, said(tmp_path)
    (folder,) = tmp_path.glob("outputs/linear/*")
    summary = json.loads((folder / "summary.json").read_text())
    ((run_id, status, _, _),) = runs_of(server, tmp_path.name)
    assert (run_id, status) == (summary["mlflow_run_id"], "FINISHED")
    assert in_store(server, run_id) == in_folder(folder)
    assert {value[1] for value in in_folder(folder) if value[0] == "train/loss"} == set(range(1, STEPS + 1))
    assert said(tmp_path).count("MLflow cannot be reached") == 1
    assert "did not receive everything" not in said(tmp_path)
    card = RunCard.read(folder)
    assert (card.delivered, card.run_id) == (True, run_id)


@pytest.mark.long
def test_a_sweep_whose_server_stays_away(tmp_path: Path, server: Server) -> None:
    """All jobs run, the command ends as its jobs did, and one `sync` of the sweep's folder brings parent and jobs."""
    hold(tmp_path, HELD)
    process = command(tmp_path, server, "-m", "seed=0,1", script=("-c", IMPATIENT))
    comes_to(tmp_path, HELD, process)
    server.die()
    release(tmp_path, HELD)
    code = process.wait(timeout=180)
    server.start()
    assert "2 of 2 jobs done" in said(tmp_path)
    assert "Traceback" not in said(tmp_path), said(tmp_path)
    assert code == 0
    (sweep,) = tmp_path.glob("outputs/sweeps/*")
    sync(tmp_path, str(sweep))
    found = {run_id: (status, tags_of(server, run_id)) for run_id, status, _, _ in runs_of(server, tmp_path.name)}
    parent = RunCard.read(sweep).run_id
    assert parent is not None
    assert [status for status, _ in found.values()] == ["FINISHED"] * 3
    children = {run_id for run_id, (_, tags) in found.items() if tags.get("mlflow.parentRunId") == parent}
    assert found.keys() - children == {parent}
    for job in ("0", "1"):
        run_id = RunCard.read(sweep / job).run_id
        assert run_id in children
        assert in_store(server, run_id) == in_folder(sweep / job)


# --- Answers that are lost ----------------------------------------------------------------------------------


class Proxy:
    """Forwards every request to a server; loses some responses after the server has acted, or is down."""

    def __init__(self, server: Server) -> None:
        self.paths: collections.Counter[str] = collections.Counter()
        self.sent: list[tuple[str, int, int]] = []
        self.lose: dict[str, int] = {}
        self.lost: collections.Counter[str] = collections.Counter()
        self.down = False
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                if proxy.down:
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                inner = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
                inner.request(self.command, self.path, body, headers)
                answer = inner.getresponse()
                content = answer.read()
                inner.close()
                action = self.path.partition("?")[0].rpartition("mlflow/")[2]
                proxy.note(action, body)
                if proxy.lose.get(action, 0):
                    proxy.lose[action] -= 1
                    proxy.lost[action] += 1
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.getheader("Content-Type") or "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = handle_any

            def log_message(self, *_: object) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def note(self, action: str, body: bytes) -> None:
        self.paths[action] += 1
        if action == "runs/log-batch":
            for metric in json.loads(body).get("metrics", []):
                self.sent.append((metric["key"], int(metric.get("step", 0)), int(metric["timestamp"])))

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server)
    yield proxy
    proxy.close()


def write(log: MetricsLog, steps: range) -> None:
    for step in steps:
        loss = {7: math.nan, 8: math.inf, 9: -math.inf}.get(step, 1 / step)
        log.write(step, {"train/loss": loss, "train/lr": 0.1, "train/samples_seen": 8.0 * step})


def test_a_server_that_stays_down(
    tmp_path: Path, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends and names the command that uploads it later; that sends everything, and again changes nothing."""
    monkeypatch.setattr(tracker_module, "_SEND_EVERY_S", 0.05)
    monkeypatch.setattr(tracker_module, "_FINISH_TIMEOUT_S", 0.5)
    folder = tmp_path / "outputs" / "run"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    tracker = Tracker(RunCard(tmp_path.name, "a run", {"seed": "0"}, {"device": "cpu"}, proxy.uri), folder, proxy.uri)
    log = MetricsLog(folder)
    write(log, range(1, 51))
    tracker.start()
    wait_until(lambda: tracker.run_id and in_store(server, tracker.run_id), "no metrics are sent", 60)
    proxy.down = True
    write(log, range(51, 101))
    tracker.tag("certificate", "equivalent")
    tracker.finish("FINISHED")
    ended_at = time.time() * 1000
    assert f"python -m runner.track sync {folder}" in capsys.readouterr().err
    proxy.down = False
    ((run_id, status, started, _),) = runs_of(server, tmp_path.name)
    assert status == "RUNNING"

    assert "delivered" in sync(tmp_path, str(folder))
    ((again, status, _, ended),) = runs_of(server, tmp_path.name)
    assert (again, status) == (run_id, "FINISHED")
    assert started < ended < ended_at  # the end of the run, not of the upload
    assert in_store(server, run_id) == in_folder(folder)
    assert len(in_folder(folder)) == 300
    assert files_of(server, run_id) == {n: (folder / n).read_bytes() for n in ("metrics.jsonl", "summary.json")}
    assert {"device": "cpu", "certificate": "equivalent"}.items() <= tags_of(server, run_id).items()

    before = everything(server)
    sync(tmp_path, "outputs", "--killed")
    assert everything(server) == before


@pytest.mark.parametrize(
    ("action", "times"),
    [
        ("experiments/create", 1),
        ("runs/create", 1),
        ("runs/log-batch", 1),
        ("runs/log-batch", 3),
        ("runs/update", 2),
        ("runs/set-tag", 2),
    ],
)
def test_an_answer_that_is_lost(
    action: str, times: int, tmp_path: Path, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has acted and could not say so: there is one run, closed, with every value once."""
    monkeypatch.setattr(tracker_module, "_SEND_EVERY_S", 0.05)
    name = f"{tmp_path.name}-{action}-{times}"
    card = RunCard(name, "a run", {"seed": "0"}, {"device": "cpu"}, proxy.uri)
    tracker = Tracker(card, tmp_path, proxy.uri)
    log = MetricsLog(tmp_path)
    write(log, range(1, 51))
    proxy.lose = {action: times}
    tracker.start()
    if action not in ("runs/update", "runs/set-tag"):  # which come at the end
        wait_until(lambda: proxy.lost[action] == times, f"{proxy.paths} has no {action}", 60)
    write(log, range(51, 101))
    tracker.tag("certificate", "equivalent")
    tracker.finish("FINISHED")
    assert proxy.lost[action] == times
    assert [run[1] for run in runs_of(server, name)] == ["FINISHED"]
    ((run_id, *_),) = runs_of(server, name)
    assert run_id == tracker.run_id
    assert in_store(server, run_id) == in_folder(tmp_path)
    assert len(in_folder(tmp_path)) == 300
    assert tags_of(server, run_id)["certificate"] == "equivalent"
    assert RunCard.read(tmp_path).delivered


def test_nothing_is_sent_twice(tmp_path: Path, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3,600 values in four requests the server takes the second without an answer: the rest is sent, once."""
    monkeypatch.setattr(tracker_module, "_SEND_EVERY_S", 0.05)
    card = RunCard(tmp_path.name, "a run", {}, {}, proxy.uri)
    tracker = Tracker(card, tmp_path, proxy.uri)
    write(MetricsLog(tmp_path), range(1, 1201))
    original = proxy.note

    def note(action: str, body: bytes) -> None:
        original(action, body)
        if len(proxy.sent) == 2000 and not proxy.lost:
            proxy.lose = {"runs/log-batch": 1}

    monkeypatch.setattr(proxy, "note", note)
    tracker.start()
    tracker.finish("FINISHED")
    assert proxy.lost["runs/log-batch"] == 1
    assert tracker.run_id is not None
    assert in_store(server, tracker.run_id) == in_folder(tmp_path)
    assert len(in_folder(tmp_path)) == 3600
    assert len(proxy.sent) == len(set(proxy.sent)) == 3600


def test_mlflow_says_nothing_of_its_own(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """MLflow would print the address of the run, between the runner's own lines, and a password that is in it."""
    monkeypatch.setattr(tracker_module, "_SEND_EVERY_S", 0.05)
    uri = server.uri.replace("//", "//me:secret@")
    tracker = Tracker(RunCard(tmp_path.name, "a run", {}, {}, uri), tmp_path, uri)
    tracker.start()
    tracker.finish("FINISHED")
    assert [run[1] for run in runs_of(server, tmp_path.name)] == ["FINISHED"]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "secret" not in captured.err
