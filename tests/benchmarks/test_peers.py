"""The arithmetic of `benchmarks/peers`: cells, speeds, the limit's operations, records and tables."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import records
from benchmarks.peers.cells import LIMIT, SHORT_STEPS, TASKS, Cell, Variant, cells, chosen, in_trial, parse
from benchmarks.peers.limit import flops
from benchmarks.peers.measure import steady
from benchmarks.peers.plot import draw
from benchmarks.peers.records import Row
from benchmarks.peers.table import Measured, markdown

FAST = Cell("cola", 1, "fp32", "runner", TASKS["cola"].steps)
BASE = replace(FAST, variant="accelerate")
LIMITED = replace(FAST, variant=LIMIT, steps=0)
DETAILS = {"gflops": 150.0, "optimizer_s": 0.03, "gflop_per_sample": 0.7, "tokens_per_sample": 11.0}


def _row(cell: Cell, repetition: int, speed: float) -> Row:
    if cell.variant == LIMIT:
        return Row("cpu", repetition, cell, speed, details=DETAILS)
    return Row("cpu", repetition, cell, speed, 5.0, 30.0, 900.0, (0.7, 0.5), "abc")


ROWS = [
    _row(cell, repetition, speed * (1 + repetition))
    for repetition in range(2)
    for cell, speed in (
        (LIMITED, 200.0),
        (FAST, 150.0),
        (BASE, 75.0),
        (replace(BASE, steps=SHORT_STEPS), 1.0),
        (replace(BASE, precision="bf16"), 100.0),
    )
]


def test_names_of_variants() -> None:
    assert parse("trainer_grouped") == Variant("trainer_grouped")
    assert parse("plain_compile_flash") == Variant("plain", compile=True, flash=True)


@pytest.mark.parametrize("name", ["jax", "runner_flash", "limit_compile", "plain_flash_compile"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        parse(name)


def test_every_cell_of_the_default_is_one_of_all() -> None:
    default, every = list(cells(False, "cpu")), list(cells(True, "cpu"))
    assert len(set(every)) == len(every)
    assert set(default) < set(every)
    assert {(cell.task, cell.workers, cell.precision) for cell in every} == {
        (task, workers, precision) for task in TASKS for workers in (1, 2) for precision in ("fp32", "bf16")
    }


def test_the_speed_is_that_of_the_steps_after_the_first_ones() -> None:
    moments = [(1, 0.0), (11, 100.0), (21, 110.0), (31, 120.0), (41, 130.0)]
    assert steady(moments, FAST) == pytest.approx(32 * 30 / 30)
    assert steady([(1, 10.0), (8, 17.0)], replace(FAST, steps=8)) == pytest.approx(32)


def test_times_that_speeds_need_are_taken() -> None:
    for cell in [*cells(True, "cuda"), *in_trial(list(cells(True, "cpu")), 8)]:
        if cell.steps:
            assert cell.skipped < cell.steps
            assert cell.skipped % 10 == 1


def test_variants_that_are_asked_for_are_measured_wherever_anything_is() -> None:
    places = {(cell.task, cell.workers, cell.precision) for cell in cells(False, "cpu")}
    asked = [cell for cell in cells(False, "cpu", ["plain_compile"]) if cell.variant == "plain_compile"]
    assert {(cell.task, cell.workers, cell.precision) for cell in asked} == places
    flash = [cell for cell in cells(True, "cuda") if parse(cell.variant).flash]
    assert {cell.precision for cell in flash} == {"bf16"}


def test_chosen_cells() -> None:
    found = chosen(list(cells(True, "cpu")), ["squad"], [2], ["bf16"], ["plain", "trainer"])
    assert [(cell.task, cell.workers, cell.precision, cell.variant) for cell in found] == [
        ("squad", 2, "bf16", "trainer"),
        ("squad", 2, "bf16", "plain"),
    ]


def test_operations_of_a_sample() -> None:
    shapes = {"linears": [["token", 8, 16], ["sample", 8, 2]], "attention": [3, 2, 4, False]}
    forward = 2 * 5 * 8 * 16 + 2 * 8 * 2 + 3 * (2 * 2 * 26 * 8)
    assert flops(shapes, 5, 26) == 3 * forward


def test_records_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    records.append(path, ROWS[0])
    with path.open("a") as file:
        file.write('{"device": "cp')
    records.append(path, ROWS[1])
    found = records.read(path, "cpu")
    assert [row.cell for row in found] == [LIMITED, FAST]
    assert json.loads(path.read_text().splitlines()[1])["samples_per_s"] == 150.0
    assert records.read(path, "cuda") == []


def test_ratios_are_of_the_same_repetition() -> None:
    measured = Measured(ROWS)
    assert measured.ratios(FAST, measured.like(FAST, "accelerate")) == [2.0, 2.0]
    assert measured.ratios(FAST, measured.like(FAST, "accelerate", "fp32", "bf16")) == [1.5, 1.5]
    assert measured.ratios(FAST, measured.like(FAST, LIMIT)) == [0.75, 0.75]
    assert measured.ratios(FAST, measured.like(FAST, "plain")) == []


def test_table_and_plot(tmp_path: Path) -> None:
    text = markdown(ROWS)
    assert (
        "| cola | 1 | fp32 | `runner` | 225 (150 to 300) | 2 (2 to 2) | 1.5 (1.5 to 1.5) | 0.75 (0.75 to 0.75) | 2 |"
        in text
    )
    draw(ROWS, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_what_is_measured_already_is_not_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "list", f"--out={tmp_path}", "--variants=limit,runner"]
    command += ["--tasks=cola", "--workers=1", "--precisions=fp32", "--repetitions=2"]
    for row in ROWS[:2]:
        records.append(tmp_path / "measurements.jsonl", row)
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "4 runs are missing" in said
    assert f"repetition 0, cola, 1 worker(s), fp32, runner, {SHORT_STEPS} steps" in said
