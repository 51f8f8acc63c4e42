"""Flags and remarks, each provoked by known numbers, and none for clean ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from runner.tools.compare.columns import cells_of, run_rows, setup_rows
from runner.tools.compare.results import Block, Flag
from runner.tools.compare.text import remarks
from tests.tools.compare.make import BASE, KEY, block, certificate, compared, run, runs


def kinds(found: Block) -> list[str]:
    return [flag.kind for flag in found.flags]


def only(found: Block, kind: str) -> Flag:
    (flag,) = [one for one in found.flags if one.kind == kind]
    return flag


def test_clean_runs_have_no_flags() -> None:
    four = runs("four", [80.1, 80.3, 80.2], [200.0, 201.0, 202.0], workers=4, machine="A", jobs_at_once=1)
    k = runs("four · k=4", [79.9, 80.3, 80.0], [150.0, 151.0, 150.5], workers=4, k=4, machine="A", jobs_at_once=1)
    assert kinds(block(BASE, four, k)) == []


def test_a_timing_outlier_is_named_with_its_effect() -> None:
    """One seed of three twice as slow: its ratio to the median, the speed-up with and without it."""
    found = block(BASE, runs("four", [80.1, 80.3, 80.2], [200.0, 420.0, 202.0], workers=4))
    assert kinds(found) == ["timing outlier"]  # and not a spread as well
    flag = found.flags[0]
    assert flag.text.endswith("without it 2.0×, not 1.6×")
    assert (flag.setups, flag.runs, flag.seeds, flag.doubtful) == (("four",), ("four/1",), (1,), True)
    assert flag.value == pytest.approx(420 / 202)
    assert found.rows[1].speed_up is not None
    assert found.rows[1].speed_up.value == pytest.approx((2 * 401 / 420 * 402 / 202) ** (1 / 3))


def test_the_same_weights_are_equivalent() -> None:
    """Also where a metric cannot tell, or with one seed; but not if one seed's weights differ."""
    one, same, other = (
        [run(name, seed, 50.0, weights=digest) for seed, digest in enumerate(digests)]
        for name, digests in (("one", ("aa", "bb")), ("same", ("aa", "bb")), ("other", ("aa", "bc")))
    )
    rows = block(one, same, other, baseline="one").rows
    verdicts = {row.setup.name: row.verdict.text for row in rows if row.verdict}
    assert verdicts["same"] == "equivalent: the same weights, bit for bit"
    assert verdicts["other"].startswith("undecided")
    (row,) = (row for row in block(one[:1], same[:1], baseline="one").rows[1:])
    assert row.verdict is not None
    assert row.verdict.kind == "equivalent"


@pytest.mark.parametrize(("allow", "flagged"), [("identical", True), ("equivalent", False)])
def test_bits_that_should_be_the_same(allow: str, flagged: bool) -> None:
    """Of seed 1, whose weights differ where other workers must not change them; seed 0 has the same."""
    one, four = (
        [
            run(
                name,
                seed,
                80.0,
                workers=workers,
                weights=weights,
                certificate=certificate(allow, world_size=workers, seed=seed),
            )
            for seed, weights in enumerate(digests)
        ]
        for name, workers, digests in (("one", 1, ("aa", "bb")), ("four", 4, ("aa", "bc")))
    )
    found = [flag for flag in block(one, four).flags if flag.kind == "other bits"]
    assert [(flag.seeds, flag.runs, flag.doubtful) for flag in found] == (
        [((1,), ("one/1", "four/1"), True)] if flagged else []
    )


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([200.0, 200.0, 218.0], []),  # within 10%
        ([200.0, 260.0], ["timings spread"]),  # two seeds cannot tell which one is off
        ([190.0, 200.0, 215.0], ["timings spread"]),  # no seed is 10% off the median
        ([100.0, 101.0, 115.0], ["timing outlier"]),  # the other setup repeats within 1%
        ([7.0, 2.0, 14.0], ["timing outlier", "timing outlier"]),  # no modified z above 1 within the setup
    ],
)
def test_smaller_differences_in_time(times: list[float], expected: list[str]) -> None:
    four = runs("four", [80.1, 80.3, 80.2][: len(times)], times, workers=4)
    assert [kind for kind in kinds(block(BASE, four)) if kind.startswith("timing")] == expected


