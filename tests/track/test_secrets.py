"""Credentials are kept out of what is written, logged and printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.track.secrets import masked, masked_keys, masked_override, without_credentials


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:pass@host:5000/x", "http://***@host:5000/x"),
        ("https://token@host", "https://***@host"),
        ("postgresql://me:p%40ss@db/x", "postgresql://***@db/x"),
        ("mysql+pymysql://me:pa/ss@db/x", "mysql+pymysql://***@db/x"),
        ("http://me:pass@word@host", "http://***@host"),
        ("http://me:pass word@host/x", "http://***@host/x"),
        ("http://me:p@ss word@host/x", "http://***@host/x"),
        ("from http://a:b@c to https://d:e@f/g", "from http://***@c to https://***@f/g"),
        ("error at http://a:b@c: refused", "error at http://***@c: refused"),
        ("db://host/x?password=abc&a=b", "db://host/x?password=***&a=b"),
        ("mysql://host/x?user=u&passwd=abc", "mysql://host/x?user=u&passwd=***"),
        ("mssql+pyodbc:///?odbc_connect=Server%3Dx%3BPwd%3Dabc%3B", "mssql+pyodbc:///?odbc_connect=***"),
        ("DRIVER={x};SERVER=y;PWD=abc", "DRIVER={x};SERVER=y;PWD=***"),
        *(
            (f"http://h/x?a=b&{name}=abc&c=d", f"http://h/x?a=b&{name}=***&c=d")
            for name in ("pwd", "sig", "auth", "code")
        ),
        ("https://h/x?X-Amz-Signature=abc&X-Amz-Date=1", "https://h/x?X-Amz-Signature=***&X-Amz-Date=1"),
        # Nothing to mask:
        (
            "http://host/x?author=me&postcode=1&design=2&encode=3",
            "http://host/x?author=me&postcode=1&design=2&encode=3",
        ),
        ("http://host:5000/x", "http://host:5000/x"),
        ("http://host:5000 refused, ask me@host.org", "http://host:5000 refused, ask me@host.org"),
        ("https://host/model@v2", "https://host/model@v2"),
        ("sqlite:////home/me@work/x.db", "sqlite:////home/me@work/x.db"),
        ("me@host.org", "me@host.org"),
    ],
)
def test_masked(text: str, expected: str) -> None:
    assert masked(text) == expected


def test_overrides() -> None:
    given = ("recipe.api_key=hunter2", "recipe.endpoint=http://me:pw@host", "seed=1")
    assert [*map(masked_override, given)] == ["recipe.api_key=***", "recipe.endpoint=http://***@host", "seed=1"]


@pytest.mark.parametrize(
    "key",
    [
        *("password", "secrets", "api_key", "apikey", "credential", "hf_token", "TOKEN"),
        *("pwd", "github_token", "authorization", "dsn", "auth"),
    ],
)
@pytest.mark.parametrize("value", ["abc", {"of": "abc"}])
def test_keys_that_name_a_secret(key: str, value: Any) -> None:
    """At any depth, whatever the value is."""
    written = without_credentials({"a": [{"b": {key: value}}]})
    assert written == {"a": [{"b": {key: "***"}}]}
    assert list(masked_keys(written)) == [f"a.b.{key}"]


def test_masked_addresses_are_found_and_other_asterisks_are_not() -> None:
    written = without_credentials({"a": "http://me:word@h", "b": "http://h/?token=word", "c": "*** {text} ***"})
    assert list(masked_keys(written)) == ["a", "b"]


def test_other_data_are_kept() -> None:
    """Numbers and null keep value and type; keys that only resemble a secret's are readable; the input is unchanged."""
    data = {"a": 1, "c": None, "d": True, "token": None, "tokenizer": "x", "keys": ["y", 0.5], "password_file": "z"}
    data |= {"eos_token": "<s>", "author": "me"}
    copy = without_credentials(data)
    assert copy == data
    assert copy["d"] is True
    data = {"tracking": {"uri": "http://me:pass@host"}, "more": ["x", ["https://t@h"]]}
    assert without_credentials(data) == {"tracking": {"uri": "http://***@host"}, "more": ["x", ["https://***@h"]]}
    assert data["tracking"] == {"uri": "http://me:pass@host"}


def test_the_printed_configuration_has_no_password(tmp_path: Path) -> None:
    """`--cfg job --resolve` resolves interpolations; the password in MLFLOW_TRACKING_URI must not be one of them."""
    command = [sys.executable, "-m", "runner", "--cfg", "job", "--resolve"]
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "MLFLOW_TRACKING_URI": "http://me:hunter2@host"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert "tracking:" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr
