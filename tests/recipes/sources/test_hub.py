"""Whether the Hugging Face Hub can be reached."""

from __future__ import annotations

import datasets.config
import pytest
from huggingface_hub import constants

from recipes.sources.hub import go_offline_if_unreachable
from runner.errors import UserError


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def test_an_unreachable_hub_is_not_asked_again(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nothing listens
    go_offline_if_unreachable()
    assert constants.HF_HUB_OFFLINE
    assert datasets.config.HF_HUB_OFFLINE


def test_an_endpoint_that_is_not_a_url(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "hub.example")
    with pytest.raises(UserError, match=r"HF_ENDPOINT=hub\.example"):
        go_offline_if_unreachable()
