"""Whether the tracking store can be reached, asked before a run starts."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from runner.config.choices import TrackerName
from runner.config.schema import Tracking
from runner.errors import UserError
from runner.track import preflight
from runner.track.preflight import check_given_run, check_tracking
from tests.sweep.stores import empty_store


def check(uri: str | None, kind: TrackerName = TrackerName.mlflow) -> None:
    check_tracking(Tracking(kind=kind, uri=uri))


class Server(http.server.ThreadingHTTPServer):
    """Answers every request with `status` and remembers what was asked for."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None]] = []

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
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


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


@pytest.mark.parametrize("path", ["", "/", "/mlflow", "/mlflow/"])
def test_server_that_answers(server: Server, path: str) -> None:
    """A server that answers will do; its health page is asked for, below the path of the address."""
    check(server.uri + path)
    assert [path for path, _ in server.asked] == [f"{path.rstrip('/')}/health"]


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_server_that_answers_with_a_refusal(server: Server, status: int) -> None:
    """A server that wants credentials or has no such page is there all the same."""
    server.status = status
    check(server.uri)
    assert len(server.asked) == 1


def test_credentials_are_no_part_of_the_address(server: Server) -> None:
    """User and password in the address do not keep the host from being found."""
    check(server.uri.replace("//", "//me:pass@"))
    assert len(server.asked) == 1


def test_server_that_is_not_there(closed_port: int) -> None:
    """A closed port is refused in one sentence that names the setting and three ways out."""
    with pytest.raises(UserError) as caught:
        check(f"http://127.0.0.1:{closed_port}")
    message = str(caught.value)
    assert message.startswith(f"tracking.uri=http://127.0.0.1:{closed_port} does not answer (")
    assert "tracking=none" in message
    assert "\n" not in message


def test_error_hides_the_password(closed_port: int) -> None:
    """The sentence that names the address does not name its password."""
    with pytest.raises(UserError, match=r"^tracking\.uri=http://\*\*\*@127") as caught:
        check(f"http://me:pass@127.0.0.1:{closed_port}")
    assert "pass@" not in str(caught.value)


def test_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes the connection and stays silent is given up on, not waited for."""
    monkeypatch.setattr(preflight, "ANSWER_WITHIN_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(UserError, match=r"does not answer .*timed out"):
            check(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_nothing_is_asked_where_nothing_is_tracked(server: Server, closed_port: int) -> None:
    """tracking=none, and the store of this folder, need no server."""
    check(None, TrackerName.none)
    check(None)
    with pytest.raises(UserError, match="tracking=none logs to the run's folder only"):
        check(f"http://127.0.0.1:{closed_port}", TrackerName.none)
    assert server.asked == []


@pytest.mark.parametrize("scheme", ["htp", "ftp", "localhost"])
def test_unknown_scheme(scheme: str) -> None:
    """A scheme that MLflow does not know is refused by name, with those that will do."""
    with pytest.raises(UserError, match=f"the scheme '{scheme}'.*http, https or sqlite") as caught:
        check(f"{scheme}://host:5000")
    assert str(caught.value).startswith(f"tracking.uri={scheme}://host:5000 ")


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://me:pass@db/x",
        "mysql://db/x",
        "file:///tmp/x",
        "mlruns",
        "databricks",
        "mysql+pymysql://me:pass@db/x",
    ],
)
def test_stores_that_are_left_to_mlflow(uri: str) -> None:
    """Databases and folders are MLflow's own business."""
    check(uri)


def test_address_that_cannot_be_read() -> None:
    """An address that is none is the user's mistake too."""
    with pytest.raises(UserError, match=r"tracking\.uri"):
        check("http://[::1")


@pytest.mark.parametrize("name", ["new.db", "new/folder/x.db"])
def test_database_that_can_be_made(tmp_path: Path, name: str) -> None:
    """A database file in a folder that can be made is accepted, and nothing is made yet."""
    check(f"sqlite:///{tmp_path / name}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file/x.db", "file/deeper/x.db", "folder"])
def test_database_that_cannot_be_made(tmp_path: Path, name: str) -> None:
    """A database below a file, or where a folder is, is refused with what is in the way."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"^tracking\.uri=sqlite:///") as caught:
        check(f"sqlite:///{tmp_path / name}")
    assert str(caught.value).endswith(f"{tmp_path / name.split('/')[0]} is in the way")


def test_database_that_is_there(tmp_path: Path) -> None:
    """A database file that exists is accepted."""
    (tmp_path / "x.db").write_bytes(b"")
    check(f"sqlite:///{tmp_path / 'x.db'}")


def test_run_of_a_store_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLFLOW_RUN_ID names a run to go on with: without its store it is refused, and asking makes no store."""
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    monkeypatch.chdir(tmp_path)
    for uri in (None, f"sqlite:///{tmp_path / 'x.db'}"):
        with pytest.raises(UserError, match=r"^MLFLOW_RUN_ID=abc is no run of "):
            check_given_run(Tracking(kind=TrackerName.mlflow, uri=uri))
        check(uri)  # commands that log to no run do not care
    check_given_run(Tracking(kind=TrackerName.none))
    assert list(tmp_path.iterdir()) == []


def test_run_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow still knows a deleted run, and takes nothing for it; one that is there, or restored, is accepted."""
    tracking = Tracking(kind=TrackerName.mlflow, uri=empty_store(tmp_path / "x.db"))
    client = MlflowClient(tracking.uri)
    run_id = client.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    check_given_run(tracking)
    client.delete_run(run_id)
    with pytest.raises(UserError, match=f"^MLFLOW_RUN_ID={run_id} was deleted in sqlite:.*x.db: restore it"):
        check_given_run(tracking)
