"""From numbers to sentences: what is said, from where on, and in which order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runner.speed.diagnosis import STANDS_OUT, Diagnosis, diagnose, share_at, smallest_k
from runner.speed.run_numbers import Baseline, Collectives, RunNumbers, SamplesRead
from runner.train.tokens import Tokens


def step(**seconds: float) -> dict[str, float]:
    """A step in which nothing stands out but what is given."""
    usual = {"data": 0.01, "forward": 0.3, "backward": 0.6, "optimizer": 0.05, "communication": 0.03, "other": 0.01}
    return {**usual, **seconds}


#: Four workers on devices of their own, of which nothing is remarkable.
USUAL = RunNumbers(
    device="gpu4",
    rehearsed=False,
    world_size=4,
    local_workers=4,
    cores=None,
    jobs_at_once=1,
    unit="samples",
    samples_per_epoch=8551,
    micro_batch=32,
    replica_batch=32,
    k=1,
    largest_k=1000,
    length_sorted=True,
    few_lengths=False,
    pads_to=None,
    compiled=False,
    wall_s=200.0,
    training_s=150.0,
    first_step_s=20.0,
    evaluation_s=10.0,
    samples_per_s=400.0,
    step_s=step(),
    tokens=Tokens(90, uneven=10),
    reading=SamplesRead(8551, 8551, 8551),
)


def found(**changes: Any) -> list[Diagnosis]:
    return diagnose(dataclasses.replace(USUAL, **changes))


def test_nothing_stands_out() -> None:
    """It is said so, with the share of a step that was computation: 0.95 of 1."""
    assert found() == [Diagnosis("nothing", "95% of a step was computation; nothing stands out", 0.0)]


def test_nothing_stands_out_and_yet_it_is_slow() -> None:
    """400 samples/s on 4 workers where one had 200: half of what it could be, which nothing above explains."""
    base = Baseline("one", 200.0, 32, None)
    said = "95% of a step was computation; nothing stands out, and yet scaling efficiency is 50%"
    assert [one.sentence for one in found(baseline=base)] == [said]
    assert [one.kind for one in found(baseline=dataclasses.replace(base, samples_per_s=110.0))] == ["nothing"]


#: What is changed; kind, sentence and the share of the run's time that is lost by it.
CASES: list[tuple[dict[str, Any], str, str, float]] = [
    (
        {"reading": SamplesRead(8551, 4 * 8551, 8551)},
        "not dealt out",
        "each worker read all 8,551 samples: the data were not dealt out, so 4 workers did 4 times the work",
        0.75 * 0.75,
    ),
    (
        {"reading": SamplesRead(96, 384, 96), "unit": "windows"},
        "not dealt out",
        "each worker read all 96 windows of the steps that were done: the data were not dealt out, so 4 workers did 4 "
        "times the work",
        0.75 * 0.75,
    ),
    (
        {"reading": SamplesRead(1000, 1000, 750)},
        "repeats",
        "250 of 1,000 samples read were repeats within the epoch: ledger.json has the counts",
        0.25 * 0.75,
    ),
    (
        {"step_s": step(forward=0.1, backward=0.24, optimizer=0.02, data=0.02, communication=0.61, other=0.01)},
        "communication",
        "communication took 61% of a step; sync.k=8 would bring it to 16%",
        0.61 * 0.75,
    ),
    (
        {"rehearsed": True},
        "rehearsed",
        "this was a rehearsal of gpu4 on other hardware: its speed says nothing about gpu4",
        0.0,
    ),
    (
        {"step_s": step(data=0.49, forward=0.1, backward=0.3)},
        "data",
        "waiting for data took 50% of a step: a cheaper collate in the recipe, or a faster disk under cache_dir, would "
        "shorten it",
        0.5 * 0.75,
    ),
    (
        {"step_s": step(optimizer=0.65, forward=0.1, backward=0.2)},
        "optimizer",
        "the optimizer took 65% of a step: it is as long for the 32 samples of a worker's step as for more, so more "
        "workers do not shorten it, and a larger global batch makes it rarer",
        0.65 * 0.75,
    ),
    (
        {"step_s": step(other=0.41, forward=0.2, backward=0.3)},
        "overhead",
        "41% of a step was neither computation nor communication, but reducing and logging losses and the loop itself: "
        "larger micro-batches make it less",
        0.41 * 0.75,
    ),
    (
        {"first_step_s": 140.0, "training_s": 50.0},
        "start-up",
        "start-up was 70% of this run (140.0 of 200.0 s until the first step was done): it is paid once, so that more "
        "steps make it less",
        0.7,
    ),
    (
        {"first_step_s": 140.0, "training_s": 50.0, "compiled": True},
        "start-up",
        "start-up was 70% of this run (140.0 of 200.0 s until the first step was done, compile=true included): it is "
        "paid once, so that more steps make it less",
        0.7,
    ),
    (
        {"training_s": 50.0},
        "ending",
        "60% of this run came after training and evaluation (120.0 of 200.0 s: saving the model, closing the books, "
        "the tracking store): it is paid once, so that more steps make it less",
        0.6,
    ),
    (
        {"compile_s": 80.0},
        "compiling",
        "compiling took 40% of this run (80.0 s): each shape of a batch is a program of its own, and fewer "
        "device.length_buckets are fewer of them",
        0.4,
    ),
    (
        {"evaluation_s": 50.0},
        "evaluation",
        "evaluation took 25% of this run: a larger evaluation.every_steps or evaluation.micro_batch would shorten it",
        0.25,
    ),
    (
        {"cores": 2},
        "cores",
        "4 workers share 2 cores: each trains with one thread, and more of them cannot be faster here",
        0.75 * 0.9 * 0.75,
    ),
    (
        {"jobs_at_once": 2},
        "side by side",
        "2 jobs ran at once on this machine: the speed is not that of a run by itself",
        0.5 * 0.9 * 0.75,
    ),
    (
        {"baseline": Baseline("2026-11-21_10-00-00-1234", 100.0, 128, 0.9 / 32 / 2)},
        "micro-batch",
        "a sample took 2.0 times as long to compute as in 2026-11-21_10-00-00-1234: micro-batches of 32 instead of 128 "
        "samples fill the device less",
        0.5 * 0.9 * 0.75,
    ),
]


@pytest.mark.parametrize(("changes", "kind", "sentence", "lost"), CASES)
def test_each_cause_has_its_sentence(changes: dict[str, Any], kind: str, sentence: str, lost: float) -> None:
    """Alone, it is all that is said; what it costs is a share of the run's 200 seconds, of which 150 were steps."""
    (said,) = found(**changes)
    assert (said.kind, said.sentence) == (kind, sentence)
    assert said.lost_share == pytest.approx(lost)


