"""Verdicts from few evaluation rows, and from several setups: how often they are wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.functional import one_hot

from benchmarks.small_evaluation_sets import WIDTHS, Flips, _by_row, differences, row_differences, verdicts
from recipes.tasks.problems import PROBLEMS
from runner.folder.evaluation_rows import FILE_NAME, write_rows
from runner.tools.compare.from_csv import read_csv
from runner.tools.compare.rows import lasting_error
from runner.tools.compare.runs import Run
from runner.tools.compare.statistics import Estimate, mean_of
from runner.tools.compare.text import remarks, summary
from runner.tools.compare.verdict import DIFFERENT, EQUIVALENT, UNDECIDED, by_holm, decide
from tests.tools.compare.make import KEY, PUBLISHED, block, runs
from tests.tools.compare.test_from_folders import change, read

COMPARISONS = 4_000
#: 5% and one point; the estimates of 5% have a standard deviation of 0.3 points.
NOMINAL = 0.06


@pytest.mark.parametrize(("flips", "metric"), itertools.product(
    [Flips(0.0, False), Flips(0.0, True), Flips(0.05, False)], WIDTHS))  # fmt: skip
def test_few_rows_do_not_make_setups_equivalent_or_different(flips: Flips, metric: str) -> None:
    """A setup that is worse by the margin is equivalent, and one that is as good is different, in at most 5 of 100."""
    for rows, seeds in itertools.product((50, 100, 300, 400, 1_000, 5_000), (2, 3, 10)):
        draw = np.random.default_rng(rows)
        worse, same = (differences(draw, COMPARISONS, seeds, rows, metric, lost, flips) for lost in (1.0, 0.0))
        _, equivalent, _ = verdicts(worse, rows, WIDTHS[metric])
        _, _, different = verdicts(same, rows, WIDTHS[metric])
        assert max(equivalent, different) < NOMINAL, (rows, seeds)


def test_large_evaluation_sets_keep_their_power() -> None:
    draw = np.random.default_rng(0)
    for seeds in (2, 3, 10):
        before, now, _ = verdicts(
            differences(draw, COMPARISONS, seeds, 5_000, "accuracy", 0.0, Flips(0.05, False)), 5_000, 100.0
        )
        assert now > 0.9 * before


@pytest.mark.parametrize("metric", WIDTHS)
def test_rows_that_always_differ_both_ways_count_where_they_were_kept(metric: str) -> None:
    """Without them a difference shows only what does not cancel out, and 1 in 5 wrong setups is equivalent."""
    draw, width, rows = np.random.default_rng(0), WIDTHS[metric], 3_000
    worse, same = (row_differences(draw, 1_000, 3, rows, metric, lost, Flips(0.05, True)) for lost in (1.0, 0.0))
    assert verdicts(worse.mean(-1), rows, width)[1] > 0.15
    assert verdicts(worse.mean(-1), rows, width, worse)[1] < NOMINAL
    assert verdicts(same.mean(-1), rows, width)[2] > 1.5 * NOMINAL
    assert verdicts(same.mean(-1), rows, width, same)[2] < NOMINAL
    anew = row_differences(draw, 1_000, 3, rows, metric, 0.0, Flips(0.05, False))
    assert verdicts(anew.mean(-1), rows, width, anew)[2] < NOMINAL


def test_the_simulated_rows_are_those_of_the_recipes() -> None:
    """Their mean is the metric, and their values are what a run keeps."""
    of_first, right = np.random.default_rng(0).random((2, 1, 1, 200)) < np.array([0.5, 0.85])[:, None, None, None]
    labels = torch.from_numpy(of_first[0, 0]).long()
    logits = one_hot(torch.where(torch.from_numpy(right[0, 0]), labels, 1 - labels), 2).double()
    for metric in WIDTHS:
        kept = PROBLEMS["single_label"].row_metrics(logits, labels)[metric]
        assert _by_row(metric, of_first, right)[0, 0] == pytest.approx(kept.numpy(), rel=1e-4)


def test_the_lasting_error_is_that_of_means_over_seeds_without_what_seeds_add() -> None:
    """Flips on the same rows have the standard error of their mean; flips anew in each seed have nearly none."""
    draw = np.random.default_rng(0)
    lasting, anew = (
        np.broadcast_to(draw.choice([-1.0, 0.0, 1.0], (200, seeds, 1_000), p=[0.05, 0.9, 0.05]), (200, 5, 1_000))
        for seeds in (1, 5)
    )
    assert lasting_error(lasting).mean() == pytest.approx(lasting.mean(-1)[:, 0].std(ddof=1), rel=0.15)
    assert lasting_error(anew).mean() < 0.2 * lasting_error(lasting).mean()


def test_a_verdict_says_when_there_are_too_few_rows() -> None:
    """Equal values on 50 rows are no evidence within one point; on as many as it says they are."""

    def verdict(rows: int | None, margin: float | None = None) -> str:
        groups = [runs(name, [80.0, 82.0], workers=n, eval_rows=rows) for name, n in (("one", 1), ("two", 2))]
        (_, row) = block(*groups, margin=margin).rows
        assert row.verdict is not None
        return row.verdict.text

    few = verdict(50)
    assert few.startswith("undecided: 50 evaluation rows are too few for a margin of 1")
    enough = int(few.split()[-1].replace(",", ""))
    assert verdict(enough) == "equivalent: identical values"
    assert verdict(int(0.98 * enough)).startswith("undecided")
    assert verdict(50, margin=10) == "equivalent: identical values"
    assert verdict(None) == "equivalent: identical values"


def test_a_row_more_in_every_seed_is_no_difference() -> None:
    """Equal differences have no spread over seeds; 1 of 100 rows is not different, 20 are."""
    groups = [runs(name, values, workers=n, eval_rows=100) for name, values, n in (
        ("one", [80.0, 81.0], 1), ("more", [81.0, 82.0], 2), ("worse", [60.0, 61.0], 4))]  # fmt: skip
    kinds = {row.setup.name: row.verdict.kind for row in block(*groups, margin=0.5).rows if row.verdict}
    assert kinds == {"more": UNDECIDED, "worse": DIFFERENT}


def test_a_loss_moves_in_no_steps() -> None:
    groups = [runs(name, [1.0, 1.1], workers=n, eval_rows=50, block=replace(KEY, metric="loss", goal="min"))
              for name, n in (("one", 1), ("two", 2))]  # fmt: skip
    (_, row) = block(*groups, margin=0.01).rows
    assert row.verdict is not None
    assert row.verdict.kind == EQUIVALENT


@pytest.mark.parametrize("counts", [True, False])
def test_which_rates_count_rows(counts: bool) -> None:
    """With a prefix or suffix as well; for those that do not, a remark says what the intervals are for."""
    count = (
        *("accuracy", "eval_accuracy", "val_acc", "top1_accuracy", "balanced_accuracy", "acc_norm", "eval_exact_match"),
        *("eval_f1", "overall_f1", "f1_score", "macro_f1", "eval/precision", "matthews_correlation", "cohen_kappa"),
    )
    others = ("token_accuracy", "mean_token_accuracy", "average_precision", "roc_auc", "bleu", "pearson")
    for metric in count if counts else others:
        key = replace(KEY, metric=metric)
        groups = [runs(name, [80.0, 82.0], workers=n, eval_rows=50, block=key) for name, n in (("one", 1), ("two", 2))]
        found = block(*groups)
        kinds = [row.verdict.kind for row in found.rows if row.verdict]
        assert (metric, kinds) == (metric, [UNDECIDED if counts else EQUIVALENT])
        assert any("for these evaluation rows only" in remark for remark in remarks(found)) != counts


def test_kept_rows_are_those_of_the_metric(jobs: list[Path]) -> None:
    """Those of another evaluation, or of another number of rows, are ignored; a damaged file is named."""
    for job in jobs:
        change(job, "summary.json", eval={"accuracy": 75.0}, metric="accuracy", data={"eval_samples": 4})
        write_rows(job, {"accuracy": np.array([100, 100, 100, 0]), "loss": np.zeros(4)})
    change(jobs[1], "summary.json", eval={"accuracy": 80.0})
    change(jobs[2], "summary.json", data={"eval_samples": 5})
    found = read(*jobs).runs
    assert [None if one.row_metrics is None else list(one.row_metrics) for one in found] == [
        [100, 100, 100, 0], None, None, [100, 100, 100, 0]]  # fmt: skip
    assert [one.eval_rows for one in found] == [4, 4, 5, 4]
    for content in (b"", b"\xff\xfe\x00" * 9, (2**40).to_bytes(8, "little")):
        (jobs[3] / FILE_NAME).write_bytes(content)
        (skipped,) = read(*jobs).skipped
        assert FILE_NAME in skipped.reason


def test_setups_that_were_compared_row_by_row_say_so() -> None:
    def group(name: str, right: int, workers: int, kept: bool) -> list[Run]:
        by_row = np.array([100.0] * right + [0.0] * (100 - right)) if kept else None
        return runs(name, [right, right], workers=workers, eval_rows=100, row_metrics=by_row)

    by_row, not_by_row = (block(group("one", 80, 1, kept), group("two", 79, 2, kept)) for kept in (True, False))
    assert by_row.rows[1].difference.sampling.by_row  # type: ignore[union-attr]
    assert not any(FILE_NAME in line for line in remarks(by_row))
    assert any(FILE_NAME in line for line in remarks(not_by_row))


def test_a_metric_that_counts_no_rows_is_compared_by_row() -> None:
    """A loss that is 0.01 lower in each seed, on a few rows that may not be among others, is not different."""
    one = np.full(100, 1.0)
    few, every = np.where(np.arange(100) < 2, 0.5, 1.0), one - 0.01
    groups = [
        runs(name, [rows.mean(), rows.mean() + 0.1], workers=workers, eval_rows=100, row_metrics=rows,
             block=replace(KEY, metric="loss", goal="min"))
        for workers, (name, rows) in enumerate({"one": one, "few": few, "every": every}.items(), 1)
    ]  # fmt: skip
    kinds = {row.setup.name: row.verdict.kind for row in block(*groups).rows if row.verdict}
    assert kinds == {"few": UNDECIDED, "every": DIFFERENT}


def test_published_runs_may_name_their_evaluation_rows(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    header, *lines = PUBLISHED.splitlines()
    path.write_text(
        "\n".join([header + ",eval_samples", *(f"{line},{'' if 'new' in line else 872}" for line in lines)])
    )
    assert {run.eval_rows for run in read_csv(path).runs} == {872, None}


# Several setups against one baseline.


def test_a_p_value_is_that_of_the_interval() -> None:
    """The t test's where rows are not known; otherwise the level at which the interval reaches 0."""
    pairs = [0.3, 0.9, -0.2, 0.5]
    assert mean_of(pairs).p_value(mean_of(pairs).value) == pytest.approx(stats.ttest_1samp(pairs, 0.0).pvalue)
    (_, row) = block(runs("one", [80, 81, 82], eval_rows=500), runs("two", [77, 79, 80], workers=2, eval_rows=500)).rows
    estimate = row.difference
    assert isinstance(estimate, Estimate)
    level = 1 - estimate.p_value(abs(estimate.value))
    assert estimate.interval(level).high == pytest.approx(0.0)
    assert mean_of([0.0, 0.0]).p_value(0.0) == 1.0


