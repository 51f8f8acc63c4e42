"""The shipped loop against the simulator of n replicas: every policy, with every option that has to do with it."""

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

#: Half of the run is warm-up, over which windows by the learning rate have to have k steps, and 15 steps are made.
WARM = ["schedule.warmup_share=0.3", "epochs=3"]
LATE = Sync(schedule="post_local", synchronous_share=0.35)
QSR = Sync(schedule="qsr", k=2)
ALL = "weights_and_moments"
TWICE = ["accumulation.steps=2"]


@dataclass(frozen=True)
class Case:
    """`choice`: a file of the group `sync` that stands for the policy; `own`: settings of the workers only."""

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
    # periodic
    Case(2, Sync(k=2), [*SGD, *EXACT], TWICE),
    Case(2, Sync(k=3, average=ALL), [*SGD, *TOKENS]),
    Case(8, Sync(k=4, average=ALL), [*ADAMW, *TOKENS]),
    # accumulated
    Case(2, Sync("accumulated", k=3), [*SGD, *EXACT], TWICE),
    Case(3, Sync("accumulated", k=2), [*ADAMW, *TOKENS]),
    # outer
    Case(3, replace(DILOCO, k=2), SGD, (), "diloco"),
    Case(2, replace(SLOWMO, k=3), [*SGD, *WARM], TWICE, "slowmo"),
    Case(3, Sync("outer", k=4, outer_lr=0.9, outer_momentum=0.5, outer_nesterov=False), [*ADAMW, *TOKENS]),
    # gradients
    Case(2, Sync("gradients", k=2), [*SGD, *EXACT], TWICE),
    Case(3, Sync("gradients", k=3), [*ADAMW, *TOKENS]),
    # schedules
    Case(2, replace(LATE, k=3), [*SGD, *WARM]),
    Case(3, replace(LATE, policy="outer", k=2), [*ADAMW, *TOKENS]),
    Case(2, replace(LATE, policy="gradients", k=2, synchronous_share=None), SGD),
    Case(3, replace(QSR, qsr_alpha=0.045), [*SGD, *WARM]),
    Case(2, replace(QSR, policy="outer", outer_per_lr=True), [*SGD, *WARM]),
    Case(2, replace(QSR, k=1), [*SGD, *TOKENS]),
    Case(3, replace(QSR, k=1, average=ALL), [*ADAMW, *TOKENS]),
    # overlap
    Case(2, Sync(k=3, overlap=True, delay=1), SGD, TWICE),
    Case(3, Sync(k=4, overlap=True), [*SGD, *TOKENS, *EXACT]),
    Case(3, Sync("accumulated", k=2, overlap=True, delay=2), [*SGD, *TOKENS]),
    Case(2, Sync("outer", k=3, overlap=True, delay=3), ADAMW),
    Case(2, replace(QSR, policy="outer", outer_per_lr=True, overlap=True), [*SGD, *WARM]),
    # running statistics
    Case(2, replace(LATE, k=3), [*SGD, *BATCH_NORM]),
    Case(2, Sync(k=3, average=ALL), [*SGD, *BATCH_NORM]),
    Case(2, Sync("accumulated", k=3, overlap=True, delay=3), [*SGD, *BATCH_NORM]),
    Case(2, Sync("outer", k=3, overlap=True), [*SGD, *BATCH_NORM]),
    # compress
    Case(2, Sync(k=3, compress="bf16", average=ALL), ADAMW),
    Case(2, Sync(k=3, compress="fp16", overlap=True, delay=2), [*SGD, *TOKENS]),
    Case(2, replace(LATE, policy="accumulated", k=3, overlap=True, compress="bf16"), SGD),
    Case(2, Sync("outer", k=2, compress="fp16"), [*SGD, *TOKENS]),
    Case(2, Sync("gradients", k=3, compress="fp16"), SGD, TWICE),
    Case(2, Sync(k=1, compress="fp16"), SGD),
]

