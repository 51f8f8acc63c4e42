"""Which runs a run's speed is set beside, and what `summary.json` says of it. tests/end_to_end has the real runs."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from runner.folder.record import Compilations, Diagnosis, RunRecord, RunResult, SpeedFigures, Tokens
from runner.plan.experiment import Experiment, prepare
from runner.speed.figures import (
    efficiency_words,
    find_baseline,
    speed_key,
    speed_metrics,
    utilization_words,
    with_speed,
)
from runner.speed.run_numbers import Baseline, Restarts
from tests.configured import configured
from tests.replicas import TINY

SETTINGS = [override for override in TINY if not override.startswith("precision")]
MACHINE = "2 cores of a processor"


@functools.cache
def experiment(*overrides: str) -> Experiment:
    return prepare(configured([*SETTINGS, *overrides]))


def key(*overrides: str) -> str:
    return speed_key(experiment(*overrides).setup, MACHINE)


@pytest.mark.parametrize("overrides", [["optimizer.lr=0.1"], ["sync.k=4"], ["device.rehearse=never"]])
def test_what_has_no_part_in_speed(overrides: list[str]) -> None:
    """One worker's run serves as the baseline of runs that differ from it in these."""
    assert key(*overrides) == key()


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision=bf16"],
        ["recipe.data.seed=1"],
        ["batch.global_batch=48"],
        ["batch.length_sorted=false"],
        ["accumulation.steps=2", "batch.global_batch=48"],
        ["device.length_buckets=[16]"],
        ["device.workers=2", "batch.global_batch=48"],
    ],
)
def test_what_has_a_part_in_speed(overrides: list[str]) -> None:
    """Two runs that differ in one of these need not be equally fast; nor runs on two machines."""
    assert key(*overrides) != key()
    assert speed_key(experiment().setup, "8 cores of another") != key()


@pytest.mark.parametrize(
    ("device", "others"),
    [
        (["device=cpu4"], []),
        (["device=cpu4"], ["sync.k=2", "seed=1"]),
        (["device=cpu2"], ["precision=bf16"]),
        (["device=cpu2", "accumulation.steps=3"], ["gradient_checkpointing=true"]),
        (["device=cpu2"], ["batch=per_device", "batch.global_batch=null", "batch.micro_batch=6"]),
    ],
)
def test_setup_one_is_the_baseline(device: list[str], others: list[str]) -> None:
    """What the report advises, `setup=one` in place of workers and accumulation, makes the run that is looked for."""
    assert speed_key(experiment(*device, *others).one_worker, MACHINE) == key("device=cpu4", *others, "setup=one")


def left(root: Path, name: str, age: int = 0, **changes: Any) -> None:
    """A run's folder that is so many seconds old."""
    summary = {
        "status": "FINISHED",
        "rehearsed": False,
        "jobs_at_once": 1,
        "samples_per_s": 100.0,
        "speed_key": "right",
        "speed": {"compute_s_per_sample": 0.01},
    }
    (root / name).mkdir()
    (root / name / "summary.json").write_text(json.dumps({**summary, **changes}))
    os.utime(root / name, ns=(10**18 - age * 10**9, 10**18 - age * 10**9))


def test_the_newest_run_of_one_worker_is_the_baseline(tmp_path: Path) -> None:
    """Of those beside a run, and never the run itself."""
    left(tmp_path, "old", age=3, samples_per_s=50.0)
    left(tmp_path, "new", age=2)
    left(tmp_path, "own", age=1)
    assert find_baseline(tmp_path / "own", "right", 24, seed=0) == Baseline("new", 100.0, 24, 0.01)
    assert find_baseline(tmp_path / "own", "wrong", 24, seed=0) is None


