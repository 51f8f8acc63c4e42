"""How much memory is left for workers in control groups with a limit."""

from __future__ import annotations

from pathlib import Path

from runner.backends.memory import left_of_limits

GIB = 2**30


def group(folder: Path, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("max", limit), ("current", used), ("stat", f"anon 5\ninactive_file {cached}")):
        (folder / f"memory.{name}").write_text(f"{value}\n")


def test_the_smallest_limit_above_a_process_counts(tmp_path: Path) -> None:
    group(tmp_path / "slice", str(8 * GIB), 3 * GIB, GIB)
    group(tmp_path / "slice" / "job", "max", GIB, 0)
    assert list(left_of_limits("9:cpu,cpuacct:/other\n0::/slice/job\n", tmp_path)) == [6 * GIB]


def test_without_a_limit(tmp_path: Path) -> None:
    group(tmp_path, "max", GIB, 0)
    assert not list(left_of_limits("0::/\n", tmp_path))
    assert not list(left_of_limits("9:cpu:/\n", tmp_path))
