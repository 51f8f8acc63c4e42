"""Findings, each provoked on numbers made by hand, and none in clean ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from runner.compare.comparison import Block, Finding
from runner.compare.remarks import remarks
from runner.compare.shown import shown_row
from tests.compare.make import BASE, KEY, block, certificate, compared, run, runs


def kinds(found: Block) -> list[str]:
    return [finding.kind for finding in found.findings]


def only(found: Block, kind: str) -> Finding:
    (finding,) = [one for one in found.findings if one.kind == kind]
    return finding


def test_clean_runs_have_no_findings() -> None:
    """Steady times, close metrics, a real speed-up, one machine, nothing beside it: nothing to say."""
    four = runs("four", [80.1, 80.3, 80.2], [200.0, 201.0, 202.0], workers=4, machine="A", jobs_at_once=1)
    k = runs("four · k=4", [79.9, 80.3, 80.0], [150.0, 151.0, 150.5], workers=4, k=4, machine="A", jobs_at_once=1)
    assert kinds(block(BASE, four, k)) == []


def test_a_timing_outlier_is_named_with_what_it_does() -> None:
    """One seed of three twice as slow: the run, its ratio to the median, the speed-up with and without it."""
    four = runs("four", [80.1, 80.3, 80.2], [200.0, 420.0, 202.0], workers=4)
    found = block(BASE, four)
    finding = only(found, "timing outlier")
    assert finding.text.startswith("four · 1,000 samples, seed 1: 420.0 s, 2.08 × the median of its setup")
    assert finding.text.endswith("without it 2.0×, not 1.6×")
    assert (finding.setups, finding.runs, finding.marks) == (("four",), ("four/1",), True)
    assert found.rows[1].speed_up is not None
    assert found.rows[1].speed_up.value == pytest.approx((2 * 401 / 420 * 402 / 202) ** (1 / 3))  # nothing left out


def test_an_outlier_of_the_baseline_says_that_all_rests_on_it() -> None:
    """A slow baseline run makes every speed-up too good."""
    slow = runs("one", [80.0, 80.4, 80.2], [400.0, 900.0, 402.0])
    four = runs("four", [80.1, 80.3, 80.2], [200.0, 201.0, 202.0], workers=4)
    assert "every speed-up here rests on it" in only(block(slow, four), "timing outlier").text


def test_small_deviations_are_no_outliers() -> None:
    """Two equal times and one 9% off: the modified z is infinite, and still it is within 10%."""
    four = runs("four", [80.1, 80.3, 80.2], [200.0, 200.0, 218.0], workers=4)
    assert kinds(block(BASE, four)) == []


def test_two_runs_have_no_outlier_but_a_spread() -> None:
    """With two seeds nobody can say which is off: the spread is named instead."""
    four = runs("four", [80.1, 80.3], [200.0, 260.0], workers=4)
    finding = only(block(BASE, four), "timings spread")
    assert "from 200.0 to 260.0 s (1.30 ×)" in finding.text
    assert "timing outlier" not in kinds(block(BASE, four))


def test_an_outlier_is_not_told_twice() -> None:
    """A setup with an outlier has a large spread because of it: one finding."""
    four = runs("four", [80.1, 80.3, 80.2], [200.0, 420.0, 202.0], workers=4)
    assert kinds(block(BASE, four)) == ["timing outlier"]


def test_a_seed_that_is_slow_everywhere_is_one_sentence() -> None:
    """Seed 0 slow in two of three setups of a family: one finding, details below; a single outlier stands alone."""
    groups = [
        runs(f"four · k={k}", [80.1, 80.3, 80.2], [times[0], times[1], times[2]], workers=4, k=k)
        for k, times in ((2, (400.0, 200.0, 201.0)), (4, (300.0, 150.0, 151.0)), (8, (100.0, 101.0, 60.0)))
    ]
    several, single = [one for one in block(BASE, *groups).findings if one.kind == "timing outlier"]
    assert several.text == (
        "seed 0 is slow in 2 of the 3 setups with 4 workers by k: another machine, or another job beside it?"
    )
    assert [detail.partition(" · 1,000")[0] for detail in several.details] == ["four · k=2", "four · k=4"]
    assert several.setups == ("four · k=2", "four · k=4")
    assert "four · k=8 · 1,000 samples, seed 2: 60.0 s, 0.60 ×" in single.text


def test_a_collapsed_seed() -> None:
    """One seed 68 points below the others: named, and marked in the table; its value stays in the mean."""
    found = block(BASE, runs("four", [78.0, 78.4, 10.0], 200.0, workers=4))
    finding = only(found, "collapsed")
    assert finding.text == "four · 1,000 samples, seed 2 collapsed: 10, the setup's median is 78"
    assert finding.marks
    assert found.rows[1].metric.value == pytest.approx((78.0 + 78.4 + 10.0) / 3)


def test_collapse_is_measured_in_margins() -> None:
    """Six points below are 6 margins of 1, and fewer than 5 margins of 2."""
    four = runs("four", [78.0, 78.1, 72.0], 200.0, workers=4)
    assert kinds(block(BASE, four, margin=1.0)) == ["collapsed"]
    assert kinds(block(BASE, four, margin=2.0)) == []


def test_a_better_seed_is_not_collapsed() -> None:
    """Far from the median, on the good side."""
    assert kinds(block(BASE, runs("four", [70.0, 70.1, 79.0], 200.0, workers=4))) == []


def test_a_setup_that_collapsed_altogether_is_one_finding() -> None:
    """Every seed below half of the baseline's mean: one sentence, also for two seeds or one."""
    finding = only(block(BASE, runs("four", [9.0, 15.0, 12.0], 200.0, workers=4)), "collapsed")
    assert "every seed collapsed (9, 15, 12; all worse than half of the baseline's mean)" in finding.text
    assert kinds(block(BASE, [run("four", 0, 39.0, workers=4)])) == ["collapsed"]
    assert kinds(block(BASE, [run("four", 0, 41.0, workers=4)])) == []


