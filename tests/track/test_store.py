"""Which store is used, and whether it can be reached: checked before a run starts."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import re
import shutil
import socket
import sqlite3
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from mlflow.tracking import MlflowClient

from runner.config.compose import compose, settings
from runner.config.schema import Tracking
from runner.errors import UserError
from runner.track import store
from runner.track.store import check_given_run, check_tracking, error_summary, make_database, store_for, store_of
from tests.tools.sweep.stores import empty_store


def check(uri: str | None) -> None:
    check_tracking(Tracking(mlflow=True, uri=uri))


class Server(http.server.ThreadingHTTPServer):
    """Answers every request with `status`, as JSON, and records the paths."""

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
        self.send_header("Content-Type", "application/json")
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


@pytest.mark.parametrize(("path", "status"), [("", 200), ("/mlflow/", 200), ("", 401), ("/behind/a/proxy", 403)])
def test_a_server_that_is_mlflow_or_asks_for_a_login(server: Server, path: str, status: int) -> None:
    """Below the path of the URI, and without its credentials."""
    server.status = status
    check(server.uri.replace("//", "//me:pass@") + path)
    (requested,) = server.requested
    assert requested.startswith(f"{path.rstrip('/')}/api/2.0/mlflow/")


@pytest.mark.parametrize("status", [404, 500, 502])
def test_a_server_without_mlflow(server: Server, status: int) -> None:
    server.status = status
    with pytest.raises(UserError, match=rf"^tracking\.uri=.* {status} .*tracking=none"):
        check(server.uri)


def test_a_certificate_of_their_own_is_left_to_mlflow(server: Server, tmp_path: Path) -> None:
    """Which has settings for it."""
    key, day = ec.generate_private_key(ec.SECP256R1()), datetime.timedelta(days=1)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    pem += key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "server.pem").write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    check(server.uri.replace("http:", "https:"))
    assert not server.requested


def test_an_error_is_one_line_without_a_page() -> None:
    """What MLflow says of a server that is none."""
    page = "<!doctype html>\n<html>\n<title>404</title>"
    error = Exception(f"API request to endpoint /api failed with error code 404 != 200. Response body: '{page}'")
    assert error_summary(error) == "API request to endpoint /api failed with error code 404 != 200"
    assert error_summary(Exception(page)) == "an HTML page"


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ANSWER_WITHIN_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(UserError, match="timed out"):
            check(f"http://127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("uri", [None, "file:///tmp/x", "mlruns", "databricks"])
def test_other_stores_are_left_to_mlflow(uri: str | None) -> None:
    check(uri)


@pytest.mark.parametrize(
    ("uri", "package"),
    [
        ("postgresql://me:pass@db/x", "pip install psycopg2-binary, and begin the address with postgresql+psycopg2://"),
        ("postgresql+psycopg2://me:pass@db/x", "pip install psycopg2-binary"),
        ("postgresql+nodriver://me:pass@db/x", "nodriver"),
        ("mysql+pymysql://db/x", "pip install pymysql"),
    ],
)
def test_a_database_without_its_driver(uri: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("psycopg2", "pymysql"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(UserError) as caught:
        check(uri)
    assert package in str(caught.value)
    assert "pass@" not in str(caught.value)


class Refused(Exception):
    """What a driver raises."""


def test_a_database_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow would try for minutes, and the run would end before it says why."""
    limits = []

    def connect(*_: object, connect_timeout: float, **__: object) -> None:
        limits.append(connect_timeout)
        raise Refused('FATAL: password authentication failed for user "me" (postgresql://me:secret@db/x)')

    driver = ModuleType("psycopg2")  # as if it were installed
    vars(driver).update(paramstyle="pyformat", Error=Refused, connect=connect, extras=ModuleType("psycopg2.extras"))
    monkeypatch.setitem(sys.modules, "psycopg2", driver)
    with pytest.raises(UserError, match="password authentication failed") as caught:
        check("postgresql+psycopg2://me:secret@db/x")
    assert "secret" not in str(caught.value)
    assert limits == [store.ANSWER_WITHIN_S]


