"""Credentials are kept out of what is written and logged."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from runner.track.secrets import masked, without_credentials


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pass@host:5000/x", "http://***@host:5000/x"),
        ("https://token@host", "https://***@host"),
        ("postgresql://me:p%40ss@db/x", "postgresql://***@db/x"),
        ("mysql+pymysql://me:pass@db/x", "mysql+pymysql://***@db/x"),
        ("postgresql://me:pa/ss@db/x", "postgresql://***@db/x"),
        ("from http://a:b@c to https://d:e@f/g", "from http://***@c to https://***@f/g"),
        ("error at http://a:b@c: refused", "error at http://***@c: refused"),
        # Nothing to hide:
        ("http://host:5000/x", "http://host:5000/x"),
        ("https://host/model@v2", "https://host/model@v2"),
        ("sqlite:////home/me@work/x.db", "sqlite:////home/me@work/x.db"),
        ("me@host.org", "me@host.org"),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_masked(text: str, shown: str) -> None:
    """The user part of every URL becomes stars; everything else stays as it is."""
    assert masked(text) == shown


def test_masked_password_with_an_at_sign() -> None:
    """A password that holds an @ is hidden whole."""
    assert "word" not in masked("http://me:pass@word@host")


@pytest.mark.parametrize(
    "key", ["password", "passwd", "secret", "token", "api_key", "apikey", "credential", "hf_token", "TOKEN", "secrets"]
)
@pytest.mark.parametrize("value", ["abc", 5, ["abc"], {"of": "abc"}])
def test_keys_that_name_a_secret(key: str, value: Any) -> None:
    """Whatever stands under a key that names a secret is hidden, at any depth."""
    assert without_credentials({"a": [{"b": {key: value}}]}) == {"a": [{"b": {key: "***"}}]}


@pytest.mark.parametrize("key", ["tokenizer", "secretary", "lr", "password_file_format", "keys"])
def test_keys_that_only_read_like_one(key: str) -> None:
    """A key that merely begins with such a word stays readable."""
    assert without_credentials({key: "x"}) == {key: "x"}


def test_plain_data_stay_as_they_are() -> None:
    """Numbers, truth values and nothing keep value and type, a secret that is not set says so, input is untouched."""
    data = {"a": 1, "b": 0.5, "c": None, "d": True, "e": [1, "x", None], "token": None}
    before = copy.deepcopy(data)
    shown = without_credentials(data)
    assert shown == before == data
    assert shown is not data
    assert shown["d"] is True


def test_urls_are_masked_wherever_they_stand() -> None:
    """URLs inside lists and mappings lose their user part too, and the input keeps it."""
    data = {"tracking": {"uri": "http://me:pass@host"}, "more": ["x", ["https://t@h"]]}
    shown = without_credentials(data)
    assert shown == {"tracking": {"uri": "http://***@host"}, "more": ["x", ["https://***@h"]]}
    assert data["tracking"] == {"uri": "http://me:pass@host"}
