"""A real MLflow server that dies, stays away, or acts without answering: nothing is lost or sent twice."""

from __future__ import annotations

import collections
import http.client
import http.server
import math
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import cli
from runner.folder.metrics_log import Metric, MetricsLog, MetricsReader
from runner.track import tracker as tracker_module
from runner.track.card import TrackingRecord
from runner.track.delivery import stored_key
from runner.track.tracker import Tracker
from tests import processes
from tests.processes import BIN, TIMEOUT_S, kill, output, wait_for_gate, wait_until
from tests.runs import read
from tests.tools.sweep.gated import GATED, hold, release

#: `python -m runner` that waits two seconds instead of 30 for a server at the end of a run.
IMPATIENT = """
import sys, time
from runner import cli
from runner.track import tracker
tracker._FINISH_TIMEOUT_S = 2.0
sys.exit(cli.main(sys.argv[1:], time.time()))
"""
HELD, HELD_AGAIN, STEPS = 5, 10, 15


class Server:
    """`mlflow server` on SQLite, in a session of its own, that can die and come back on the same port."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.database = folder / "server.db"
        self.artifacts = folder / "artifacts"
        self._process: subprocess.Popen[bytes] | None = None

    def ensure_running(self) -> None:
        if self._process is not None:
            return
        command = [str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.database}", "--artifacts-destination", str(self.artifacts)]
        environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._process = processes.start(self.folder, *command, keep=True, **environment)
        wait_until(self._answers, f"the server does not start: {self.folder}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, output(self.folder)
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def die(self) -> None:
        if self._process is not None:
            kill(self._process)
            self._process = None

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Directly from the database, since MLflow's own reading could merge duplicates."""
        with sqlite3.connect(self.database) as connection:
            return connection.execute(query, values).fetchall()


@pytest.fixture(scope="module")
def the_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.die()


@pytest.fixture
def server(the_server: Server) -> Server:
    the_server.ensure_running()
    return the_server


def start(root: Path, server: Server, *arguments: str) -> subprocess.Popen[bytes]:
    """A run of the recipe that can be held, in `root`, logged to the server under the folder's name."""
    settings = [f"tracking.uri={server.uri}", f"tracking.experiment={root.name}", f"epochs={STEPS}"]
    return processes.start(root, "-c", IMPATIENT, *GATED, *settings, *arguments)


def sync(*arguments: str) -> None:
    assert cli.run_tool("track", ["sync", *arguments]) == 0


Value = tuple[str, int, int, Any]


def as_stored(metric: Metric) -> Value:
    """A value as a SQL store has it: NaN is a flag, and infinity the largest number."""
    value: Any = "nan" if math.isnan(metric.value) else metric.value
    if value in (math.inf, -math.inf):
        value = math.copysign(sys.float_info.max, value)
    return stored_key(metric.key), metric.step, metric.timestamp, value


def in_folder(folder: Path) -> list[Value]:
    return sorted(map(as_stored, MetricsReader(folder).read()), key=repr)


def in_store(server: Server, run_id: str) -> list[Value]:
    rows = server.rows("SELECT key, step, timestamp, value, is_nan FROM metrics WHERE run_uuid = ?", run_id)
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
    """The whole content of the store."""
    tables = ("experiments", "runs", "metrics", "latest_metrics", "params", "tags", "datasets", "inputs", "input_tags")
    found: dict[str, Any] = {table: sorted(server.rows(f"SELECT * FROM {table}"), key=repr) for table in tables}
    found["files"] = {path: path.read_bytes() for path in server.artifacts.rglob("*") if path.is_file()}
    return found


# --- Whole runs ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_server_that_dies_and_comes_back(here: Path, server: Server) -> None:
    """Killed in the middle of a run and restarted: training continues, every value arrives once, FINISHED."""
    hold(here, HELD)
    hold(here, HELD_AGAIN)
    process = start(here, server)
    wait_for_gate(here, HELD, process)
    last = "SELECT 1 FROM metrics JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id) "
    last += "WHERE experiments.name = ? AND step = ?"
    wait_until(lambda: server.rows(last, here.name, HELD - 1), "nothing is sent while it trains")
    server.die()
    release(here, HELD)
    wait_for_gate(here, HELD_AGAIN, process)  # without a server
    wait_until(lambda: "MLflow" in output(here), "the missing server is not reported")
    server.ensure_running()
    release(here, HELD_AGAIN)
    assert process.wait(timeout=TIMEOUT_S) == 0, output(here)
    (folder,) = here.glob("outputs/linear/*")
    ((run_id, status, _, _),) = runs_of(server, here.name)
    assert (run_id, status) == (read(folder, "summary.json")["mlflow_run_id"], "FINISHED")
    assert in_store(server, run_id) == in_folder(folder)
    assert {step for key, step, _, _ in in_folder(folder) if key == "train/loss"} == set(range(1, STEPS + 1))
    assert "runner.track sync" not in output(here)
    card = TrackingRecord.read(folder)
    assert (card.delivered, card.run_id) == (True, run_id)