def test_holms_correction_keeps_the_error_of_all_setups() -> None:
    """12 setups like the baseline: in about a third of comparisons one is different, corrected in one of twenty."""
    draw = np.random.default_rng(0)
    trials, separate, corrected = 400, 0, 0
    for _ in range(trials):
        baseline = draw.normal(80, 1, 5)
        estimates = {str(name): mean_of(list(draw.normal(80, 1, 5) - baseline)) for name in range(12)}
        tests = {name: (decide(one, None, "max"), one) for name, one in estimates.items()}
        separate += any(verdict.kind == DIFFERENT for verdict, _ in tests.values())
        corrected += any(verdict.kind == DIFFERENT for verdict in by_holm(tests, None).values())
    assert separate > 0.25 * trials
    assert corrected < 0.08 * trials  # 5% and 2.7 standard deviations


def test_the_best_of_many_is_judged_as_one_of_them() -> None:
    """Of 12 setups like the baseline a race leaves the best: it is different in at most one of twenty comparisons."""
    draw = np.random.default_rng(1)
    trials, separate, corrected = 400, 0, 0
    for _ in range(trials):
        differences = draw.normal(80, 1, (12, 5)) - draw.normal(80, 1, 5)
        best = mean_of(list(differences[differences.mean(axis=1).argmax()]))
        tests = {"best": (decide(best, None, "max"), best)}
        separate += tests["best"][0].kind == DIFFERENT
        corrected += by_holm(tests, None, 12)["best"].kind == DIFFERENT
    assert separate > 0.1 * trials
    assert corrected < 0.05 * trials


