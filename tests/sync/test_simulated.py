"""The training loop compared with the simulation of n replicas: every policy, with the options that affect it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import WorkerPool
from tests.replicas import train
from tests.sync.batch_norm_recipe import BATCH_NORM
from tests.sync.reference import ADAMW, EXACT, SGD, Reference, largest_difference, one_thread, simulate_synchronous
from tests.sync.simulation import DILOCO, SLOWMO, WIRES, Simulation, Sync, simulate
from tests.sync.test_simulation import EVEN, PLAIN
from tests.token_recipe import TOKENS

#: 15 steps with a long warm-up, in which phases by the quadratic rule have k steps.
WARM = ["schedule.warmup_share=0.3", "epochs=3"]
LATE = Sync(schedule="post_local", synchronous_share=0.35)
QSR = Sync(schedule="qsr", k=2)
TWICE = ["accumulation.steps=2"]


@dataclass(frozen=True)
class Case:
    """`choice`: the file of the group `sync` to use for the policy; `own`: settings of the workers only."""

    workers: int
    sync: Sync
    overrides: Sequence[str] = (*SGD,)
    own: Sequence[str] = ()
    choice: str | None = None

    def __str__(self) -> str:
        options = [setting.removeprefix("sync.") for setting in self.sync.overrides(self.choice)[1:]]
        kind = "adamw" if "optimizer=adamw" in self.overrides else "sgd"
        marks = {
            "tokens": TOKENS[0],
            "statistics": BATCH_NORM[0],
            "exact": EXACT[0],
            "twice": TWICE[0],
            "epochs": WARM[-1],
        }
        known = [name for name, setting in marks.items() if setting in (*self.overrides, *self.own)]
        return "-".join([self.choice or self.sync.policy, *options, f"{self.workers}", kind, *known])

    @property
    def settings(self) -> list[str]:
        return [*self.overrides, *self.own, *self.sync.overrides(self.choice)]


CASES = [
    # policies
    Case(2, Sync(k=2), [*SGD, *EXACT], TWICE),
    Case(8, Sync(k=4), [*ADAMW, *TOKENS]),
    Case(3, Sync("accumulated", k=2), [*ADAMW, *TOKENS]),
    Case(3, replace(DILOCO, k=2), SGD, (), "diloco"),
    Case(2, replace(SLOWMO, k=3), [*SGD, *WARM], TWICE, "slowmo"),
    Case(3, Sync("gradients", k=3), [*ADAMW, *TOKENS]),
    # schedules
    Case(2, replace(LATE, k=3), [*SGD, *BATCH_NORM]),
    Case(3, replace(LATE, policy="outer", k=2), [*ADAMW, *TOKENS]),
    Case(3, replace(QSR, qsr_alpha=0.045), [*SGD, *WARM]),
    Case(3, replace(QSR, k=1), [*ADAMW, *TOKENS]),
    # fragments
    Case(3, Sync(k=4, fragments=3), [*ADAMW, *TOKENS]),
    Case(2, replace(DILOCO, k=4, fragments=4, overlap=True, delay=1, compress="bf16"), [*SGD, *BATCH_NORM]),
    Case(3, Sync("accumulated", k=3, fragments=2, overlap=True), [*SGD, *TOKENS]),
    # overlap
    Case(3, Sync(k=4, overlap=True), [*SGD, *TOKENS, *EXACT]),
    Case(2, Sync("accumulated", k=3, overlap=True, delay=3), [*SGD, *BATCH_NORM]),
    Case(2, replace(QSR, policy="outer", outer_per_lr=True, overlap=True), [*SGD, *WARM]),
    # compression
    Case(2, Sync(k=3, compress="bf16"), ADAMW),
    Case(2, Sync(k=3, compress="fp16", overlap=True, delay=2), [*SGD, *TOKENS]),
    Case(2, Sync("gradients", k=3, compress="fp16"), SGD, TWICE),
    Case(3, Sync(k=2, compress="int8"), [*SGD, *TOKENS]),
    Case(2, replace(DILOCO, k=4, compress="int8", fragments=3, overlap=True, delay=2), [*ADAMW, *BATCH_NORM]),
    Case(2, Sync(k=1, compress="fp16"), SGD),
]

LONG = [
    Case(8, Sync("outer", k=4, outer_lr=0.9, outer_momentum=0.5, outer_nesterov=False), [*ADAMW, *TOKENS]),
    Case(8, Sync("gradients", k=2), [*SGD, *TOKENS, *EXACT], ["accumulation.steps=3"]),
    Case(8, Sync("accumulated", k=3), [*SGD, *EXACT], ["accumulation.steps=3"]),
    Case(2, replace(LATE, policy="gradients", k=2, synchronous_share=None), SGD),
    Case(3, replace(LATE, policy="accumulated", k=4, overlap=True, delay=4), [*SGD, *WARM]),
    Case(2, replace(QSR, overlap=True, delay=2), [*SGD, *WARM]),
    Case(2, Sync("outer", k=3, overlap=True, delay=1, compress="bf16"), [*ADAMW, *BATCH_NORM]),
    Case(2, Sync("outer", k=2, compress="fp16"), [*SGD, *TOKENS]),
    Case(2, Sync(k=1, compress="bf16"), SGD),
    Case(3, replace(SLOWMO, k=4, fragments=2, overlap=True, delay=4), [*SGD, *TOKENS, *EXACT]),
    Case(3, replace(LATE, k=3, fragments=3, overlap=True, delay=1), [*SGD, *WARM]),
    Case(2, replace(QSR, k=2, fragments=2, compress="fp16"), [*SGD, *WARM]),
]


@dataclass(frozen=True)
class Pair:
    """Results of the workers, and of the simulation."""

    case: Case
    results: list[dict[str, Any]]
    simulation: Simulation

    @property
    def last(self) -> int:
        return max(self.simulation.commons)

    def logged(self, name: str) -> dict[int, float]:
        """The values logged under this name, by step; the last one if a step has several."""
        return {step: metrics[name] for step, metrics in self.results[0]["logged"] if name in metrics}

    @property
    def synchronisations(self) -> list[tuple[int, dict[str, float]]]:
        """Step and metrics of each, in the order in which they ended."""
        return [(step, metrics) for step, metrics in self.results[0]["logged"] if "sync/steps" in metrics]


@pytest.fixture(scope="module", params=[*CASES, *(pytest.param(c, marks=pytest.mark.long) for c in LONG)], ids=str)
def pair(request: pytest.FixtureRequest, pool: WorkerPool) -> Pair:
    case = request.param
    results = pool.run(case.workers, train, case.settings)
    return Pair(case, results, simulate(list(case.overrides), case.workers, case.sync))


def test_weights_are_those_of_simulated_replicas(pair: Pair) -> None:
    """Local steps and synchronisations follow the rules in docs/sync.md, up to rounding."""
    expected = pair.simulation.commons[pair.last]
    for result in pair.results:
        assert largest_difference(result["weights"], expected) < 1e-12


def test_replicas_are_equal_at_the_end(pair: Pair) -> None:
    """No bit differs between workers, and each sample was trained on once per epoch."""
    for result in pair.results:
        assert largest_difference(result["weights"], pair.results[0]["weights"]) == 0
        epochs = [(e["samples_seen"], e["missing"], e["duplicated"]) for e in result["ledger"]]
        assert epochs == [(100, 0, 0)] * pair.simulation.reference.plan.epochs


def test_common_weights_are_evaluated(pair: Pair) -> None:
    """Evaluations use common weights, at the first synchronisation after an epoch and at the end."""
    reference = pair.simulation.reference
    for result in pair.results:
        assert result["metrics"] == pytest.approx(reference.evaluate(pair.simulation.commons[pair.last]))
    losses = pair.logged("eval/loss")
    if pair.case.sync.policy == "gradients" and pair.case.sync.k > 1:
        return  # its replicas are common at the end only
    commons = pair.simulation.commons
    assert set(losses) == {min(s for s in commons if s >= end) for end in range(5, pair.last + 1, 5)}
    for step, loss in losses.items():
        assert loss == pytest.approx(reference.evaluate(commons[step])["loss"], rel=1e-9)


def test_metrics_of_each_synchronisation(pair: Pair) -> None:
    """Drift and cosine of the simulated replicas, bytes of the vector and of telemetry, at the right step."""
    records, sync, one, logged = pair.simulation.records, pair.case.sync, pair.simulation, pair.synchronisations
    assert [(step, metrics["sync/steps"]) for step, metrics in logged] == [(one.step, one.steps) for one in records]
    # Drift and cosine are differences of squares: relative rounding errors grow by the cancellation.
    rounding = {"none": 1e-6, "bf16": 2**-7, "fp16": 2**-10}.get(sync.compress)
    for record, (_, metrics) in zip(records, logged, strict=True):
        size = WIRES[sync.compress][0].itemsize * record.numbers * one.vectors
        assert size < metrics["sync/bytes"] < size + 1000
        if rounding is None:
            continue  # what int8 takes from one update and adds to the next is as large as these models' updates
        near = min(rounding * record.drift_cancels, 1)
        # Where one worker alone has moved, the drift is the square root of rounding.
        assert metrics["sync/drift"] == pytest.approx(record.drift, rel=near, abs=1e-9 if record.drift else 1e-5)
        if not math.isnan(record.cosine):
            near = rounding * record.cosine_cancels
            assert metrics["sync/cosine"] == pytest.approx(record.cosine, abs=near)
    stats, gradients = pair.results[0]["stats"], WIRES[sync.compress][0].itemsize * one.weights_only
    assert stats.synchronisations == one.synchronous + len(records)
    assert stats.bytes == one.synchronous * gradients + sum(metrics["sync/bytes"] for _, metrics in logged)


@pytest.mark.parametrize(
    ("overrides", "sync"),
    [
        (PLAIN, Sync("outer", k=1, outer_lr=1.0, outer_momentum=0.0, outer_nesterov=False)),
        (EVEN, Sync("accumulated", k=1)),
        ([*SGD, *TOKENS], Sync("gradients", k=1)),
    ],
)
def test_averages_after_every_step_are_synchronous_sgd(pool: WorkerPool, overrides: list[str], sync: Sync) -> None:
    """Workers that synchronise after each step train like one worker with all samples."""
    expected = simulate_synchronous(overrides)
    for result in pool.run(2, train, [*overrides, *sync.overrides()]):
        assert largest_difference(result["weights"], expected) < 1e-12


@one_thread()
def one_synchronisation(overrides: list[str], workers: int, sync: Sync) -> tuple[Tensor, list[Tensor]]:
    """The initial weights, and what each worker sends after all steps of a run."""
    simulation = Simulation(overrides, workers, sync)
    reference, (dtype, factor) = simulation.reference, WIRES[sync.compress]
    for t, (ids, lr) in enumerate(zip(reference.global_batches(), reference.lrs(), strict=True)):
        simulation.local_step(t, reference.shares(ids, workers), lr)
    changes = [simulation.x(i) - simulation.a for i in range(workers)]
    sent = [(w * d * factor).to(dtype) for w, d in zip(simulation.weights(), changes, strict=True)]
    return simulation.a, sent


def test_sums_of_three_rounded_numbers(pool: WorkerPool) -> None:
    """The order of the sum is up to the library: each weight is one of the three possible sums."""
    overrides = [*SGD, *TOKENS, "max_steps=3", "schedule.warmup_share=0"]
    sync, factor = Sync(k=3, compress="fp16"), WIRES["fp16"][1]
    a, (one, two, three) = one_synchronisation(overrides, 3, sync)
    state = pool.run(3, train, [*overrides, *sync.overrides()])[0]["weights"]
    moved = Reference(overrides).flat(state) - a
    sums = torch.stack([(one + two) + three, (one + three) + two, (two + three) + one]).double() / factor
    assert float((moved - sums).abs().min(0).values.max()) < 1e-15