@pytest.mark.parametrize(
    ("tokens", "changes", "mend"),
    [
        (
            Tokens(42, uneven=58),
            {},
            "smaller micro-batches (more accumulation.steps) would hold samples of like length",
        ),
        (
            Tokens(42, uneven=58),
            {"length_sorted": False},
            "batch.length_sorted=true and smaller micro-batches (more accumulation.steps) would hold samples of like "
            "length",
        ),
        (
            Tokens(42, uneven=8, beyond=50),
            {"pads_to": "max_length", "few_lengths": True},
            "recipe.padding=max_length makes every row as long, and recipe.padding=longest follows the batch",
        ),
        (
            Tokens(42, beyond=58),
            {"few_lengths": True},
            "more lengths in device.length_buckets would fit batches closer",
        ),
        (Tokens(42, beyond=58), {}, "the recipe's collate pads beyond the longest row of a batch"),
        (
            Tokens(42, uneven=20, fillers=38),
            {},
            "most of it fills up the short last batch of an epoch, and a smaller global batch has less of it",
        ),
    ],
)
def test_padding_comes_with_what_mends_its_largest_part(tokens: Tokens, changes: dict[str, Any], mend: str) -> None:
    """58% of the tokens each time, which cost as much of the forward and backward passes."""
    (said,) = found(tokens=tokens, **changes)
    assert said.sentence == f"padding was 58% of the tokens: {mend}"
    assert said.lost_share == pytest.approx(0.58 * 0.9 * 0.75)


@pytest.mark.parametrize(
    "changes",
    [
        {"reading": SamplesRead(8551, 8551 + 100, 8551)},  # a tail filled up so that all shares are as long
        {"reading": SamplesRead(8551, 8551, 8551), "world_size": 1, "local_workers": 1},
        {"step_s": step(communication=0.24), "evaluation_s": 39.0, "first_step_s": 59.0, "compile_s": 39.0},
        {"training_s": 111.0},  # 59 of 200 s are left
        {"step_s": step(communication=0.9), "world_size": 1},  # there is nobody to communicate with
        {"step_s": step(data=0.24)},
        {"tokens": Tokens(81, uneven=19)},
        {"cores": 5},
        {"cores": 1, "local_workers": 1},
        {"baseline": Baseline("x", 100.0, 128, 0.9 / 32 * 0.9)},
        {"baseline": Baseline("x", 100.0, 32, 0.9 / 32 / 2)},  # not by micro-batches: they are as large
    ],
)
def test_what_does_not_stand_out_is_not_said(changes: dict[str, Any]) -> None:
    """Just below each bound, and where a cause cannot be one, nothing is said of it."""
    assert [one.kind for one in found(**changes)] == ["nothing"]


def test_reading_the_same_share_is_not_reading_everything() -> None:
    """Two workers with the first's share: half of the data twice, half of them never."""
    (said,) = found(world_size=2, reading=SamplesRead(100, 100, 50))
    assert said.kind == "repeats"


