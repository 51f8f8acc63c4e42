"""How often is a sweep with `seed=auto` wrong, and how many seeds does it spend?

    python -m benchmarks.seeds_until_decided [--frontier FILE --rules FILE]

Simulated differences: normal, heavy-tailed (Student's t with 3 degrees of freedom), skewed, and counts of right rows.
Recorded ones: the paired differences of our long experiments, shifted so that their mean is 0 or the margin, drawn with
replacement; and in random order as they are, where the verdict of all of them is what should come out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from runner.tools.compare.design import Design, Levels
from runner.tools.compare.rows import least_error
from runner.tools.compare.statistics import PAIRED, Estimate, RowSampling
from runner.tools.compare.verdict import DIFFERENT, EQUIVALENT, FIXED, UNDECIDED

_SWEEPS = 20_000
_CODES = {UNDECIDED: 0, EQUIVALENT: 1, DIFFERENT: 2}
#: Evaluation rows of the simulated counts, and the baseline's accuracy in percent.
_ROWS, _ACCURACY = 2_000, 85.0

Draw = Callable[[np.random.Generator, tuple[int, ...], float], np.ndarray]


def _counts(generator: np.random.Generator, shape: tuple[int, ...], mean: float) -> np.ndarray:
    """Differences of accuracies, in percentage points; a true difference of 1 is one point."""
    setup, baseline = (generator.binomial(_ROWS, share / 100, shape) for share in (_ACCURACY + mean, _ACCURACY))
    return 100 * (setup - baseline) / _ROWS


#: Differences of a true mean with a standard deviation of about 1, in units of the margin.
SIMULATED: Mapping[str, Draw] = {
    "normal": lambda generator, shape, mean: generator.standard_normal(shape) + mean,
    "heavy-tailed": lambda generator, shape, mean: generator.standard_t(3, shape) / np.sqrt(3) + mean,
    "skewed": lambda generator, shape, mean: generator.exponential(1.0, shape) - 1 + mean,
    "counts": _counts,
}


def looks(differences: np.ndarray, margin: float, levels: Callable[[int], Levels], first: int, rows: int | None) -> Any:
    """Verdict and number of seeds of each sweep, int [sweeps] both. `differences`: [sweeps, seeds].

    `first`: seeds at the first look; `rows`: of a metric that counts rows, in percent.
    """
    verdicts, seeds = np.zeros(len(differences), int), np.full(len(differences), differences.shape[1])
    for n in range(first, differences.shape[1] + 1):
        known = differences[:, :n]
        value = known.mean(axis=1)
        sampling = RowSampling(rows, least_error(value, margin, 100.0, rows), 100 / rows) if rows else None  # type: ignore[arg-type]
        estimate = Estimate(value, PAIRED, (n, n), (known.std(axis=1, ddof=1), np.nan), sampling=sampling)  # type: ignore[arg-type]
        at = levels(n)
        equivalent = np.abs(value) + estimate.half_width(at.equivalence) < margin
        different = ~equivalent & (np.abs(value) > estimate.half_width(at.difference))
        new = (verdicts == 0) & (equivalent | different)
        verdicts[new] = np.where(equivalent[new], 1, 2)
        seeds[new] = n
    return verdicts, seeds


def fixed_seeds(draw: Draw, truth: float, margin: float, kind: str, share: float, rows: int | None) -> int | None:
    """The seeds with which one look at a fixed number gives this verdict as often; None for more than 60."""
    generator = np.random.default_rng(1)
    values = draw(generator, (_SWEEPS // 4, 60), truth)
    for n in range(2, 61):
        verdicts, _ = looks(values[:, :n], margin, lambda seeds: FIXED, n, rows)
        if np.mean(verdicts == _CODES[kind]) >= share:
            return n
    return None


def simulated(designs: Mapping[str, Design]) -> Iterator[dict[str, Any]]:
    """A row for each kind of difference, design and truth."""
    for (name, draw), (title, design) in ((a, b) for a in SIMULATED.items() for b in designs.items()):
        generator = np.random.default_rng(0)
        margins = (2.0, 4.0) if name == "counts" else (1.0, 2.0)
        rows = _ROWS if name == "counts" else None
        for margin in margins:
            for truth, wrong, right in ((0.0, DIFFERENT, EQUIVALENT), (margin, EQUIVALENT, DIFFERENT)):
                setups = [draw(generator, (_SWEEPS, design.max_seeds), truth) for _ in range(design.comparisons)]
                found = [looks(one, margin, design.levels, design.min_seeds, rows) for one in setups]
                any_wrong = np.any([verdicts == _CODES[wrong] for verdicts, _ in found], axis=0)
                shares = {kind: float(np.mean(found[0][0] == code)) for kind, code in _CODES.items()}
                yield {
                    "differences": name,
                    "design": title,
                    "margin": margin,
                    "truth": truth,
                    "any wrong": float(any_wrong.mean()),
                    "right": shares[right],
                    "undecided": shares[UNDECIDED],
                    "seeds": float(found[0][1].mean()),
                    "fixed": fixed_seeds(draw, truth, margin, right, shares[right], rows)
                    if design.comparisons == 1
                    else None,
                }


def recorded(frontier: Path, rules: Path) -> dict[str, tuple[np.ndarray, float]]:
    """Paired differences from our experiments, by name, with their margin: those of at least nine seeds."""
    found = {}
    runs = pandas.read_csv(frontier)
    for task, baseline_lr, margin in (("cola", 6e-05, 2.0), ("squad", 1e-04, 1.0)):
        own = runs[(runs.task == task) & (runs.status == "FINISHED")]
        baseline = own[(own.setup == "one") & (own.lr == baseline_lr)].set_index("seed").metric
        for (setup, lr), part in own[own.setup != "one"].groupby(["setup", "lr"]):
            values = (part.set_index("seed").metric - baseline).dropna()
            found[f"{task} {setup} {lr:g}"] = (values.to_numpy(), margin)
    runs = pandas.read_csv(rules)
    own = runs[(runs.task == "cola") & (runs.status == "FINISHED")]
    baseline = own[own.rule == "reference"].set_index("seed").metric
    for (ratio, rule), part in own[own.rule != "reference"].groupby(["ratio", "rule"]):
        values = (part.set_index("seed").metric - baseline).dropna()
        found[f"cola × {ratio} {rule}"] = (values.to_numpy(), 2.0)
    return {name: one for name, one in found.items() if len(one[0]) >= 9}


def replayed(name: str, values: np.ndarray, margin: float) -> dict[str, Any]:
    """What sweeps over these differences would have found."""
    generator, design = np.random.default_rng(0), Design(4, 20, 1)
    drawn = generator.choice(values - values.mean(), (_SWEEPS, design.max_seeds))
    wrong = {}
    for truth, kind in ((0.0, DIFFERENT), (margin, EQUIVALENT)):
        verdicts, _ = looks(drawn + truth, margin, design.levels, design.min_seeds, None)
        wrong[kind] = float(np.mean(verdicts == _CODES[kind]))
    (whole,), _ = looks(values[None], margin, lambda n: FIXED, len(values), None)
    orders = generator.permuted(np.broadcast_to(values, (_SWEEPS, len(values))), axis=1)
    shorter = Design(4, len(values), 1)
    verdicts, seeds = looks(orders, margin, shorter.levels, shorter.min_seeds, None)
    another = (verdicts != whole) & (verdicts != 0) & (whole != 0)
    return {
        "recorded": name,
        "pairs": len(values),
        "mean": float(values.mean()),
        "deviation": float(values.std(ddof=1)),
        "wrongly different": wrong[DIFFERENT],
        "wrongly equivalent": wrong[EQUIVALENT],
        "all pairs": {code: kind for kind, code in _CODES.items()}[int(whole)],
        "the same": float(np.mean(verdicts == whole)),
        "another verdict": float(np.mean(another)),
        "seeds": float(seeds.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frontier", type=Path, help="runs.csv of benchmarks.sync_frontier")
    parser.add_argument("--rules", type=Path, help="runs.csv of benchmarks.scaling_rules")
    options = parser.parse_args()
    designs = {"4 to 20": Design(4, 20, 1), "3 to 12": Design(3, 12, 1), "4 to 20, 3 setups": Design(4, 20, 3)}
    pandas.set_option("display.width", 160)
    print(pandas.DataFrame(simulated(designs)).round(3).to_string(index=False))
    if options.frontier and options.rules:
        found = recorded(options.frontier, options.rules)
        print(pandas.DataFrame([replayed(name, *one) for name, one in found.items()]).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