@pytest.mark.long
def test_sweep_whose_server_stays_away(here: Path, server: Server) -> None:
    """All jobs run, the exit code is theirs, and one `sync` of the sweep's folder sends parent and jobs."""
    hold(here, HELD)
    process = start(here, server, "-m", "seed=0,1")
    wait_for_gate(here, HELD, process)
    server.die()
    release(here, HELD)
    code = process.wait(timeout=TIMEOUT_S)
    server.ensure_running()
    assert "2 of 2 jobs done" in output(here)
    assert "Traceback" not in output(here)
    assert code == 0
    (sweep,) = here.glob("outputs/sweeps/*")
    named = f"--tracking-uri {server.uri}"
    assert f"python -m runner.track sync {sweep.relative_to(here)} {named}" in output(here)
    sync(str(sweep), *named.split())
    found = {run_id: (status, tags_of(server, run_id)) for run_id, status, _, _ in runs_of(server, here.name)}
    parent = TrackingRecord.read(sweep).run_id
    assert [status for status, _ in found.values()] == ["FINISHED"] * 3
    children = {run_id for run_id, (_, tags) in found.items() if tags.get("mlflow.parentRunId") == parent}
    assert found.keys() - children == {parent}
    for job in ("0", "1"):
        run_id = TrackingRecord.read(sweep / job).run_id
        assert run_id in children
        assert in_store(server, run_id) == in_folder(sweep / job)


# --- Answers that are lost ----------------------------------------------------------------------------------


class Proxy:
    """Forwards every request to a server; drops some answers after the server has acted, or is down."""

    def __init__(self, server: Server) -> None:
        self.drop: dict[str, int] = {}
        self.dropped: collections.Counter[str] = collections.Counter()
        self.down = False
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if proxy.down:
                    self.close_connection = True
                    return
                inner = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
                inner.request(self.command, self.path, body, headers)
                answer = inner.getresponse()
                content = answer.read()
                inner.close()
                action = self.path.partition("?")[0].rpartition("mlflow/")[2]
                if proxy.drop.get(action, 0):
                    proxy.drop[action] -= 1
                    proxy.dropped[action] += 1
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

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(tracker_module, "_SEND_EVERY_S", 0.05)
    proxy = Proxy(server)
    yield proxy
    proxy.close()


def write(folder: Path, steps: range) -> None:
    log = MetricsLog(folder)
    for step in steps:
        loss = {7: math.nan, 8: math.inf, 9: -math.inf}.get(step, 1 / step)
        log.write(step, {"train/loss": loss, "train/lr": 0.1, "train/samples_seen": 8.0 * step})
    log.close()


@pytest.mark.parametrize(("action", "times"), [("runs/create", 1), ("runs/log-batch", 2), ("runs/update", 1)])
def test_lost_answer(
    action: str, times: int, tmp_path: Path, server: Server, proxy: Proxy, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server has acted and the answer is lost: there is one run, closed, with every value once.

    MLflow prints nothing, which would show the address with its password.
    """
    name, uri = f"{tmp_path.name}-{action}", proxy.uri.replace("//", "//me:secret@")
    tracker = Tracker(TrackingRecord(name, "a run", {"seed": "0"}, {"device": "cpu"}, uri), tmp_path, uri)
    write(tmp_path, range(1, 51))
    proxy.drop = {action: times}
    tracker.start()
    if action != "runs/update":  # which comes at the end
        wait_until(lambda: proxy.dropped[action] == times, f"no {action}", 60)
    write(tmp_path, range(51, 101))
    tracker.tag("certificate", "equivalent")
    tracker.finish("FINISHED")
    assert proxy.dropped[action] == times
    ((run_id, status, _, _),) = runs_of(server, name)
    assert (run_id, status) == (tracker.run_id, "FINISHED")
    assert in_store(server, run_id) == in_folder(tmp_path)
    assert len(in_folder(tmp_path)) == 300
    assert tags_of(server, run_id)["certificate"] == "equivalent"
    assert TrackingRecord.read(tmp_path).delivered
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "secret" not in captured.err


def test_server_that_stays_away(
    here: Path, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends and names the command that uploads it later; that sends everything, and repeating it nothing."""
    monkeypatch.setattr(tracker_module, "_FINISH_TIMEOUT_S", 0.5)
    folder = here / "outputs" / "run"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    card = TrackingRecord(here.name, "a run", {"seed": "0"}, {"device": "cpu"}, proxy.uri)
    tracker = Tracker(card, folder, proxy.uri)
    write(folder, range(1, 51))
    tracker.start()
    wait_until(lambda: tracker.run_id and in_store(server, tracker.run_id), "no metrics are sent")
    proxy.down = True
    write(folder, range(51, 101))
    tracker.tag("certificate", "equivalent")
    tracker.finish("FINISHED")
    ended_at = time.time() * 1000
    assert f"python -m runner.track sync {folder} --tracking-uri {proxy.uri}" in capsys.readouterr().err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    proxy.down = False
    ((run_id, status, started, _),) = runs_of(server, here.name)
    assert status == "RUNNING"  # the last that the store knows

    sync(str(folder))
    ((same_id, status, _, ended),) = runs_of(server, here.name)
    assert (same_id, status) == (run_id, "FINISHED")
    assert started < ended < ended_at  # of the run, not of the upload
    assert in_store(server, run_id) == in_folder(folder)
    assert len(in_folder(folder)) == 300
    assert files_of(server, run_id) == {n: (folder / n).read_bytes() for n in ("metrics.jsonl", "summary.json")}
    assert {"device": "cpu", "certificate": "equivalent"}.items() <= tags_of(server, run_id).items()

    before = everything(server)
    sync("outputs", "--killed")
    assert everything(server) == before