def test_the_costliest_comes_first() -> None:
    """After a run on wrong data and a rehearsal, which leave no other number its meaning, the order is by lost time."""
    everything = found(
        reading=SamplesRead(8551, 4 * 8551, 8551),
        rehearsed=True,
        cores=2,
        first_step_s=70.0,
        training_s=80.0,
        evaluation_s=45.0,
        tokens=Tokens(1, uneven=1),
    )
    # Of 200 s: 70; 45; 3/4 of 90% of 80 = 54; half of 90% of 80 = 36.
    kinds = ["not dealt out", "rehearsed", "start-up", "cores", "evaluation", "padding"]
    assert [one.kind for one in everything] == kinds


def test_a_run_of_which_little_is_known() -> None:
    """A run that failed has at most its ledger; one whose steps are one program has no phases, and no nonsense."""
    names = ("training_s", "first_step_s", "evaluation_s", "samples_per_s", "step_s", "tokens")
    unknown = dict.fromkeys(names)
    assert found(**unknown, rehearsed=True, cores=1, reading=None) == []
    (said,) = found(**unknown, reading=SamplesRead(8551, 4 * 8551, 8551))
    assert said.kind == "not dealt out"
    (said,) = found(step_s=None)
    assert said.sentence == "a step is one program here, whose parts have no times; nothing stands out"


def test_the_share_of_communication_at_another_k() -> None:
    """0.61 s of communication to 0.39 s of all else: 0.61 / 8 to 0.39 is a share of 16%."""
    assert share_at(1, 0.61, 0.39) == pytest.approx(0.61)
    assert share_at(8, 0.61, 0.39) == pytest.approx(0.0763 / 0.4663, rel=1e-3)


@pytest.mark.parametrize("each", [0.01, 0.2, 0.26, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("largest", [1, 2, 7, 64, 1000])
def test_the_smallest_k_is_the_smallest(each: float, largest: int) -> None:
    """Against all powers of two, tried from below; none where even the largest is too small."""
    good = [k for k in (2**n for n in range(20)) if k <= largest and each / k < STANDS_OUT * (1 + each / k)]
    assert smallest_k(each, 1.0, largest) == (good[0] if good else None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "communication took 50% of a step; sync.k=4 would bring it to 20%"),
        ({"largest_k": None}, "communication took 50% of a step"),
        (
            {"largest_k": 3},
            "communication took 50% of a step; no sync.k up to this run's 3 steps would bring it below 20%",
        ),
        # 1 s every two steps is 2 s at a time.
        ({"k": 2}, "communication took 50% of a step; sync.k=8 would bring it to 20%"),
        # What travels for 2 s while the backward pass goes on for 1 s of them would take 2 s by itself; 1 GB in 2 s is
        # 4 Gbit/s, and a ring of 4 sends each byte one and a half times.
        (
            {"collectives": Collectives(10, 10 * 10**9, 20.0)},
            "communication took 50% of a step at this link speed (6 Gbit/s); sync.k=8 would bring it to 20%",
        ),
        # Between local phases there is no backward pass that hides something: what travelled while steps ran (64 s at a
        # time) is hidden at any k, and what was waited for every 16 steps is 16 s at a time.
        (
            {"k": 16, "collectives": Collectives(10, 80 * 10**9, 640.0)},
            "communication took 50% of a step at this link speed (1.5 Gbit/s); sync.k=64 would bring it to 20%",
        ),
    ],
)
def test_the_advice_on_k(changes: dict[str, Any], sentence: str) -> None:
    """1 s of communication to 1.01 s of all else, in each step."""
    spent = step(forward=0.3, backward=0.6, optimizer=0.09, data=0.01, other=0.01, communication=1.0)
    (said,) = found(step_s=spent, **changes)
    assert said.sentence == sentence


@pytest.mark.parametrize(
    ("workers", "gbit_per_s", "shown"), [(2, 0.04, "0.04"), (2, 0.9, "0.9"), (4, 1.5, "1.5"), (8, 350.0, "350")]
)
def test_the_speed_of_the_link(workers: int, gbit_per_s: float, shown: str) -> None:
    """What went over it is 2 (n − 1) / n times what a worker put in; to two digits, or whole from 10 on."""
    put_in = gbit_per_s * 1e9 / 8 / (2 * (workers - 1) / workers)
    run = dataclasses.replace(
        USUAL,
        world_size=workers,
        collectives=Collectives(10, round(10 * put_in), 10.0),
        step_s=step(communication=1.0),
    )
    assert run.link_gbit_per_s == pytest.approx(gbit_per_s)
    assert f"({shown} Gbit/s)" in diagnose(run)[0].sentence
    assert dataclasses.replace(run, world_size=1).link_gbit_per_s is None