def test_collapse_where_less_is_better() -> None:
    """A loss collapses upwards: beyond twice the baseline's mean."""
    key = replace(KEY, metric="loss", goal="min")
    base = runs("one", [0.50, 0.51, 0.52], 400.0, block=key)
    assert kinds(block(base, runs("four", [1.2, 1.3, 1.4], 200.0, workers=4, block=key))) == ["collapsed"]
    assert kinds(block(base, runs("four", [0.1, 0.11, 0.12], 200.0, workers=4, block=key))) == []


def test_a_diverged_seed_is_named_and_leaves_no_mean() -> None:
    """A metric that is NaN: no mean, no verdict, and the reason."""
    found = block(BASE, runs("four", [80.0, math.nan, 80.1], 200.0, workers=4))
    assert "seed 1: accuracy is no number" in only(found, "diverged").text
    assert found.rows[1].verdict is not None
    assert found.rows[1].verdict.text == "no verdict: a metric is no number"


def twins(**second: object) -> list[str]:
    a = runs("four · acc 1", [80.0, 80.2, 80.1], 200.0, workers=4)
    fields = {"metrics": [80.0, 80.1, 80.2], "seconds": 200.0, "workers": 4, **second}
    return kinds(block(BASE, a, runs("four · k 1", **fields)))  # type: ignore[arg-type]


def test_twins_that_differ() -> None:
    """The same synchronous experiment under two labels: times 1.5 × apart, or a metric that is different."""
    assert twins() == []
    assert twins(seconds=300.0) == ["twins"]
    assert twins(metrics=[77.0, 77.2, 77.1]) == ["twins"]
    assert twins(workers=8, seconds=100.0) == []
    assert twins(k=2, seconds=100.0) == []


def test_twins_by_certificate() -> None:
    """Runs with certificates are twins if these are equal; another batch is another experiment."""
    same, other = certificate(world_size=4), certificate(world_size=4, global_batch=96)
    a = runs("a", [80.0, 80.2], 200.0, workers=4, certificate=same)
    base = runs("one", [80.0, 80.2], 400.0, certificate=certificate())
    assert "twins" in kinds(block(base, a, runs("b", [80.0, 80.1], 300.0, workers=4, certificate=same)))
    assert "twins" not in kinds(block(base, a, runs("b", [80.0, 80.1], 300.0, workers=4, certificate=other)))


def test_several_workers_slower_than_one() -> None:
    """The whole interval of the speed-up below 1; an interval that reaches above 1 says nothing."""
    slow = runs("four", [80.1, 80.3, 80.2], [500.0, 501.0, 502.0], workers=4)
    assert "4 workers are slower than one (0.80×" in only(block(BASE, slow), "slower than one worker").text
    unsure = runs("four", [80.1, 80.3, 80.2], [390.0, 410.0, 415.0], workers=4)
    assert kinds(block(BASE, unsure)) == []


def test_machines_that_differ() -> None:
    """Two machines are named with their runs; machines that are not known are no difference."""
    base = runs("one", [80.0, 80.4], [400.0, 401.0], machine="A")
    four = runs("four", [80.1, 80.3], [200.0, 201.0], workers=4, machine="B")
    assert "(A: 2 runs; B: 2 runs)" in only(block(base, four), "machines differ").text
    unknown = runs("four", [80.1, 80.3], [200.0, 201.0], workers=4)
    assert kinds(block(base, unknown)) == []