LONG = [
    *(
        Case(workers, Sync(policy, k=k), [*optimizer, *recipe, *dropout], [f"accumulation.steps={accumulation}"])
        for policy in ("periodic", "accumulated", "outer", "gradients")
        for workers, k, accumulation, optimizer, recipe, dropout in (
            (2, 4, 2, SGD, TOKENS, EXACT),
            (2, 2, 1, ADAMW, [], EXACT),
            (3, 3, 1, ADAMW, [], EXACT),
            (3, 4, 2, SGD, [], []),
            (8, 2, 3, SGD, TOKENS, EXACT),
            (8, 3, 1, ADAMW, [], []),
            (8, 4, 1, ADAMW, TOKENS, []),
        )
    ),
    *(
        Case(workers, Sync(policy, k=4, overlap=True, delay=delay, schedule=schedule), [*SGD, *WARM])
        for policy in ("periodic", "accumulated", "outer")
        for workers, delay in ((2, 1), (3, 2), (2, 3), (3, 4))
        for schedule in ("constant", "post_local", "qsr")
    ),
    *(
        Case(2, Sync(policy, k=k, compress=compress, schedule=schedule), [*optimizer, *WARM])
        for policy in ("periodic", "accumulated", "outer", "gradients")
        for compress in ("bf16", "fp16")
        for k, schedule, optimizer in ((2, "qsr", SGD), (3, "post_local", SGD), (4, "constant", ADAMW))
    ),
    *(Case(n, Sync(k=k, average=ALL), optimizer) for n in (3, 8) for k in (2, 3) for optimizer in (SGD, ADAMW)),
    Case(2, Sync("accumulated", k=1), PLAIN),
    Case(2, Sync("outer", k=1, outer_lr=1.0, outer_momentum=0.0, outer_nesterov=False), PLAIN),
    Case(2, Sync("gradients", k=1), [*SGD, *TOKENS]),
    Case(2, replace(QSR, policy="accumulated"), [*ADAMW, *WARM]),
    Case(2, Sync("accumulated", k=3, overlap=True, delay=1), SGD),
    Case(2, Sync("outer", k=4, overlap=True), SGD),
    Case(2, replace(QSR, overlap=True, delay=2), [*SGD, *WARM]),
    Case(2, Sync("gradients", k=2, compress="bf16"), [*SGD, *TOKENS]),
    Case(2, Sync(k=1, compress="bf16"), SGD),
    *(Case(2, Sync(policy, k=4), [*SGD, *BATCH_NORM]) for policy in ("periodic", "accumulated", "outer", "gradients")),
    Case(3, Sync(k=3), [*SGD, *TOKENS]),
    Case(2, replace(SLOWMO, k=1), [*SGD, *BATCH_NORM]),
    Case(8, Sync("accumulated", k=1), [*PLAIN, *TOKENS]),
]


@dataclass(frozen=True)
class Pair:
    """What the workers of a case came to, and what the simulator did."""

    case: Case
    results: list[dict[str, Any]]
    simulation: Simulation

    @property
    def last(self) -> int:
        return max(self.simulation.commons)

    def logged(self, name: str) -> dict[int, float]:
        """The values logged under a name, by step; the last of a step's."""
        return {step: metrics[name] for step, metrics in self.results[0]["logged"] if name in metrics}


@pytest.fixture(scope="module", params=[*CASES, *(pytest.param(c, marks=pytest.mark.long) for c in LONG)], ids=str)
def pair(request: pytest.FixtureRequest, pool: WorkerPool) -> Pair:
    case = request.param
    results = pool.run(case.workers, train, case.settings)
    return Pair(case, results, simulate(list(case.overrides), case.workers, case.sync))


def test_weights_are_those_of_simulated_replicas(pair: Pair) -> None:
    """Local steps and synchronisations follow the written rules; rounding is all that is left between the two."""
    expected = pair.simulation.commons[pair.last]
    for result in pair.results:
        assert largest_difference(result["weights"], expected) < 1e-12


def test_workers_end_alike(pair: Pair) -> None:
    """Not one bit differs between the workers at the end, and each sample was trained on once an epoch."""
    for result in pair.results:
        assert largest_difference(result["weights"], pair.results[0]["weights"]) == 0
        epochs = [(e["samples_seen"], e["missing"], e["duplicated"]) for e in result["ledger"]]
        assert epochs == [(100, 0, 0)] * pair.simulation.reference.plan.epochs


def test_common_weights_are_evaluated(pair: Pair) -> None:
    """What was evaluated during training and at the end are common weights, at the first chance after an epoch."""
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


