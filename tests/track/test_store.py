"""Which store is used, and whether it can be reached: checked before a run starts."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from runner.config.choices import TrackerName
from runner.config.compose import compose, settings
from runner.config.schema import Tracking
from runner.errors import UserError
from runner.track import store
from runner.track.store import check_given_run, check_tracking, store_of
from tests.sweep.stores import empty_store


def check(uri: str | None) -> None:
    check_tracking(Tracking(TrackerName.mlflow, uri))


class Server(http.server.ThreadingHTTPServer):
    """Answers every request with `status`, and records the paths."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested: list[str] = []

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requested.append(self.path)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_environment_gives_way_to_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_of(settings(compose([])).tracking) == f"sqlite:///{tmp_path}/outputs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")
    assert store_of(settings(compose([])).tracking) == "http://environment"
    assert store_of(settings(compose(["tracking.uri=http://typed"])).tracking) == "http://typed"
    assert store_of(settings(compose(["tracking=none"])).tracking) is None


@pytest.mark.parametrize(("path", "status"), [("", 200), ("/mlflow/", 200), ("", 401), ("", 500)])
def test_any_response_of_a_server_will_do(server: Server, path: str, status: int) -> None:
    """Its health page is requested, without the credentials in the URI."""
    server.status = status
    check(server.uri.replace("//", "//me:pass@") + path)
    assert server.requested == [f"{path.rstrip('/')}/health"]


def test_a_server_that_is_down() -> None:
    """The message names the setting without the password."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(UserError, match=rf"^tracking\.uri=http://\*\*\*@127.0.0.1:{port} .*tracking=none") as caught:
        check(f"http://me:pass@127.0.0.1:{port}")
    assert "pass" not in str(caught.value)


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ANSWER_WITHIN_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(UserError, match="timed out"):
            check(f"http://127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize(
    "uri", ["htp://host:5000", "localhost:5000", "http://[::1", "sqlite:///FILE/x.db", "sqlite:///DIR"]
)
def test_an_invalid_uri(uri: str, tmp_path: Path) -> None:
    """Unknown or missing scheme, malformed, a database below a file, a database that is a folder."""
    (tmp_path / "FILE").touch()
    (tmp_path / "DIR").mkdir()
    with pytest.raises(UserError, match=r"^tracking\.uri="):
        check(uri.replace("sqlite:///", f"sqlite:///{tmp_path}/"))


@pytest.mark.parametrize(
    "uri", [None, "postgresql://me:pass@db/x", "mysql+pymysql://db/x", "file:///tmp/x", "mlruns", "databricks"]
)
def test_other_stores_are_left_to_mlflow(uri: str | None) -> None:
    check(uri)


def test_a_new_database_is_accepted_and_not_created(tmp_path: Path) -> None:
    check(f"sqlite:///{tmp_path}/new/folder/x.db")
    assert list(tmp_path.iterdir()) == []


def test_mlflow_run_id_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing store is not created by the check; a deleted run is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    with pytest.raises(UserError, match=r"^MLFLOW_RUN_ID=abc "):
        check_given_run(Tracking(TrackerName.mlflow))
    check_given_run(Tracking(TrackerName.none))
    assert list(tmp_path.iterdir()) == []
    tracking = Tracking(TrackerName.mlflow, empty_store(tmp_path / "x.db"))
    client = MlflowClient(tracking.uri)
    run_id = client.create_run("0").info.run_id
    with pytest.raises(UserError, match=r"^MLFLOW_RUN_ID=abc "):
        check_given_run(tracking)
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    check_given_run(tracking)
    client.delete_run(run_id)
    with pytest.raises(UserError, match="was deleted"):
        check_given_run(tracking)
