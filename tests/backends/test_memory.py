"""How much memory is left for workers in control groups with a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.backends.memory import left_of_limits

GIB = 2**30


def group(folder: Path, limit: str, used: int, cached: int, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    own = f"inactive_file {cached}\n" + (f"total_inactive_file {cached}\n" if version == 1 else "")
    (folder / "memory.stat").write_text(f"anon 5\n{own}")


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_above_a_process_counts(tmp_path: Path, version: int) -> None:
    top = tmp_path if version == 2 else tmp_path / "memory"
    group(top / "slice", str(8 * GIB), 3 * GIB, GIB, version)
    group(top / "slice" / "job", "max" if version == 2 else str(2**63 - 4096), GIB, 0, version)
    groups = "9:cpu,cpuacct:/other\n" + ("0::/slice/job\n" if version == 2 else "4:memory:/slice/job\n")
    assert min(left_of_limits(groups, tmp_path)) == 6 * GIB


def test_without_a_limit(tmp_path: Path) -> None:
    group(tmp_path, "max", GIB, 0, 2)
    assert not list(left_of_limits("0::/\n", tmp_path))
    assert not list(left_of_limits("9:cpu:/\n", tmp_path))