def test_a_new_database_is_accepted_and_not_created(tmp_path: Path) -> None:
    check(f"sqlite:///{tmp_path}/new/folder/x.db")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.db").touch()
    for uri in (f"sqlite:///{tmp_path}/empty.db", empty_store(tmp_path / "there.db")):
        check(uri)


def test_mlflow_run_id_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing store is not created by the check; a deleted run is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    with pytest.raises(UserError, match=r"^MLFLOW_RUN_ID=abc "):
        check_given_run(Tracking(mlflow=True))
    check_given_run(Tracking())
    assert list(tmp_path.iterdir()) == []
    tracking = Tracking(mlflow=True, uri=empty_store(tmp_path / "x.db"))
    client = MlflowClient(tracking.uri)
    run_id = client.create_run("0").info.run_id
    with pytest.raises(UserError, match=r"^MLFLOW_RUN_ID=abc "):
        check_given_run(tracking)
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    check_given_run(tracking)
    client.delete_run(run_id)
    with pytest.raises(UserError, match="was deleted"):
        check_given_run(tracking)


def test_a_database_is_made_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves no half of it, and one that comes second leaves the first one's as it is."""
    database = tmp_path / "outputs" / "mlflow.db"

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "link", killed)
        with pytest.raises(KeyboardInterrupt):
            make_database(database)
    assert not database.exists()
    make_database(database)
    client = MlflowClient(f"sqlite:///{database}")
    made = client.create_experiment("first")
    with monkeypatch.context() as patch:
        exists = Path.exists
        patch.setattr(Path, "exists", lambda path: path != database and exists(path))
        make_database(database)
    assert client.get_experiment(made).name == "first"
    assert list(database.parent.glob(".mlflow.db-*")) == []


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run, as the runner makes it."""
    database = tmp_path_factory.mktemp("store") / "outputs" / "mlflow.db"
    make_database(database)
    client = MlflowClient(f"sqlite:///{database}")
    experiment = client.create_experiment("runner", artifact_location=(database.parent / "mlartifacts").as_uri())
    client.create_run(experiment)
    return database


@pytest.mark.parametrize(
    ("location", "is_own"),
    [
        (None, True),
        ("http://127.0.0.1:9/x", False),
        ("s3://bucket/x", False),
        ("file:///home/victim/.ssh", False),
        ("file://host/{outputs}/mlartifacts/x", False),
        ("file://{outputs}/mlartifacts/../../x", False),
        ("file://{outputs}/mlartifacts/%2e%2e/x", False),
        ("{outputs}/mlartifacts/x", True),
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_store_that_comes_with_a_folder(
    recorded: bool, location: str | None, is_own: bool, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used if it keeps artifacts in its own folder, or if the command names it."""
    run, database = tmp_path / "outputs" / "cola" / "run", tmp_path / "outputs" / "mlflow.db"
    run.mkdir(parents=True)
    shutil.copy(made, database)
    own = (location or "file://{outputs}/mlartifacts/1/artifacts").format(outputs=tmp_path / "outputs")
    with contextlib.closing(sqlite3.connect(database)) as content:
        content.execute("UPDATE runs SET artifact_uri = ?", (own,))
        content.execute("UPDATE experiments SET artifact_location = ?", (f"file://{tmp_path}/outputs/mlartifacts",))
        content.commit()
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{database}"
    asked = (uri if recorded else None, run)
    if is_own:
        assert store_for(*asked, None, "tracking.uri") == asked[0]
    else:
        with pytest.raises(UserError, match=rf"tracking\.uri={re.escape(uri)}"):
            store_for(*asked, None, "tracking.uri")
    assert store_for(*asked, uri, "tracking.uri") == uri


def test_a_project_that_was_moved(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store that is there is suggested, not the one that is gone."""
    run = tmp_path / "outputs" / "cola" / "run"
    run.mkdir(parents=True)
    shutil.copy(made, tmp_path / "outputs" / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"add tracking\.uri=sqlite:///{re.escape(str(tmp_path))}/outputs/mlflow\.db"):
        store_for("sqlite:////gone/outputs/mlflow.db", run, None, "tracking.uri")
