"""Whether the Hugging Face Hub answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import datasets.config
import pytest
from huggingface_hub import constants

from recipes.sources.hub import go_offline_if_unreachable
from runner.errors import UserError


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is set stays in this test."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


@pytest.fixture
def babbling() -> Iterator[str]:
    """The address of something that listens and does not speak HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"no such thing\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_an_endpoint_that_is_no_address(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence that names the variable."""
    monkeypatch.setattr(constants, "ENDPOINT", "hub.example")
    with pytest.raises(UserError, match=r"HF_ENDPOINT=hub\.example is no address"):
        go_offline_if_unreachable()


def test_what_speaks_no_http_is_no_hub(online: None, babbling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the cache has to do, as where nothing answers at all."""
    monkeypatch.setattr(constants, "ENDPOINT", babbling)
    go_offline_if_unreachable()
    assert constants.HF_HUB_OFFLINE
    assert datasets.config.HF_HUB_OFFLINE
