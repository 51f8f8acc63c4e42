"""Compare runs: group them into blocks and setups, choose each block's baseline, compare the setups with it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from runner.errors import UserError, did_you_mean
from runner.tools.compare.comparability import comparability
from runner.tools.compare.flags import find_flags
from runner.tools.compare.results import Block, RunComparison, SetupResult
from runner.tools.compare.rows import metric_difference
from runner.tools.compare.runs import BlockKey, FoundRuns, grouped
from runner.tools.compare.setups import SetupRuns, setups_by_block
from runner.tools.compare.statistics import common_seeds, mean, mean_of, normal_quantile, speed_up
from runner.tools.compare.verdict import (
    EQUIVALENCE_LEVEL,
    EQUIVALENT,
    NONE,
    Margin,
    Verdict,
    by_holm,
    decide,
    levels_of,
    margin_of,
)


def compare_runs(
    found: FoundRuns, baseline: str | None = None, margin: float | None = None, family_wise: bool = False
) -> RunComparison:
    """Compare all runs, block by block. Raises UserError.

    `baseline`: name of a setup; `margin`: as given; `family_wise`: whether the verdicts of a block share one error.
    """
    by_block = setups_by_block(found.runs, baseline)
    names = [setup.name for setups in by_block.values() for setup in setups]
    if baseline is not None and baseline not in names:
        raise UserError(f"--baseline={baseline} is not the name of a setup{did_you_mean(baseline, names)}")
    margins = _margins(found, margin)
    titles = _titles(by_block)
    numbers = itertools.count(1)
    blocks = []
    for key in sorted(by_block, key=lambda key: (key.experiment, key.conditions, key.total_samples, key.metric)):
        block = compare_block(key, titles[key], by_block[key], baseline, margins[key.experiment, key.metric])
        runs = [run for setup in by_block[key] for run in setup.runs]
        raced = max(run.raced for run in runs)
        if (family_wise or raced) and not any(run.design for run in runs):  # those are corrected
            block = _by_holm(block, raced)
        flags = [dataclasses.replace(flag, number=next(numbers)) for flag in find_flags(block)]
        blocks.append(dataclasses.replace(block, flags=tuple(flags)))
    return RunComparison(tuple(blocks), tuple(found.skipped))


def _titles(by_block: Mapping[BlockKey, Sequence[SetupRuns]]) -> dict[BlockKey, str]:
    """Equal titles get the name of the training file appended if it is another one in each block, else a digest."""
    titles = {}
    for title, keys in grouped(by_block, lambda key: key.title).items():
        files = [PurePath(by_block[key][0].first.values.get("recipe.data.train", "")).name for key in keys]
        distinct = "" not in files and len(set(files)) == len(files)
        for key, file in zip(keys, files, strict=True):
            data = file if distinct else key.data[:6]
            titles[key] = f"{title} · data {data}" if len(keys) > 1 else title
    return titles


def _margins(found: FoundRuns, given: float | None) -> dict[tuple[str, str], Margin]:
    """Margins by experiment and metric: an experiment's blocks share one scale, even if all values of one are low."""
    values: dict[tuple[str, str], list[float]] = {}
    for run in found.runs:
        values.setdefault((run.block.experiment, run.block.metric), []).append(run.metric)
    return {key: margin_of(key[1], metrics, given) for key, metrics in values.items()}


def compare_block(
    key: BlockKey, title: str, setups: Sequence[SetupRuns], baseline_name: str | None, margin: Margin
) -> Block:
    """One block without its flags. `baseline_name`: used if this block has such a setup."""
    baseline, note = choose_baseline(setups, baseline_name)
    others = [setup for setup in setups if setup is not baseline]
    rows = [_alone(baseline), *(compare_setup(setup, baseline, margin, key.goal) for setup in others)]
    return Block(key, title, tuple(rows), margin, note)


def _by_holm(block: Block, raced: int) -> Block:
    """The block with its verdicts corrected for their number, with those on setups that a race has stopped."""
    number = max(len(block.tests), raced - 1)
    corrected = by_holm(block.tests, block.margin.value, number)
    rows = [dataclasses.replace(row, verdict=corrected.get(row.setup.name, row.verdict)) for row in block.rows]
    return dataclasses.replace(block, rows=tuple(rows), corrected_for=number)