@pytest.mark.parametrize(("slow", "expected"), [(130.0, "timings spread"), (160.0, "timing outlier")])
def test_an_outlier_among_noisy_setups(slow: float, expected: str) -> None:
    """The other setups spread by 20%: their spread hides 1.3 × the median, but never more than 1.5 ×."""
    noisy = runs("one", [80.0, 80.4, 80.2], [320.0, 400.0, 480.0])
    four = runs("four", [80.1, 80.3, 80.2], [100.0, 101.0, slow], workers=4)
    flags = [flag for flag in block(noisy, four).flags if flag.setups == ("four",)]
    assert [flag.kind for flag in flags] == [expected]


def test_an_outlier_of_the_baseline_changes_every_speed_up() -> None:
    slow = runs("one", [80.0, 80.4, 80.2], [400.0, 900.0, 402.0])
    four = runs("four", [80.1, 80.3, 80.2], [200.0, 201.0, 202.0], workers=4)
    assert "every speed-up" in only(block(slow, four), "timing outlier").text


def test_a_seed_that_is_slow_in_several_setups_is_one_flag() -> None:
    groups = [
        runs(f"four · k={k}", [80.1, 80.3, 80.2], [times[0], times[1], times[2]], workers=4, k=k)
        for k, times in ((2, (400.0, 200.0, 201.0)), (4, (300.0, 150.0, 151.0)), (8, (100.0, 101.0, 60.0)))
    ]
    several, single = [one for one in block(BASE, *groups).flags if one.kind == "timing outlier"]
    assert "seed 0 is slow in 2 of the 3 setups with 4 workers by k" in several.text
    assert (several.setups, several.seeds) == (("four · k=2", "four · k=4"), (0,))
    assert len(several.details) == 2
    assert (single.setups, single.seeds, single.value) == (("four · k=8",), (2,), pytest.approx(0.6))


def test_collapsed_seeds() -> None:
    """Five margins below the median of the setup, or below half of the baseline; never on the better side."""
    found = block(BASE, runs("four", [78.0, 78.4, 10.0], 200.0, workers=4))
    assert only(found, "collapsed").seeds == (2,)
    assert found.rows[1].metric.value == pytest.approx((78.0 + 78.4 + 10.0) / 3)  # nothing is left out
    four = runs("four", [78.0, 78.1, 72.0], 200.0, workers=4)
    assert kinds(block(BASE, four, margin=1.0)) == ["collapsed"]
    assert kinds(block(BASE, four, margin=2.0)) == []
    assert kinds(block(BASE, runs("four", [70.0, 70.1, 79.0], 200.0, workers=4))) == []
    every = only(block(BASE, runs("four", [9.0, 15.0, 12.0], 200.0, workers=4)), "collapsed")
    assert every.seeds == (0, 1, 2)
    assert kinds(block(BASE, [run("four", 0, 39.0, workers=4)])) == ["collapsed"]
    assert kinds(block(BASE, [run("four", 0, 41.0, workers=4)])) == []


def test_a_loss_collapses_upwards() -> None:
    """Beyond twice the baseline's mean, though a loss has no default margin."""
    key = replace(KEY, metric="loss", goal="min")
    base = runs("one", [0.50, 0.51, 0.52], 400.0, block=key)
    assert kinds(block(base, runs("four", [1.2, 1.3, 1.4], 200.0, workers=4, block=key))) == ["collapsed"]
    assert kinds(block(base, runs("four", [0.1, 0.11, 0.12], 200.0, workers=4, block=key))) == []


@pytest.mark.parametrize(("setup", "workers"), [("one", 1), ("four", 4)])
def test_a_diverged_run_leaves_no_verdict(setup: str, workers: int) -> None:
    """Over the other seeds of its setup neither, nor over other setups if it is one of the baseline."""
    extra = run(setup, 3, math.nan, None, workers=workers, diverged="loss is nan")
    found = block(BASE, runs("four", [80.0, 80.4, 80.1], 200.0, workers=4), [extra])
    assert only(found, "diverged").seeds == (3,)
    assert "loss is nan" in only(found, "diverged").text
    assert [row.verdict.kind for row in found.rows[1:] if row.verdict] == ["no verdict"]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({}, []),
        ({"seconds": 300.0}, ["twins"]),
        ({"metrics": [77.0, 77.2, 77.1]}, ["twins"]),
        ({"workers": 8, "seconds": 100.0}, []),
        ({"k": 2, "seconds": 100.0}, []),
    ],
)
def test_twins_that_disagree(second: dict[str, object], expected: list[str]) -> None:
    """The same synchronous experiment under two labels: times 1.5 × apart, or different metrics."""
    a = runs("four · acc 1", [80.0, 80.2, 80.1], 200.0, workers=4)
    fields = {"metrics": [80.0, 80.1, 80.2], "seconds": 200.0, "workers": 4, **second}
    assert kinds(block(BASE, a, runs("four · k 1", **fields))) == expected  # type: ignore[arg-type]


