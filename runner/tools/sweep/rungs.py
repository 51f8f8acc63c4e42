"""Which setups of a race may still win, judged by evaluations in the middle of training."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

#: Shares of training after which setups are ranked, each twice the one before. From the second on some may stop.
RUNGS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
#: The chance to stop the setup that would have won, over all rungs together.
ERROR = 0.05


def share_trained(setups: int, movement: float) -> float:
    """The share of a grid's training that a race takes: the mean of simulated ones.

    `movement`: between the first rungs, as a share of the spread of the setups; its variance then halves each time.
    """
    generator = np.random.default_rng(0)
    steps = generator.standard_normal((50, setups, len(RUNGS))) * movement * 0.5 ** (np.arange(len(RUNGS)) / 2)
    total = 0.0
    gain = np.arange(len(RUNGS))  # of all: it changes no rank
    for curves in generator.standard_normal((50, setups, 1)) + steps.cumsum(axis=2) + gain:
        racing, before = curves, 0.0
        for rung, share in enumerate(RUNGS):
            total, before = total + len(racing) * (share - before), share
            racing = racing[going_on(racing[:, : rung + 1])]
        total += len(racing) * (1 - before)
    return total / (50 * setups)


def going_on(values: np.ndarray, constant: float = -np.inf) -> np.ndarray:
    """The setups that go on after the last of these rungs, bool [setups]. `values`: as for `last_rank`.

    `constant`: of the best answer that is the same for every row. A setup that is no better has not begun to learn, so
    that its rank says nothing; it stops at the last rung only.
    """
    may_begin = (values[:, -1] <= constant) & (values.shape[1] < len(RUNGS))
    return np.asarray((ranks(values[:, -1]) <= last_rank(values)) | may_begin)


def ranks(values: np.ndarray) -> np.ndarray:
    """How many setups are better, [setups]. `values`: the larger the better; equal ones share the best rank."""
    return np.asarray(rankdata(-values, method="min")) - 1


def last_rank(values: np.ndarray) -> float:
    """The last rank from which a setup may still win; infinite where no movement is known.

    It is not at the first rung, nor if nothing was trained since the last, as with few steps or synchronisations.

    Ranks, since learning curves flatten: a distance in the metric shrinks towards the end, an order does not. Until the
    end ranks are taken to move as much as in the last doubling of training, in root mean square over the setups in the
    better half before or after it: movements whose variance halves from doubling to doubling add up to that. The limit
    is this step times the normal quantile of a share of `ERROR` (Bonferroni over the rungs that stop setups). This is
    stochastic curtailment (Lan, Simon & Halperin 1982) with ranks, as in the race of Birattari et al. (2002).
    `values`: of the metric, the larger the better, [setups, rungs so far].
    """
    if values.shape[1] < 2 or np.array_equal(values[:, -2], values[:, -1]):
        return float("inf")
    before, now = ranks(values[:, -2]), ranks(values[:, -1])
    better_half = np.minimum(before, now) < len(values) / 2
    step = max(0.5, float(np.sqrt(np.mean((now - before)[better_half] ** 2))))  # half a rank: they are integers
    return float(-ndtri(ERROR / (len(RUNGS) - 1)) * step)