def test_what_holm_takes_back_is_undecided() -> None:
    """With four setups a p value of 0.035 is not enough, and the surer verdicts stay. Both tables say what holds."""
    base = [80.0, 81.0, 82.0]
    changed = {"worse": (-20, -22, -18), "near": (0.3, -0.2, 0.1), "same": (0.01, -0.02, 0.01), "better": (3, 4, 2)}
    others = [
        runs(name, [one + change for one, change in zip(base, changes, strict=True)], workers=2 + number)
        for number, (name, changes) in enumerate(changed.items())
    ]
    plain, corrected = (block(runs("one", base), *others, family_wise=one) for one in (False, True))
    kinds = [{row.setup.name: row.verdict.kind for row in one.rows if row.verdict} for one in (plain, corrected)]
    assert kinds[0] == {"worse": DIFFERENT, "near": EQUIVALENT, "same": EQUIVALENT, "better": DIFFERENT}
    assert kinds[1] == {**kinds[0], "better": UNDECIDED}
    assert any("up to 19%" in line for line in remarks(plain))
    assert any("Holm" in line for line in remarks(corrected))


def test_equivalent_at_chance_says_so() -> None:
    """50.05 against 50.00, where one answer for all rows has 50: nothing was learned; 60 is more than that."""

    def found(level: float, **more: object) -> tuple[str, str]:
        groups = [runs(name, [level, level + step], workers=n, eval_rows=5_000, constant=50.0, **more)
                  for name, step, n in (("one", 0.05, 1), ("two", 0.02, 2))]  # fmt: skip
        only = block(*groups)
        assert only.rows[1].verdict is not None
        return only.rows[1].verdict.text, summary(only)

    text, counted = found(50.0)
    assert text.startswith("equivalent: at chance")
    assert "at chance" in counted
    assert found(60.0)[0] == "equivalent"
    assert found(50.0, weights="same")[0].startswith("equivalent: the same weights, bit for bit; at chance")
