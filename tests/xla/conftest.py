"""Tests on real torch_xla, on its CPU device; `make test-xla` runs them in an environment that has it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from runner.backends import xla_installed
from tests.pool import WorkerPool

if not xla_installed():
    collect_ignore_glob = ["test_*.py"]

# Before torch_xla is imported, which would otherwise print the device that it selects.
os.environ.setdefault("PJRT_SELECT_DEFAULT_DEVICE", "0")


@pytest.fixture(scope="session")
def xla_pool(pool: WorkerPool) -> Iterator[WorkerPool]:
    """Workers on XLA's CPU device. They keep compiled programs from test to test."""
    xla_pool = WorkerPool("xla", timeout_s=300)
    yield xla_pool
    xla_pool.close()
