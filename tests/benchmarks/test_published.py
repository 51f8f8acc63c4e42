"""Training times predicted from a few cells of a series: synthetic tables with known a and b, and the published one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.published.__main__ import main
from benchmarks.published.layout import ONE_WORKER, layouts
from benchmarks.published.predictions import MAX_FIT_ERROR, Series, predict
from runner.tools.compare.comparison import compare_runs
from runner.tools.compare.from_csv import COLUMNS, read_csv
from runner.tools.compare.runs import ACCUMULATION, K
from tests.tools.compare.make import BASE, compared, published_file, runs

REAL = Path(__file__).parents[2].parent / "shared" / "reference" / "published_runs.csv"
STEPS = (1, 2, 4, 8, 16)


def lines(
    seconds: Callable[[int, int], float], steps: Sequence[int] = STEPS, *, method: str = "k_batch", gpus: int = 4,
    samples: int = 1000,
) -> list[str]:  # fmt: skip
    """A series of two seeds; `seconds` of steps and seed."""
    return [
        f"e,qa,,,{gpus},{samples},{method},{one},{seed},80,{seconds(one, seed)}" for one in steps for seed in (0, 1)
    ]


def table(folder: Path, *groups: list[str]) -> Path:
    path = folder / "x.csv"
    single = ["e,qa,,,1,1000,single,1,0,80,900", "e,qa,,,1,1000,single,1,1,80,900"]
    path.write_text("\n".join([",".join(COLUMNS), *single, *(line for group in groups for line in group)]))
    return path


def predicted(path: Path, *cells: int) -> list[Series]:
    return predict(compare_runs(read_csv(path)).blocks, set(cells))


def only(*arguments: Path | int) -> Series:
    (series,) = predicted(*arguments)
    return series


def test_every_series_is_found_and_predicted(tmp_path: Path) -> None:
    """Known a and b for k and accumulation, on 4 and 8 GPUs and two numbers of samples: exact, and each by itself."""
    path = table(
        tmp_path,
        lines(lambda k, _: 100 + 50 / k),
        lines(lambda k, _: 60 + 90 / k, gpus=8),
        lines(lambda k, _: 1000 + 500 / k, samples=9000),
        lines(lambda steps, _: 120 + 10 / steps, method="accumulation"),
        lines(lambda k, _: 100 + 50 / k, (1, 2, 4), gpus=2),  # without the last cell
    )
    found = predicted(path, 1, 16)
    known = {(one.workers, one.method, one.key.samples): pytest.approx((one.fit.a, one.fit.b)) for one in found}
    assert known == {
        (4, K, 1000): (100, 50),
        (8, K, 1000): (60, 90),
        (4, K, 9000): (1000, 500),
        (4, ACCUMULATION, 1000): (120, 10),
    }
    assert all(one.errors == pytest.approx({2: 0, 4: 0, 8: 0}, abs=1e-9) and not one.wrong for one in found)


def test_more_than_two_cells_are_fitted_by_relative_errors(tmp_path: Path) -> None:
    """By hand for 200, 130 and 100 s at k = 1, 2, 4: weighted by 1/seconds², so that slow cells do not dominate."""
    times = {1: 200.0, 2: 130.0, 4: 100.0, 8: 80.0}
    fit = only(table(tmp_path, lines(lambda k, _: times[k], (1, 2, 4, 8))), 1, 2, 4).fit
    errors = {k: (fit.a + fit.b / k) / times[k] - 1 for k in (1, 2, 4)}
    # The normal equations: the errors are orthogonal to both columns of the problem.
    assert sum(error / times[k] for k, error in errors.items()) == pytest.approx(0, abs=1e-12)
    assert sum(error / k / times[k] for k, error in errors.items()) == pytest.approx(0, abs=1e-12)
    assert max(map(abs, errors.values())) > 1e-3


@pytest.mark.parametrize(("factor", "wrong"), [(1.3, 2), (0.8, 4), (1.3, 1), (0.7, 16), (1.5, 1)])
def test_the_cell_that_contradicts_is_found(tmp_path: Path, factor: float, wrong: int) -> None:
    """Also a cell that was fitted, although the predictions of all others are off then."""
    series = only(table(tmp_path, lines(lambda k, _: (100 + 50 / k) * (factor if k == wrong else 1))), 1, 16)
    assert (series.wrong, series.agreeing) == ({wrong}, set(STEPS) - {wrong})
    assert series.seeds_off(wrong) == {}
    assert [*series.trusted_errors] == ([] if wrong in (1, 16) else [k for k in (2, 4, 8) if k != wrong])


def test_a_single_seed_that_contradicts_is_found(tmp_path: Path) -> None:
    """Seed 1 has another link in all cells, which is no contradiction; seed 0 is slow in one."""

    def seconds(k: int, seed: int) -> float:
        return 100 + 80 / k if seed else 100 + 50 / k + (60 if k == 4 else 0)

    series = only(table(tmp_path, lines(seconds)), 1, 16)
    assert series.seeds_off(4) == {0: pytest.approx((172.5, 112.5))}
    assert "seed 0 took 172 s, where its own other cells say 112 s" in "".join(series.contradictions)


def test_several_cells_contradict(tmp_path: Path) -> None:
    """A fitted one among them; the other three agree."""
    series = only(table(tmp_path, lines(lambda k, _: (100 + 50 / k) * (1.4 if k in (1, 8) else 1))), 1, 16)
    assert (series.wrong, series.agreeing) == ({1, 8}, {2, 4, 16})


def test_without_agreement_no_cell_is_blamed(tmp_path: Path) -> None:
    times = dict(zip(STEPS, (200, 100, 300, 90, 170), strict=True))
    series = only(table(tmp_path, lines(lambda k, _: times[k])), 1, 2)
    assert not series.wrong
    assert series.trusted_errors == series.errors


def test_of_three_cells_the_predicted_one_contradicts(tmp_path: Path) -> None:
    """Which of the three is wrong cannot be told, so that none is left out."""
    series = only(table(tmp_path, lines(lambda k, _: (100 + 50 / k) * (1.4 if k == 4 else 1), (1, 4, 16))), 1, 16)
    assert series.wrong == {4}
    assert series.trusted_errors == series.errors


def test_noise_is_no_contradiction(tmp_path: Path) -> None:
    path = table(tmp_path, lines(lambda k, _: (100 + 50 / k) * (1 + (0.9 * MAX_FIT_ERROR if k == 4 else 0))))
    series = only(path, 1, 16)
    assert not series.wrong
    assert max(map(abs, series.errors.values())) == pytest.approx(1 - 1 / 1.09)


def test_a_synchronous_setup_begins_both_series(tmp_path: Path) -> None:
    """Many tables have it once; a series with one of its own keeps that."""
    by_accumulation, by_k = lambda steps, _: 120 + 30 / steps, lambda k, _: 100 + 50 / k
    path = table(
        tmp_path,
        lines(by_accumulation, method="accumulation"),
        lines(by_k, STEPS[1:]),
        lines(by_accumulation, (1,), method="accumulation", gpus=8),
        lines(lambda _, __: 77, (1,), gpus=8),
        lines(by_k, STEPS[1:], gpus=8),
    )
    found = {one.workers: one for one in predicted(path, 2, 16)}
    assert [*found[4].setups] == list(STEPS)
    assert found[4].setups[1].name == "4 GPUs · accumulation 1"
    assert found[8].seconds[1] == 77


def test_the_published_layout(tmp_path: Path) -> None:
    """Samples down; one worker, accumulation and k across; doubtful cells marked; none where nothing was run."""
    (layout,) = layouts(compare_runs(read_csv(published_file(tmp_path))).blocks)
    assert layout.workers == 4
    assert layout.columns == (ONE_WORKER, ("accumulation", 1), ("accumulation", 2), ("k", 1), ("k", 2))
    texts = [("80.2", ""), ("80.1*", "1.5×"), ("54.7*", "2.7×"), ("80.1", "1.3×"), ("79.1", "4.0×")]
    assert layout.rows[1000] == dict(zip(layout.columns, texts, strict=True))
    assert [*layout.rows[9000]] == list(layout.columns[:3])


def test_other_shapes_have_no_layout() -> None:
    """Several workers as baseline, two setups for one cell, a single column."""
    four = runs("four", [80.0, 80.1], 200.0, workers=4)
    k = runs("four · k=2", [80.0, 80.1], 200.0, workers=4, k=2)
    again = runs("four · k=2 · bf16", [80.0, 80.1], 200.0, workers=4, k=2)
    k4 = runs("four · k=4", [80.0, 80.1], 200.0, workers=4, k=4)
    assert layouts(compared(BASE, k, k4).blocks)
    for groups in ([four, k, k4], [BASE, k, k4, again], [BASE, four, k]):
        assert layouts(compared(*groups).blocks) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layout, predictions, the cell that contradicts, and other cells; without series, one sentence."""
    path = table(tmp_path, lines(lambda k, _: (10000 + 5000 / k) * (1.3 if k == 4 else 1)))
    assert main([str(path)]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert ["1,000", "80.0", *("80.0<br>0.1×" for _ in STEPS)] in rows
    (predicted,) = (row for row in rows if "14,625*<br>11,250<br>−23.1%" in row)
    assert (predicted[:2], predicted[-1]) == (["1,000", "15,000<br>fitted"], "10,312<br>fitted")
    assert ["1, 16", "3", "0.0%", "23.1%", "2", "0.0%", "0.0%"] in rows
    with pytest.raises(SystemExit):
        main([str(path), "--cells", "3", "5"])
    assert "3, 5" in capsys.readouterr().err


@pytest.mark.skipif(not REAL.exists(), reason="the published file is not part of the repository")
def test_the_published_file() -> None:
    """Rows and columns as published; from two cells of each series all others but one within 10%."""
    blocks = compare_runs(read_csv(REAL)).blocks
    assert sum(len(row.setup.runs) for one in blocks for row in one.rows) == 264
    tables = {(table.title.split(" ")[0], table.workers): table for table in layouts(blocks)}
    assert set(tables) == {("kbatch_2022", 4), ("local_sgd_2023", 4), ("local_sgd_2023", 8)}
    row = tables["kbatch_2022", 4].rows[40000]
    assert [row[column] for column in (ONE_WORKER, ("accumulation", 1), ("k", 16))] == [
        ("89.2", ""),
        ("88.6", "2.4×"),
        ("87.3", "3.6×"),
    ]
    series = predict(blocks, {1, 16})
    errors = sorted(abs(error) for one in series for error in one.trusted_errors.values())
    assert (len(series), len(errors)) == (12, 59)
    assert errors[29] == pytest.approx(0.016, abs=5e-4)
    assert errors[-1] == pytest.approx(0.092, abs=5e-4)
    ((wrong, steps),) = ((one, steps) for one in series for steps in one.wrong)
    assert (wrong.setups[steps].name, wrong.key.samples) == ("4 GPUs · accumulation 2", 40000)
    assert [*wrong.seeds_off(steps)] == [1]
    slow = [flag for one in blocks for flag in one.flags if flag.kind == "timing outlier" and len(flag.setups) > 1]
    assert len(slow[0].setups) == 6  # the seed that was slow in 5 of 8 setups with 4 workers and 1 with 8