def test_jobs_side_by_side_and_rehearsals() -> None:
    """Shared machines are flagged with the number of jobs; a rehearsed setup has no time and no speed-up."""
    shared = runs("four", [80.1, 80.3], [200.0, 201.0], workers=4, jobs_at_once=2)
    found = block(BASE, shared)
    assert "2 runs shared the machine with other jobs (up to 2 at once)" in only(found, "side by side").text
    assert found.side_by_side(found.rows[1])
    rehearsed = block(BASE, runs("tpu8", [80.1, 80.3], [2000.0, 100.0], workers=8, rehearsed=True))
    assert kinds(rehearsed) == ["rehearsed"]  # and neither a spread nor slower than one
    assert (rehearsed.rows[1].seconds, rehearsed.rows[1].speed_up) == (None, None)
    assert rehearsed.rows[1].difference is not None


def test_runs_too_short_to_time() -> None:
    """No samples per second: no speed, said so, and the metric is compared all the same."""
    found = block(BASE, runs("four", [80.1, 80.3, 80.2], [None, 200.0, 201.0], workers=4))
    assert "1 run of four" in only(found, "no time").text
    assert found.rows[1].seconds == pytest.approx(200.5)


def test_findings_are_numbered_through_all_blocks() -> None:
    """Notes in the tables point to one list of numbers."""
    other = replace(KEY, samples=2000)
    slow = [200.0, 420.0, 202.0]
    comparison = compared(
        BASE,
        runs("four", [80.1, 80.3, 80.2], slow, workers=4),
        [replace(one, block=other) for one in BASE],
        [replace(one, block=other) for one in runs("four", [80.1, 80.3, 80.2], slow, workers=4)],
    )
    assert [finding.number for one in comparison.blocks for finding in one.findings] == [1, 2]
    notes = [shown_row(one, row).notes for one in comparison.blocks for row in one.rows]
    assert notes == ["", "1", "", "2"]


def test_few_seeds_are_remarked_on() -> None:
    """Three seeds: the factor 4.303 ÷ √3 = 2.5 and the widths met; five seeds: nothing to say."""
    (sentence,) = remarks(block(BASE, runs("four", [80.1, 80.5, 80.2], 200.0, workers=4)), 1.0)
    assert "3 seeds rarely decide" in sentence
    assert "reaches 2.5 standard deviations each way, here ±" in sentence
    five = [80.0, 80.1, 80.2, 80.3, 80.4]
    assert list(remarks(block(runs("one", five), runs("four", five[::-1], workers=4)), 1.0)) == []


def test_seeds_without_a_partner_are_named() -> None:
    """Seeds 0 and 1 pair; seed 2 of the baseline is left out of the difference, and the report says so."""
    found = block(BASE, runs("four", [80.1, 80.3], 200.0, workers=4))
    assert found.rows[1].left_out == (2,)
    assert any("four: seed 2 has no partner" in sentence for sentence in remarks(found, 1.0))


def test_equal_differences_are_remarked_on() -> None:
    """Two seeds that differ by just as much from their partners make an interval without width."""
    found = block(runs("one", [90.0, 88.0]), runs("four", [92.0, 90.0], workers=4))
    assert any("four: the differences of its 2 seeds are equal" in sentence for sentence in remarks(found, 1.0))
    same = block(runs("one", [90.0, 88.0]), runs("four", [90.0, 88.0], workers=4))
    assert not any("are equal" in sentence for sentence in remarks(same, 1.0))


def test_diverged_seeds_end_nothing() -> None:
    """Infinite on other seeds than the baseline, or as large as a float can be: no verdict, or none that is decided."""
    base = runs("one", [30.0, math.inf, 31.0])
    found = block(base, runs("four", [math.inf, 31.0, 30.0], workers=4), runs("huge", [30.0, 1e200, 1e308], workers=2))
    assert [row.verdict.kind for row in found.rows[1:] if row.verdict] == ["no verdict", "no verdict"]
    found = block(runs("one", [30.0, 31.0, 32.0]), runs("huge", [30.0, 1e200, 1e307], workers=2))
    assert [row.verdict.kind for row in found.rows[1:] if row.verdict] == ["undecided"]


def test_ten_pairs_show_the_bootstrap_too() -> None:
    """Its interval, and what it would say where it disagrees with t."""
    base = runs("one", [80.0] * 10)
    four = runs("four", [80.0 + extra for extra in [0.0] * 6 + [0.02, 0.03, 0.05, 3.3]], workers=4)
    (sentence,) = remarks(block(base, four), 1.0)
    assert "four: the bootstrap's interval is 90% from" in sentence
    assert "it would say different, where t says equivalent, which stands" in sentence


def test_a_margin_as_wide_as_the_metric_is_remarked_on() -> None:
    """A margin of 1 on a loss of 0.5 calls everything equivalent; on an accuracy of 80 it is usual."""
    five = [0.50, 0.51, 0.52, 0.53, 0.54]
    small = block(runs("one", five), runs("four", five[::-1], workers=4))
    (sentence,) = remarks(small, 1.0)
    assert "The margin of 1 is 192% of the baseline's accuracy (0.52)" in sentence
    assert list(remarks(small, 0.05)) == []