def test_the_baseline_has_the_same_seed(tmp_path: Path) -> None:
    """A sweep of seeds on one worker and then on two: the run of another seed is newer."""
    for seed in (0, 1, 2):
        left(tmp_path, f"one{seed}", age=9 - seed, seed=seed)
    (tmp_path / "own").mkdir()
    found = [find_baseline(tmp_path / "own", "right", 24, seed) for seed in (0, 1, 2, 3)]
    assert [one.folder for one in found if one is not None] == ["one0", "one1", "one2", "one2"]


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "FAILED"},
        {"rehearsed": True},
        {"jobs_at_once": 2},
        {"samples_per_s": None},
        {"speed_key": "another"},
        {"speed_key": None},
    ],
)
def test_runs_that_are_no_baseline(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A run that failed, was rehearsed, had company, was too short or is another is passed over for an older one."""
    left(tmp_path, "good", age=9)
    left(tmp_path, "bad", **changes)
    (tmp_path / "own").mkdir()
    found = find_baseline(tmp_path / "own", "right", 24, seed=0)
    assert found is not None
    assert found.folder == "good"


def test_what_cannot_be_read_is_no_baseline(tmp_path: Path) -> None:
    """Other tools' files, summaries of earlier versions and half a file end no run that has been trained."""
    (tmp_path / "own").mkdir()
    for name, text in (("half", '{"status": "FIN'), ("list", "[1]"), ("early", '{"status": "FINISHED"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(text)
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "summary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder" / "summary.json").mkdir(parents=True)
    assert find_baseline(tmp_path / "own", "right", 24, seed=0) is None


STEP = {"data": 0.0, "forward": 0.02, "backward": 0.04, "optimizer": 0.01, "communication": 0.02, "other": 0.01}
RESULT = RunResult(
    optimizer_steps=10,
    samples_seen=200,
    samples_per_s=150.0,
    first_step_s=1.0,
    synchronisations=10,
    comm_bytes=10**9,
    comm_s=4.0,
    step_s=STEP,
    evaluation_s=0.5,
    tokens=Tokens(of_samples=900, uneven=100),
    flops_per_sample=2e9,
    peak_flops_per_s=1e12,
    peak_memory_bytes=(3 * 2**30, 2**30),
    machine=MACHINE,
)


def measured(
    experiment: Experiment, folder: Path, *, wall_s: float = 10.0, restarts: Restarts | None = None, **changes: Any
) -> RunRecord:
    """The record of a run of this experiment, with its figures."""
    usual: dict[str, Any] = {"result": RESULT, "jobs_at_once": 1, "wall_s": wall_s}
    return with_speed(RunRecord("FINISHED", **{**usual, **changes}), experiment, folder, restarts or Restarts())


def test_figures_of_a_run_with_a_baseline(tmp_path: Path) -> None:
    """Each number by hand: 150 samples/s on two workers where one has 100 is an efficiency of 75%."""
    of = experiment("device=cpu2")
    left(tmp_path, "one", speed_key=key())
    (tmp_path / "own").mkdir()
    epoch = {"expected": 100, "samples_seen": 100, "unique": 100}
    (tmp_path / "own" / "ledger.json").write_text(json.dumps({"epochs": [{**epoch, "expected": 24}, epoch]}))
    found = measured(of, tmp_path / "own")
    speed = found.speed
    assert speed.scaling_efficiency == pytest.approx(0.75)
    assert (speed.baseline, speed.baseline_samples_per_s) == ("one", 100.0)
    assert (speed.samples_per_epoch, speed.samples_per_epoch_planned) == (100, 100)
    assert speed.step_share == pytest.approx({phase: 10 * seconds for phase, seconds in STEP.items()})
    assert speed.compute_s_per_sample == pytest.approx(0.06 / 12)
    assert speed.link_gbit_per_s == pytest.approx(2.0)
    assert (speed.start_up_share, speed.evaluation_share) == (0.1, 0.05)
    assert speed.ending_share == pytest.approx(1 - 0.1 - 0.05 - (200 - 24) / 150 / 10)  # the first step is start-up
    assert (speed.padding_share, speed.compile_share) == (0.1, None)
    assert speed.tokens_per_s == pytest.approx(900 / 200 * 150)
    assert speed.model_flops_utilization == pytest.approx(2e9 * 150 / 1e12)
    assert found.speed_key == speed_key(of.setup, MACHINE)
    assert found.diagnosis == found.diagnoses[0].sentence
    compiling = dataclasses.replace(RESULT, compilations=Compilations(2, 3.0, 0))
    shares = measured(of, tmp_path / "own", result=compiling).speed
    assert shares.compile_share == 0.3
    assert shares.ending_share == pytest.approx(speed.ending_share - 0.3)
    # Two of the steps, of 24 samples, were trained by workers that were lost, and kept by a checkpoint.
    continued = of.resumed_after((), 2)
    restarted = measured(continued, tmp_path / "own", wall_s=13.0, restarts=Restarts((), 3.0, 1.0)).speed
    assert restarted.restart_share == pytest.approx(1 / 13)
    assert restarted.ending_share is not None
    assert 13 * restarted.ending_share == pytest.approx(10 * speed.ending_share + 48 / 150)
    names = ("scaling_efficiency", "padding_share", "model_flops_utilization", "tokens_per_s")
    metrics = {f"speed/{name}": getattr(speed, name) for name in names}
    assert speed_metrics(found) == {**metrics, "speed/peak_memory_bytes": 3 * 2**30}
    for words in ("675 tokens/s", "30% of 1 TFLOP/s", "3 GiB"):
        assert words in str(utilization_words(found))


def test_efficiency_in_words(tmp_path: Path) -> None:
    """With a baseline, without one, for one worker by itself, and where no comparison would mean anything."""
    own = tmp_path / "own"
    own.mkdir()
    two, one = experiment("device=cpu2"), experiment()
    lonely = measured(two, own)
    advice = efficiency_words(lonely, 2, own)
    assert advice is not None
    assert "setup=one" in advice
    assert efficiency_words(dataclasses.replace(lonely, rehearsed=True), 2, own) is None
    assert efficiency_words(dataclasses.replace(lonely, jobs_at_once=2), 2, own) is None
    itself = measured(one, own)
    assert (itself.speed.scaling_efficiency, itself.speed.baseline) == (1.0, "own")
    assert efficiency_words(itself, 1, own) is None
    left(tmp_path, "one", speed_key=key())
    beside = measured(two, own)
    said = "scaling efficiency 75%: 1.5 times as fast as one worker (100/s) in one"
    assert efficiency_words(beside, 2, own) == said
    left(tmp_path, "hindered", age=-1, speed_key=key(), samples_per_s=60.0)
    said = efficiency_words(measured(two, own), 2, own)
    assert said is not None
    assert said.startswith("scaling efficiency unreliable (measured 125%): 2.5 times as fast")
    assert " in hindered; " in said
    (tmp_path / "hindered" / "job.json").touch()
    with_setup = {"setup": "cpu · s0", **json.loads((tmp_path / "hindered" / "summary.json").read_text())}
    (tmp_path / "hindered" / "summary.json").write_text(json.dumps(with_setup))
    said = efficiency_words(measured(two, own), 2, own)
    assert " in job hindered (cpu · s0); " in str(said)
    many = dataclasses.replace(beside, speed=dataclasses.replace(beside.speed, scaling_efficiency=0.5))
    assert "50%: 512 times as fast as one worker" in str(efficiency_words(many, 1024, own))
    busy = dataclasses.replace(beside, diagnoses=(Diagnosis("busy", "", 0.2),))
    doubted = str(efficiency_words(busy, 2, own))
    assert "unreliable (measured 75%)" in doubted
    assert "this run shared the machine" in doubted
    busy.write(tmp_path / "one")
    assert "the baseline shared the machine" in str(efficiency_words(beside, 2, own))


@pytest.mark.parametrize(("overrides", "jobs"), [(["device=tpu8"], 1), (["device=cpu2"], 2)])
def test_no_efficiency_of_a_rehearsal_or_of_simultaneous_jobs(tmp_path: Path, overrides: list[str], jobs: int) -> None:
    """Though there is a run of one worker."""
    left(tmp_path, "one", speed_key=speed_key(experiment(*overrides).one_worker, MACHINE))
    (tmp_path / "own").mkdir()
    speed = measured(experiment(*overrides), tmp_path / "own", jobs_at_once=jobs).speed
    assert (speed.scaling_efficiency, speed.baseline) == (None, None)


def test_run_interrupted_before_its_first_step(tmp_path: Path) -> None:
    """Nothing is known, so there is no diagnosis."""
    found = measured(experiment("device=cpu2"), tmp_path, result=RunResult())
    assert (found.diagnosis, found.diagnoses, found.speed_key) == (None, (), None)
    assert found.speed == SpeedFigures()
    assert speed_metrics(found) == {}
    assert utilization_words(found) is None
    assert efficiency_words(found, 2, tmp_path) is None


def test_too_short_to_time(tmp_path: Path) -> None:
    """One step has a start-up and no speed, and so no efficiency."""
    result = dataclasses.replace(RESULT, samples_per_s=None, step_s=None, first_step_s=9.0)
    found = measured(experiment("device=cpu2"), tmp_path, result=result)
    assert [one.kind for one in found.diagnoses] == ["start-up"]
    assert found.speed.scaling_efficiency is None