def choose_baseline(setups: Sequence[SetupRuns], name: str | None) -> tuple[SetupRuns, str]:
    """The baseline and a note.

    The setup called `name`; else the one setup with one worker, no accumulation and fp32 (or the only precision there
    is); else, with none or several of these, the first with the fewest workers.
    """
    for setup in setups:
        if setup.name == name:
            return setup, ""
    missing = f"{name} is not in this block; " if name is not None else ""
    one_precision = len({setup.first.precision for setup in setups}) == 1
    plain = [
        setup
        for setup in setups
        if (setup.first.workers, setup.first.accumulation, setup.first.k) == (1, 1, 1)
        and (setup.first.precision == "fp32" or one_precision)
    ]
    if len(plain) == 1:
        return plain[0], f"{missing}{plain[0].name} is used" if missing else ""
    first = min(plain or setups, key=lambda setup: (bool(setup.diverged), setup.first.workers))
    candidates = f"{len(plain) or 'no'} setup{'s' if len(plain) > 1 else ''}"
    why = f"{candidates} with one worker, no accumulation and fp32 (choose another with --baseline)"
    return first, f"{missing}{first.name}, the first setup with the fewest workers: {why}"


def _have_the_same_weights(setup: SetupRuns, baseline: SetupRuns) -> bool:
    """Return whether each run has those of the baseline's run with its seed."""
    of_seed = {run.seed: run.weights for run in baseline.runs}
    return all(run.weights is not None and run.weights == of_seed.get(run.seed) for run in setup.runs)


def _alone(setup: SetupRuns) -> SetupResult:
    seconds = mean(setup.seconds.values()) if setup.seconds else None
    return SetupResult(setup, mean_of(list(setup.metrics.values())), seconds)


def _at_chance(setups: Sequence[SetupRuns], margin: Margin, goal: str) -> float | None:
    """The metric of the best constant answer, if no setup is better by more than the sampling of its rows explains."""
    answers = {(run.constant, run.eval_rows) for setup in setups for run in setup.runs}
    constant, rows = answers.pop()
    if answers or constant is None or goal == "min":
        return None
    share = (constant - margin.lowest) / margin.width if margin.width else 0.0
    error = (margin.width or 0.0) * math.sqrt(share * (1 - share) / rows) if rows else 0.0
    limit = constant + normal_quantile(EQUIVALENCE_LEVEL) * error
    return constant if all(mean(setup.metrics.values()) <= limit for setup in setups) else None


def compare_setup(setup: SetupRuns, baseline: SetupRuns, margin: Margin, goal: str) -> SetupResult:
    """One setup compared with the baseline; without verdict and speed-up if they are not comparable."""
    # Lines of a table of published runs have no settings, and are not expected to have certificates.
    published = not any(one.first.values or one.first.certificate for one in (setup, baseline))
    level = None if published else comparability(setup.runs, baseline.runs)
    result = dataclasses.replace(_alone(setup), comparability=level)
    if level is not None and level.forbids:
        return dataclasses.replace(result, verdict=Verdict(NONE, "not comparable"))
    if setup.diverged or baseline.diverged:
        which = setup if setup.diverged else baseline
        seeds = ", ".join(str(run.seed) for run in which.diverged)
        whose = "" if setup.diverged else " of the baseline"
        return dataclasses.replace(result, verdict=Verdict(NONE, f"seed {seeds}{whose} diverged"))
    estimate = metric_difference(setup, baseline, margin)
    values = {*setup.metrics.values(), *baseline.metrics.values()}
    design, *others = {run.design for run in (*setup.runs, *baseline.runs)}
    verdict = decide(estimate, margin.value, goal, values.pop() if len(values) == 1 else None, design)
    if others:
        verdict = Verdict(NONE, "seeds were added until a sweep had its verdict: compare that sweep alone")
    if _have_the_same_weights(setup, baseline):
        verdict = Verdict(EQUIVALENT, "the same weights, bit for bit", certain=True)
    if verdict.kind == EQUIVALENT and (answer := _at_chance((setup, baseline), margin, goal)) is not None:
        chance = f"at chance, neither is clearly better than a constant answer ({answer:.4g})"
        detail = "; ".join(filter(None, (verdict.detail, chance)))
        verdict = dataclasses.replace(verdict, detail=detail, constant=True)
    paired = len(common_seeds(setup.metrics, baseline.metrics)) >= 2
    return dataclasses.replace(
        result,
        difference=estimate,
        levels=levels_of(estimate, design),
        verdict=verdict,
        speed_up=speed_up(setup.seconds, baseline.seconds) if setup.seconds and baseline.seconds else None,
        left_out=tuple(sorted(set(setup.seeds) ^ set(baseline.seeds))) if paired else (),
    )
