"""`accumulation=fit`: which micro-batch is chosen for how much memory, and what cannot be chosen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from runner import cli
from runner.cost.prediction import Measurement
from runner.data.cache import silent
from runner.errors import OutOfMemory, UserError
from runner.measure import fitting
from runner.measure.fitting import with_fitting_micro_batches
from runner.measure.store import save
from runner.plan.experiment import Experiment, prepare
from tests.configured import configured
from tests.replicas import TINY
from tests.runs import only_folder, read, run

SETTINGS = [override for override in TINY if not override.startswith("precision")]
#: Memory of a worker without a micro-batch, for each token, and of gradients. Rows have 5 to 12 tokens.
BASE, TOKEN, GRADIENTS = 1000.0, 10.0, 50.0
MEASURED = Measurement(
    *(
        "cpu",
        0.0,
        20,
        (1, 24),
        (5.0, 240.0),
        dict.fromkeys(("forward", "backward", "communication"), (0.0, 0.0, 1e-6, 0.0)),
        0.0,
    ),
    *((0.0, 1e-6, 0.0), (0.0, 0.0), 30, 1.0, 0.1, (BASE, TOKEN, 0.0), GRADIENTS, 0.0, 0.0),
)


def fit(experiment: Experiment, measures: bool = False) -> Experiment:
    return with_fitting_micro_batches(experiment, 0.0, silent, lambda text: None, measures)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """Of one worker with 24 samples, whose steps were measured."""
    found = prepare(configured([*SETTINGS, f"cache_dir={tmp_path}", "accumulation=fit", "device=cpu"]))
    save(found, MEASURED)
    return found


def with_memory(monkeypatch: pytest.MonkeyPatch, available: float) -> None:
    monkeypatch.setattr(fitting, "available_memory", lambda device, workers: available)


def test_the_largest_micro_batch_that_fits(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """More memory never gives smaller micro-batches; each fits in its share; the experiment stays the same."""
    lengths = range(5, 13)
    sizes = []
    for available in range(1300, 5000, 100):
        with_memory(monkeypatch, available)
        try:
            plan = fit(experiment).plan
        except UserError:
            assert not sizes
            continue
        several = GRADIENTS * (plan.accumulation_steps > 1)
        assert BASE + TOKEN * min(lengths) * plan.micro_batch + several <= 0.8 * available
        assert dataclasses.replace(plan, micro_batch=24, accumulation_steps=1) == experiment.plan
        sizes.append(plan.micro_batch)
    assert sizes == sorted(sizes)
    assert set(sizes) == {1, 2, 3, 4, 6, 8, 12, 24}


def test_what_does_not_fit(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, BASE)
    with pytest.raises(UserError, match=r"micro-batches of 1 sample .*accumulation\.memory_share=0\.8"):
        fit(experiment)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["equivalence=identical"], "accumulation=fit is not possible: shards"),
        (["batch=per_device", "batch.global_batch=null"], "batch=per_device"),
        (["device.workers=2"], "measure=true"),  # which nothing was measured for
    ],
)
def test_what_cannot_be_measured(overrides: list[str], why: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, f"cache_dir={tmp_path}", "accumulation=fit", "device=cpu", *overrides]
    with pytest.raises(UserError, match=why):
        fit(prepare(configured(settings)))


def test_a_size_that_did_not_fit_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, int]] = []

    def measure(experiment: Experiment, rows: tuple[int, int], *_: object) -> Measurement:
        measured.append(rows)
        if rows[1] > 8:
            raise OutOfMemory("no more")
        return dataclasses.replace(MEASURED, rows=rows)

    monkeypatch.setattr("runner.measure.predicted.measure", measure)
    with_memory(monkeypatch, 1e9)
    settings = [*SETTINGS, f"cache_dir={tmp_path}", "accumulation=fit", "device=cpu"]
    assert fit(prepare(configured(settings)), measures=True).plan.micro_batch == 8
    assert measured == [(6, 24), (3, 12), (2, 8)]


def test_a_run_measures_what_it_needs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["device=cpu2", "accumulation=fit", "batch.global_batch=80", f"cache_dir={here / 'cache'}"]
    assert cli.run_tool("plan", [*SETTINGS, *arguments]) == cli.EXIT_USER_ERROR
    assert "measure=true" in capsys.readouterr().err
    assert run(*arguments) == 0
    assert "micro-batches of 40 need" in capsys.readouterr().err.replace("\n", " ")
    (stored,) = (here / "cache" / "measurements").iterdir()
    assert json.loads(stored.read_text())["rows"] == [5, 40], "20 samples first, as nothing was known, then 40"
    assert read(only_folder(here), "plan.json")["accumulation_steps"] == 1
