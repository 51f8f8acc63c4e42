"""A rank and the torchrun that has started it."""

from __future__ import annotations

import os
import subprocess

import pytest

from runner.launch.torchrun import _may_be_agent


def test_a_parent_that_is_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose agent was killed before it looked has another parent, such as init, and must not wait for others."""
    other = subprocess.Popen(["sleep", "100"])
    try:
        assert _may_be_agent(other.pid)  # not started by torchrun, but by Slurm for example
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        assert not _may_be_agent(other.pid)
        assert _may_be_agent(os.getpid())
    finally:
        other.kill()
        other.wait()
    assert not _may_be_agent(other.pid)