def test_setups_with_settings_are_no_twins() -> None:
    """Whatever differs between two setups of the runner is in their settings, as `compile=true` is."""
    groups = [
        runs(name, [80.0, 80.2], seconds, workers=4, certificate=certificate(world_size=4), values={"compile": name})
        for name, seconds in (("true", 200.0), ("false", 300.0))
    ]
    assert "twins" not in kinds(block(runs("one", [80.0, 80.2], 400.0, certificate=certificate()), *groups))


def test_several_workers_slower_than_one() -> None:
    """Only if the whole interval of the speed-up is below 1."""
    slow = runs("four", [80.1, 80.3, 80.2], [500.0, 501.0, 502.0], workers=4)
    assert only(block(BASE, slow), "slower than one worker").value == pytest.approx(0.8, abs=0.01)
    assert kinds(block(BASE, runs("four", [80.1, 80.3, 80.2], [390.0, 410.0, 415.0], workers=4))) == []
    shared = runs("four", [80.1, 80.3, 80.2], [500.0, 501.0, 502.0], workers=4, jobs_at_once=2)
    assert kinds(block(BASE, shared)) == ["side by side"]


def test_speed_up_that_the_workers_do_not_explain() -> None:
    """A baseline that was slowed down makes every other setup look fast. Reduced precision can be faster."""
    found = only(block(BASE, runs("four", [80.0, 80.1, 80.2], 70.0, workers=4)), "implausible speed-up")
    assert (found.doubtful, found.value) == (True, pytest.approx(5.73, abs=0.01))
    assert "implausible speed-up" not in kinds(block(BASE, runs("four", [80.0, 80.1, 80.2], 90.0, workers=4)))
    faster = runs("four", [80.0, 80.1, 80.2], 70.0, workers=4, precision="bf16")
    assert "implausible speed-up" not in kinds(block(BASE, faster))
    shared = runs("four", [80.0, 80.1, 80.2], 70.0, workers=4, jobs_at_once=2)
    assert kinds(block(BASE, shared)) == ["side by side"]


def test_different_machines() -> None:
    base = runs("one", [80.0, 80.4], [400.0, 401.0], machine="A")
    four = runs("four", [80.1, 80.3], [200.0, 201.0], workers=4, machine="B")
    assert "(A: 2 runs; B: 2 runs)" in only(block(base, four), "machines differ").text
    unknown = runs("four", [80.1, 80.3], [200.0, 201.0], workers=4)
    assert kinds(block(base, unknown)) == []


def test_speed_ups_of_a_busy_machine_are_unreliable() -> None:
    """Those of the setup, and those of all others if the baseline has such a run; also in the files."""
    four = runs("four", [80.1, 80.3, 80.2], [200.0, 201.0, 202.0], workers=4)
    two = runs("two", [80.0, 80.3, 80.1], [220.0, 221.0, 222.0], workers=2)
    for busy, unreliable in (("two", {"two"}), ("one", {"one", "two", "four"})):
        groups = [[replace(one, busy=one.source == f"{busy}/1") for one in group] for group in (BASE, two, four)]
        comparison = compared(*groups)
        (found,) = comparison.blocks
        assert kinds(found) == ["busy machine"]
        assert (set(found.flags[0].setups), found.flags[0].runs) == (unreliable, (f"{busy}/1",))
        assert "unreliable" in found.flags[0].text
        in_parentheses = {row.setup.name for row in found.rows if cells_of(found, row)["speed-up"].text.startswith("(")}
        assert in_parentheses == unreliable - {"one"}
        in_csv = {row["setup"]: row["speed_up_unreliable"] for row in setup_rows(comparison)}
        assert in_csv == {"one": None, "two": "two" in unreliable, "four": "four" in unreliable}
        assert [row["source"] for row in run_rows(comparison) if row["busy"]] == [f"{busy}/1"]


