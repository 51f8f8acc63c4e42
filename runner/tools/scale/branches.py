"""The branches of a test, and what follows from their results. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.tools.compare.statistics import Estimate, Interval, mean_of
from runner.tools.compare.verdict import EQUIVALENCE_LEVEL

#: Windows of a branch that shows how many more samples a batch needs.
LONGER = (1.5, 2.0)
SAME, WORSE, UNDECIDED = "the same", "worse", "undecided"


@dataclass(frozen=True)
class Branch:
    """Training from the common weights in steps of `batch` samples, scaled by `rule`, over `windows` windows."""

    batch: int
    rule: str
    seed: int
    windows: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """`loss`: on the evaluation data; `metric`: the recipe's. Both are infinite if the branch diverged."""

    loss: float
    metric: float
    seconds: float


#: Values that are compared; lower is better, and infinite for one that diverged.
Values = Mapping[Branch, float]


@dataclass(frozen=True)
class Cell:
    """A batch with a rule against the reference batch, over the seeds.

    `difference`: of losses, above 0 where the larger batch is worse; `diverged`: branches.
    """

    batch: int
    rule: str
    difference: Estimate
    verdict: str
    diverged: int

    @property
    def interval(self) -> Interval:
        return self.difference.interval(EQUIVALENCE_LEVEL)


@dataclass(frozen=True)
class Findings:
    """`by`: what is compared, `loss` or `metric`; `start`: its value before the branches. `gained`: by how much the
    reference batch lowers it in a window; `limit`: how much less is the same.

    `largest`: the largest batch up to which some rule keeps every batch, and `rule` the best there; the reference batch
    and None without one. `beyond`: the best cell of the next batch, None if there is none; `more_samples`: how many
    times the samples it needs for the same loss; infinite for more than were tried, None where it was not measured. Its
    range is that of the single seeds.
    """

    by: str
    reference: int
    start: float
    gained: Estimate
    limit: float
    cells: tuple[Cell, ...]
    largest: int
    rule: str | None
    beyond: Cell | None
    more_samples: float | None
    more_samples_range: tuple[float, float] | None

    @property
    def seeds(self) -> int:
        return self.gained.sizes[0]

    @property
    def progress(self) -> float:
        return self.gained.value

    @property
    def learns(self) -> bool:
        """Return whether the reference batch surely lowers the loss: there is nothing to compare with otherwise."""
        return self.gained.interval(EQUIVALENCE_LEVEL).low > 0


def planned(reference: int, batches: Sequence[int], rules: Mapping[int, Sequence[str]], seeds: int) -> list[Branch]:
    """The branches of the test: by seed, so that an interrupted test has something of every batch.

    `rules`: those that apply to each batch; at the reference batch they are all the same.
    """
    return [
        branch
        for seed in range(seeds)
        for branch in (
            Branch(reference, "none", seed),
            *(Branch(batch, rule, seed) for batch in batches for rule in rules[batch]),
        )
    ]


def longer(findings: Findings, seeds: int) -> list[Branch]:
    """The branches that show how many more samples the first batch needs that is not the same."""
    cell = findings.beyond
    if cell is None or cell.verdict == SAME or cell.diverged:
        return []
    return [Branch(cell.batch, cell.rule, seed, windows) for seed in range(seeds) for windows in LONGER]


def find(values: Values, reference: int, start: float, margin: float, by: str = "loss") -> Findings:
    """Evaluate the branches. `start`: the value before them. `margin`: the share of the reference batch's progress
    that may be lost."""
    at_reference = {branch.seed: value for branch, value in values.items() if branch.batch == reference}
    gained = mean_of([start - value for value in at_reference.values()])
    limit = margin * gained.value
    found: dict[tuple[int, str], dict[int, float]] = {}
    for branch, value in values.items():
        if branch.batch != reference and branch.windows == 1:
            found.setdefault((branch.batch, branch.rule), {})[branch.seed] = value - at_reference[branch.seed]
    allowed = {seed: margin * (start - value) for seed, value in at_reference.items()}
    cells = tuple(_cell(batch, rule, by_seed, allowed) for (batch, rule), by_seed in sorted(found.items()))
    largest, rule, beyond = reference, None, None
    for batch, best in best_cells(cells).items():
        if best.verdict != SAME:
            beyond = best
            break
        largest, rule = batch, best.rule
    more = between = None
    if beyond is not None and (more := _more_samples(values, beyond, at_reference)) is not None:
        each = [_more_samples(values, beyond, {seed: value}) for seed, value in at_reference.items()]
        known = [more, *(one for one in each if one is not None)]
        between = (min(known), max(known))
    return Findings(by, reference, start, gained, limit, cells, largest, rule, beyond, more, between)


def best_cells(cells: Sequence[Cell]) -> dict[int, Cell]:
    """The cell with the lowest loss for each batch, in ascending order: of those that are the same, if any are."""
    best: dict[int, Cell] = {}
    for cell in sorted(cells, key=lambda cell: (cell.batch, cell.verdict != SAME, cell.difference.value)):
        best.setdefault(cell.batch, cell)
    return best


def _cell(batch: int, rule: str, by_seed: Mapping[int, float], allowed: Mapping[int, float]) -> Cell:
    """`by_seed`: differences of losses. `allowed`: for each seed, how much of it is the same."""
    differences = list(by_seed.values())
    diverged = sum(not math.isfinite(one) for one in differences)
    if diverged:
        return Cell(batch, rule, Estimate(math.inf, "", (0, 0), (math.nan, math.nan)), WORSE, diverged)
    difference = mean_of(differences)
    # One-sided at 5%: a lower loss is no reason for another verdict. By seed: what was gained is uncertain as well.
    excess = mean_of([lost - allowed[seed] for seed, lost in by_seed.items()]).interval(EQUIVALENCE_LEVEL)
    verdict = SAME if excess.high < 0 else WORSE if excess.low > 0 else UNDECIDED
    return Cell(batch, rule, difference, verdict, diverged)


def _more_samples(values: Values, cell: Cell, at_reference: Mapping[int, float]) -> float | None:
    """Windows at which the mean loss of these seeds is the reference batch's, between those that were tried."""
    means = []
    for windows in (1.0, *LONGER):
        own = [
            value - at_reference[branch.seed]
            for branch, value in values.items()
            if (branch.batch, branch.rule, branch.windows) == (cell.batch, cell.rule, windows)
            and branch.seed in at_reference
        ]
        if not own:
            return None
        if all(map(math.isfinite, own)):  # another length can diverge
            means.append((windows, sum(own) / len(own)))
    for (before, worse), (after, better) in itertools.pairwise(means):
        if better <= 0 < worse:
            return before + (after - before) * worse / (worse - better)
    return math.inf if not means or means[0][1] > 0 else 1.0
