"""Training times predicted from a few cells of a series: synthetic tables with known a and b, and the published one."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from runner import cli
from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.from_csv import COLUMNS, read_csv
from runner.tools.compare.predictions import CONTRADICTION, Predictions, Series, named_cells, predict
from runner.tools.compare.runs import ACCUMULATION, K

REAL = Path(__file__).parents[3].parent / "shared" / "reference" / "published_runs.csv"
STEPS = (1, 2, 4, 8, 16)


def lines(
    seconds: Callable[[int, int], float], steps: Sequence[int] = STEPS, *, method: str = "k_batch", gpus: int = 4,
    samples: int = 1000, seeds: int = 2,
) -> list[str]:  # fmt: skip
    """A series; `seconds` of steps and seed."""
    return [
        f"e,qa,,,{gpus},{samples},{method},{one},{seed},80,{seconds(one, seed)}"
        for one in steps
        for seed in range(seeds)
    ]


def table(folder: Path, *groups: list[str]) -> Path:
    path = folder / "x.csv"
    single = ["e,qa,,,1,1000,single,1,0,80,900", "e,qa,,,1,1000,single,1,1,80,900"]
    path.write_text("\n".join([",".join(COLUMNS), *single, *(line for group in groups for line in group)]))
    return path


def predicted(path: Path, cells: str) -> Predictions:
    return predict(compare_runs(read_csv(path)).blocks, cells)


def only(predictions: Predictions) -> Series:
    (series,) = predictions.series
    return series


def test_every_series_is_found_and_predicted(tmp_path: Path) -> None:
    """Known a and b for k and accumulation, on 4 and 8 GPUs and two numbers of samples: exact, and each by itself."""
    path = table(
        tmp_path,
        lines(lambda k, _: 100 + 50 / k),
        lines(lambda k, _: 60 + 90 / k, gpus=8),
        lines(lambda k, _: 1000 + 500 / k, samples=9000),
        lines(lambda steps, _: 120 + 10 / steps, method="accumulation"),
    )
    found = predicted(path, "k=1,k=16,accumulation=2,accumulation=8")
    known = {(one.workers, one.method, one.key.samples): pytest.approx((one.fit.a, one.fit.b)) for one in found.series}
    assert known == {
        (4, K, 1000): (100, 50),
        (8, K, 1000): (60, 90),
        (4, K, 9000): (1000, 500),
        (4, ACCUMULATION, 1000): (120, 10),
    }
    cells = sorted(
        (one.workers, one.key.samples, one.method, cell.steps) for one in found.series for cell in one.predicted
    )
    by_k = [(4, 1000, K), (4, 9000, K), (8, 1000, K)]
    expected = [(*one, steps) for one in by_k for steps in (2, 4, 8)]
    assert cells == sorted(expected + [(4, 1000, ACCUMULATION, steps) for steps in (1, 4, 16)])
    assert all(abs(cell.error) < 1e-9 and not cell.flagged for one in found.series for cell in one.cells)
    assert found.notes == ()


def test_more_than_two_cells_are_fitted_by_relative_errors(tmp_path: Path) -> None:
    """By hand for 200, 130 and 100 s at k = 1, 2, 4: weighted by 1/seconds², so that slow cells do not dominate."""
    times = {1: 200.0, 2: 130.0, 4: 100.0, 8: 80.0}
    fit = only(predicted(table(tmp_path, lines(lambda k, _: times[k], (1, 2, 4, 8))), "k=1,2,4")).fit
    errors = {k: (fit.a + fit.b / k) / times[k] - 1 for k in (1, 2, 4)}
    # The normal equations: the errors are orthogonal to both columns of the problem.
    assert sum(error / times[k] for k, error in errors.items()) == pytest.approx(0, abs=1e-12)
    assert sum(error / k / times[k] for k, error in errors.items()) == pytest.approx(0, abs=1e-12)
    assert max(map(abs, errors.values())) > 1e-3


@pytest.mark.parametrize(("factor", "wrong"), [(1.3, 2), (0.8, 4), (1.3, 1), (0.7, 16), (1.5, 1)])
def test_the_cell_that_contradicts_is_named(tmp_path: Path, factor: float, wrong: int) -> None:
    """Also a cell that was fitted, although the predictions of all others are off then."""
    path = table(tmp_path, lines(lambda k, _: (100 + 50 / k) * (factor if k == wrong else 1)))
    found = predicted(path, "k=1,k=16")
    series = only(found)
    assert [cell.steps for cell in series.cells if cell.flagged] == [wrong]
    (flag,) = series.flags
    right = f"say {100 + 50 / wrong:.0f} s"
    assert f"4 GPUs · k = {wrong} · 1,000 samples" in flag
    assert right in flag
    assert ("name another one" in flag) == (wrong in (1, 16))
    assert "seed" not in flag
    trusted = "without flagged cells and what is predicted from them"
    assert "3 times predicted: median error" in found.summary
    assert trusted in found.summary
    assert [cell.steps for cell in series.trusted] == ([] if wrong in (1, 16) else [k for k in (2, 4, 8) if k != wrong])


def test_a_single_seed_that_contradicts_is_named(tmp_path: Path) -> None:
    """Seed 1 has another link in all cells, which is no contradiction; seed 0 is slow in one."""

    def seconds(k: int, seed: int) -> float:
        return 100 + 80 / k if seed else 100 + 50 / k + (60 if k == 4 else 0)

    (flag,) = only(predicted(table(tmp_path, lines(seconds)), "k=1,k=16")).flags
    assert "seed 0 took 172 s, where its own other cells say 112 s" in flag
    assert "seed 1" not in flag


def test_several_cells_contradict(tmp_path: Path) -> None:
    """A named one among them; the other three agree."""
    path = table(tmp_path, lines(lambda k, _: (100 + 50 / k) * (1.4 if k in (1, 8) else 1)))
    series = only(predicted(path, "k=1,k=16"))
    assert [cell.steps for cell in series.cells if cell.flagged] == [1, 8]
    assert all("k = 2, 4, 16 say" in flag for flag in series.flags)


def test_without_agreement_no_cell_is_blamed(tmp_path: Path) -> None:
    """Times without any law are predicted badly, which is said; it is the fault of no cell."""
    times = dict(zip(STEPS, (200, 100, 300, 90, 170), strict=True))
    series = only(predicted(table(tmp_path, lines(lambda k, _: times[k])), "k=1,k=2"))
    assert series.flags == ()
    assert "no cell is clearly wrong" in series.summary
    assert series.trusted == series.predicted


def test_of_three_cells_the_predicted_one_contradicts(tmp_path: Path) -> None:
    """Which of the three is wrong cannot be told, so that the summary leaves none out."""
    path = table(tmp_path, lines(lambda k, _: (100 + 50 / k) * (1.4 if k == 4 else 1), (1, 4, 16)))
    found = predicted(path, "k=1,k=16")
    assert [cell.steps for cell in only(found).cells if cell.flagged] == [4]
    assert "without flagged" not in found.summary


def test_noise_is_no_contradiction(tmp_path: Path) -> None:
    """Errors below the limit are shown and not flagged."""
    path = table(tmp_path, lines(lambda k, _: (100 + 50 / k) * (1 + (0.9 * CONTRADICTION if k == 4 else 0))))
    series = only(predicted(path, "k=1,k=16"))
    assert series.flags == ()
    assert max(abs(cell.error) for cell in series.predicted) == pytest.approx(1 - 1 / 1.09)


def test_a_synchronous_setup_begins_both_series(tmp_path: Path) -> None:
    """Many tables have it once; a series with one of its own keeps that."""
    times = {
        "accumulation": lambda steps, _: 120 + 30 / steps,
        "k_batch": lambda k, _: 100 + 50 / k,
    }
    path = table(
        tmp_path,
        lines(times["accumulation"], method="accumulation"),
        lines(times["k_batch"], STEPS[1:]),
        lines(times["accumulation"], (1,), method="accumulation", gpus=8),
        lines(lambda _, __: 77, (1,), gpus=8),
        lines(times["k_batch"], STEPS[1:], gpus=8),
    )
    found = {one.workers: one for one in predicted(path, "k=2,k=16").series}
    assert [cell.steps for cell in found[4].cells] == list(STEPS)
    assert found[4].cells[0].setup.name == "4 GPUs · accumulation 1"
    assert found[4].cells[0].error == pytest.approx(0)
    assert found[8].cells[0].seconds == 77


def test_what_is_not_predicted_is_said(tmp_path: Path) -> None:
    """Series without a named cell, series by a method of which no cell is named, and setups without times."""
    path = table(
        tmp_path,
        lines(lambda k, _: 100 + 50 / k),
        lines(lambda k, _: 100 + 50 / k, (1, 2, 4), gpus=8),
        lines(lambda steps, _: 100 + 50 / steps, method="accumulation", gpus=2),
    )
    path.write_text(path.read_text() + "\n" + "e,qa,,,4,1000,k_batch,32,0,80,")
    found = predicted(path, "k=1,k=16")
    assert [cell.steps for cell in only(found).cells] == list(STEPS)
    missing, method = found.notes
    assert "8 workers by k" in missing
    assert "4 workers" not in missing
    assert "add accumulation=1,accumulation=16" in method


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("k=1,k=16", {K: {1, 16}}),
        ("K = 16, k 1", {K: {1, 16}}),
        ("k=1,16", {K: {1, 16}}),
        ("sync.k=2;sync.k=4", {K: {2, 4}}),
        ("acc=1,acc=8", {ACCUMULATION: {1, 8}}),
        ("gradient accumulation 1, gradient-accumulation-steps=8", {ACCUMULATION: {1, 8}}),
        ("steps=1,8,k=4", {K: {1, 4, 8}, ACCUMULATION: {1, 8}}),
    ],
)
def test_cells_are_named_as_people_write_them(text: str, cells: dict[str, set[int]]) -> None:
    assert named_cells(text) == cells


WRONG = {
    "": "write cells as k=1,k=16",
    "k": "write cells as k=1,k=16",
    "k=1.5,k=2": "write cells as k=1,k=16",
    "k=-1,k=2": "write cells as k=1,k=16",
    "1,16": "k=1 or accumulation=1",
    "k=0,k=2": "from 1",
    "k=1": "another one, such as k=16",
    "k=16,k=16": "another one, such as k=1",
    "k=1,k=16,acc=2": "another one, such as accumulation=16",
    "k_bach=1,k=16": "did you mean 'k_batch'",
    "k=1,k=12": "has k=1, 2, 4, 8, 16, but not k=12",
    "acc=1,acc=2": "no accumulation series",
    "k=1,2,4,8,16": "no other cell to predict",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_mistake_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """It names the option, the value and the fix, and leaves no folder."""
    table(here, lines(lambda k, _: 100 + 50 / k))
    assert cli.run_tool("compare", ["--csv", "x.csv", "--predict-from", text]) == cli.EXIT_USER_ERROR
    error = " ".join(capsys.readouterr().err.split())
    assert f"--predict-from={text} is invalid: " in error
    assert WRONG[text] in error
    assert not (here / "outputs").exists()


def test_it_predicts_tables_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_tool("compare", ["--sweep", "x", "--predict-from", "k=1,k=16"]) == cli.EXIT_USER_ERROR
    assert "--csv FILE" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 90])
def test_terminal_report_and_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    """The same figures in all three; more columns than fit are below each other, with nothing cut off."""
    monkeypatch.setenv("COLUMNS", str(width))
    steps = [2**i for i in range(8)]
    table(here, lines(lambda k, _: (10000 + 5000 / k) * (1.3 if k == 4 else 1), steps))
    assert cli.run_tool("compare", ["--csv", "x.csv", "--predict-from", "k=1,k=64", "--out", "result"]) == 0
    output = capsys.readouterr().out
    below = output[output.index("measured, predicted") :]
    assert max(len(line.rstrip()) for line in below.splitlines()) <= width
    assert "…" not in below
    headings = [line.split()[1:] for line in below.splitlines() if line.startswith(" samples ")]
    texts = [str(one) for one in steps]
    assert headings == ([texts] if width == 90 else [texts[:5], texts[5:]])
    words = " ".join(below.split())
    assert "14,625*" in words
    assert "seconds = 10,000 + 5,000/k; median error 0.0%, largest 23.1%" in words
    assert "without flagged cells and what is predicted from them 5: median error 0.0%" in words
    report = (here / "result" / "report.html").read_text()
    assert "14,625*" in report
    assert "seconds = 10,000 + 5,000/k" in report
    assert report.count("contradiction:") == 1
    with (here / "result" / "predictions.csv").open(newline="") as file:
        rows = {int(row["steps"]): row for row in csv.DictReader(file)}
    assert list(rows) == steps
    assert [row["steps"] for row in rows.values() if row["fitted"] == "True"] == ["1", "64"]
    assert [row["steps"] for row in rows.values() if row["contradicts"] == "True"] == ["4"]
    assert float(rows[4]["error"]) == pytest.approx(1 / 1.3 - 1)
    assert float(rows[2]["predicted_seconds"]) == pytest.approx(12500)


@pytest.mark.skipif(not REAL.exists(), reason="the published file is not part of the repository")
def test_the_published_series() -> None:
    """From two cells of each series the others within 5% (median) and 15% (largest), except one that is named."""
    found = predicted(REAL, "steps=1,steps=16")
    assert len(found.series) == 12
    errors = sorted(abs(cell.error) for one in found.series for cell in one.predicted if not cell.flagged)
    assert len(errors) == 59
    assert errors[29] < 0.05
    assert errors[-1] < 0.15
    (flag,) = (flag for one in found.series for flag in one.flags)
    assert "4 GPUs · accumulation 2 · 40,000 samples: 2,192 s" in flag
    assert "seed 1 took 2,540 s, where its own other cells say" in flag