def test_times_that_are_not_measurements() -> None:
    """Shared machines, rehearsals and runs too short to time; the metric is compared in all cases."""
    shared = block(BASE, runs("four", [80.1, 80.3], [200.0, 201.0], workers=4, jobs_at_once=2))
    side_by_side = only(shared, "side by side")
    assert (side_by_side.value, side_by_side.runs) == (2, ("four/0", "four/1"))
    assert cells_of(shared, shared.rows[1])["speed-up"].text.startswith("(")
    # Each knows the GPUs that it had.
    gpus = [runs(f"gpu{n}", [80.1, 80.3], 200.0, machine=f"{n} × GPU", workers=n, jobs_at_once=2) for n in (1, 2)]
    assert kinds(block(*gpus)) == ["side by side"]
    rehearsed = block(BASE, runs("tpu8", [80.1, 80.3], [2000.0, 100.0], workers=8, rehearsed=True))
    assert kinds(rehearsed) == ["rehearsed"]  # neither a spread nor slower than one
    assert (rehearsed.rows[1].seconds, rehearsed.rows[1].speed_up) == (None, None)
    short = block(BASE, runs("four", [80.1, 80.3, 80.2], [None, 200.0, 201.0], workers=4))
    assert only(short, "no time").runs == ("four/0",)
    assert short.rows[1].seconds == pytest.approx(200.5)
    assert all(one.rows[1].difference is not None for one in (shared, rehearsed, short))


def test_flags_are_numbered_through_all_blocks() -> None:
    other = replace(KEY, samples=2000)
    slow = runs("four", [80.1, 80.3, 80.2], [200.0, 420.0, 202.0], workers=4)
    comparison = compared(BASE, slow, [replace(one, block=other) for one in [*BASE, *slow]])
    assert [flag.number for one in comparison.blocks for flag in one.flags] == [1, 2]
    assert [cells_of(one, row)["notes"].text for one in comparison.blocks for row in one.rows] == ["", "1", "", "2"]


def remarks_on(*groups: list, **options: object) -> str:  # type: ignore[type-arg]
    return " ".join(remarks(block(*groups, **options)))


def test_remarks() -> None:
    """The margin, few seeds (4.303 ÷ √3 = 2.5), seeds without a partner, equal differences, a wide margin."""
    five = [80.0, 80.1, 80.2, 80.3, 80.4]
    usual = remarks_on(runs("one", five), runs("four", five[::-1], workers=4))
    only_rows = "Intervals are for these evaluation rows only, since their number is not known."
    spread = "±: half of the 95% confidence interval of the mean over seeds."
    assert usual == f"Equivalence margin: ±1 (percentage points, default). {spread} {only_rows}"
    assert "3 seeds are rarely enough" in remarks_on(BASE, runs("four", [80.1, 80.5, 80.2], workers=4))
    assert "±2.5 standard deviations" in remarks_on(BASE, runs("four", [80.1, 80.5, 80.2], workers=4))
    assert "excludes seed 2" in remarks_on(BASE, runs("four", [80.1, 80.3], workers=4))
    pair = runs("one", [90.0, 88.0])
    assert "same difference" in remarks_on(pair, runs("four", [92.0, 90.0], workers=4))
    assert "same difference" not in remarks_on(pair, runs("four", [90.0, 88.0], workers=4))
    assert "25% of the baseline's accuracy" in remarks_on(BASE, runs("four", [80.1, 80.5], workers=4), margin=20.0)


def test_ten_pairs_have_a_bootstrap_interval_too() -> None:
    four = runs("four", [80.0 + extra for extra in [0.0] * 6 + [0.02, 0.03, 0.05, 3.3]], workers=4)
    text = remarks_on(runs("one", [80.0] * 10), four)
    assert "four: the bootstrap interval is 90% from" in text
    assert "by the bootstrap interval: different; the verdict uses the t interval: equivalent" in text


def test_huge_and_infinite_metrics_end_nothing() -> None:
    """A diverged perplexity, as large as a float can be, or infinite for another seed than in the baseline."""
    key = replace(KEY, metric="perplexity", goal="min")
    base = runs("one", [30.0, math.inf, 31.0], block=key)
    found = block(base, runs("four", [math.inf, 31.0, 30.0], workers=4, block=key))
    assert [row.verdict.kind for row in found.rows[1:] if row.verdict] == ["no verdict"]
    found = block(runs("one", [30.0, 31.0], block=key), runs("huge", [30.0, 1e200, 1e307], workers=2, block=key))
    assert [row.verdict.kind for row in found.rows[1:] if row.verdict] == ["undecided"]