def test_what_is_told_of_each_synchronisation(pair: Pair) -> None:
    """One record a synchronisation, at its step; drift and cosine are those of the replicas, bytes those sent."""
    records, sync, one = pair.simulation.records, pair.case.sync, pair.simulation
    told = {name: pair.logged(f"sync/{name}") for name in ("steps", "drift", "cosine", "bytes")}
    assert told["steps"] == {record.step: record.steps for record in records}
    size = WIRES[sync.compress][0].itemsize * one.weights_only * one.vectors
    # Squares travel, and are subtracted from each other; what rounds them grows with what cancels.
    rounding = {"none": 1e-6, "bf16": 2**-7, "fp16": 2**-10}[sync.compress]
    for record in records:
        near = min(rounding * record.drift_cancels, 1)
        # Where one worker alone has moved, the drift is the square root of rounding.
        assert told["drift"][record.step] == pytest.approx(record.drift, rel=near, abs=1e-9 if record.drift else 1e-5)
        if not math.isnan(record.cosine):
            near = rounding * record.cosine_cancels
            assert told["cosine"][record.step] == pytest.approx(record.cosine, abs=near)
        assert size < told["bytes"][record.step] < size + 2000
    stats, gradients = pair.results[0]["stats"], WIRES[sync.compress][0].itemsize * one.weights_only
    assert stats.synchronisations == one.synchronous + len(records)
    assert stats.bytes == one.synchronous * gradients + sum(told["bytes"].values())


@pytest.mark.parametrize(
    ("overrides", "sync"),
    [
        (PLAIN, Sync("accumulated", k=1)),
        (PLAIN, Sync("outer", k=1, outer_lr=1.0, outer_momentum=0.0, outer_nesterov=False)),
        (EVEN, Sync("accumulated", k=1)),
        ([*SGD, *TOKENS], Sync("gradients", k=1)),
    ],
)
def test_averages_after_every_step_are_synchronous_sgd(pool: WorkerPool, overrides: list[str], sync: Sync) -> None:
    """Brought together after each step, workers do what one does with all samples."""
    expected = simulate_synchronous(overrides)
    for result in pool.run(2, train, [*overrides, *sync.overrides()]):
        assert largest_difference(result["weights"], expected) < 1e-12


@one_thread()
def one_synchronisation(overrides: list[str], workers: int, sync: Sync) -> tuple[Tensor, list[Tensor]]:
    """The weights before it, and what each worker puts on the wire, after all steps of a run."""
    simulation = Simulation(overrides, workers, sync)
    reference, (dtype, factor) = simulation.reference, WIRES[sync.compress]
    for t, (ids, lr) in enumerate(zip(reference.global_batches(), reference.lrs(), strict=True)):
        simulation.local_step(t, reference.shares(ids, workers), lr)
    changes = [simulation.x(i) - simulation.a for i in range(workers)]
    sent = [(w * d * factor).to(dtype) for w, d in zip(simulation.weights(), changes, strict=True)]
    return simulation.a, sent


@pytest.mark.parametrize(("workers", "compress"), [(3, "bf16"), (3, "fp16"), (8, "bf16")])
def test_sums_of_more_than_two_rounded_numbers(pool: WorkerPool, workers: int, compress: str) -> None:
    """The order in which a library adds up is its own. Of three numbers, each weight has one of the three sums.

    Of eight, each of seven additions rounds a number no larger than all added up without their signs, by half a unit
    in its last place; that bound is met, and it is far below what the numbers themselves are.
    """
    overrides = [*SGD, *TOKENS, "max_steps=3", "schedule.warmup_share=0"]
    sync, (dtype, factor) = Sync(k=3, compress=compress), WIRES[compress]
    a, sent = one_synchronisation(overrides, workers, sync)
    state = pool.run(workers, train, [*overrides, *sync.overrides()])[0]["weights"]
    moved = Reference(overrides).flat(state) - a
    if workers == 3:
        one, two, three = sent
        sums = torch.stack([(one + two) + three, (one + three) + two, (two + three) + one]).double() / factor
        assert float((moved - sums).abs().min(0).values.max()) < 1e-15
    else:
        exact = torch.stack(sent).double().sum(0) / factor
        whole = torch.stack(sent).double().abs().sum(0) / factor
        bound = 7 * torch.finfo(dtype).eps / 2 * whole + 1e-15
        assert bool(((moved - exact).abs() <= bound).all())
        assert float((moved - exact).norm() / exact.norm()) < 7 * torch.finfo(dtype).eps
