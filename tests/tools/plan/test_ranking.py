"""`runner.plan -m`: every setup of a grid by predicted time, and nothing trained."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from runner import cli
from runner.cost.prediction import predict
from runner.cost.sample_cost import Beyond, SampleCost
from runner.errors import UserError
from runner.plan.experiment import Experiment, prepare
from runner.tools.plan.ranking import RankedSetup, _require_tested, _same
from runner.tools.plan.report import best_words
from runner.tools.plan.worth import worth_of, worth_words, write_plot
from tests.configured import configured
from tests.cost.test_prediction import MEASURED, work
from tests.replicas import TINY
from tests.runs import QUICK, read

SETTINGS = [override for override in TINY if not override.startswith("precision")]


def experiment(*overrides: str) -> Experiment:
    return prepare(configured([*SETTINGS, *overrides]))


def ranked(name: str, tokens: float, *overrides: str, available: float | None = None) -> RankedSetup:
    prediction = predict(work([[tokens]]), MEASURED, np.zeros((1, 3)), 0, 1, available)
    return RankedSetup(name, experiment(*overrides), prediction, None)


def test_the_fastest_at_each_level() -> None:
    """Setups are sorted by time; one that does not fit is nobody's best."""
    setups = [
        ranked("a", 100, "device=cpu2", "sync.k=2", available=1e6),
        ranked("b", 200, "device=cpu2", "sync.k=3"),
        ranked("c", 300, "device=cpu2"),
        ranked("d", 400),
        RankedSetup("e", experiment("device=cpu8"), None, "not measured"),
    ]
    words = best_words(setups)
    comparable, equivalent = "comparable to one fp32 worker: cpu2 · k=3 (", "equivalent to one fp32 worker: cpu2 ("
    assert words.index(comparable) < words.index(equivalent)
    assert "k=2" not in words
    assert best_words(setups[4:]) == "No setup has a prediction."


def test_worth_of_more_workers(tmp_path: Path) -> None:
    """The time to the same loss: setups whose batch needs more samples, or was not tested, come later."""
    cost = SampleCost("acceptability", "…", "…", 48, 48, "sde", Beyond(96, "sde"), 1.5, (1.2, 2.0))
    sizes = {1: 24, 2: 48, 4: 96}

    def of(workers: int, tokens: float, *overrides: str) -> RankedSetup:
        size = f"batch.global_batch={sizes[workers]}"
        one = ranked("", tokens, f"device.workers={workers}", size, *overrides)
        return dataclasses.replace(one, sample_cost=cost)

    one, two, four, local = of(1, 4e6), of(2, 2e6), of(4, 1e6), of(2, 1e6, "sync.k=2")
    assert [setup.more_samples.value if setup.more_samples else None for setup in (one, two, four, local)] == [
        *(1.0, 1.0, 1.5),
        None,
    ]
    assert four.same_loss is not None
    assert four.prediction is not None
    found = four.prediction
    assert four.same_loss.value == pytest.approx(found.total.value + 0.5 * found.training.value)
    assert four.row()["same_loss_s_high"] > four.row()["same_loss_s"]
    words = worth_words(worth_of([local, four, two, one]), predicted=False)
    assert words.index("2 workers ") < words.index("4 workers ")
    assert "not worth it" not in words.partition("4 workers")[0]
    assert words.endswith("not worth it.")
    assert worth_words(worth_of([local, two]), predicted=False) == ""
    write_plot(worth_of([four, two, one]), False, str(tmp_path / "worth.png"))
    assert (tmp_path / "worth.png").read_bytes().startswith(b"\x89PNG")
    other_rule = of(4, 1e6, "scaling=sqrt")
    assert other_rule.more_samples is None
    with pytest.raises(UserError, match=r"^plan\.scale="):
        _require_tested([one], cost, "outputs/scale/other")


def test_k_is_no_setup_of_one_worker() -> None:
    assert _same(experiment("sync.k=2"), experiment())
    assert not _same(experiment("sync.k=2", "precision=bf16"), experiment())
    assert not _same(experiment("device=cpu2", "sync.k=2"), experiment("device=cpu2"))


def test_a_grid_is_ranked(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured comes first; the rest says what to do. One line per setup, in the CSV file as well."""
    monkeypatch.setenv("COLUMNS", "160")
    cache = f"cache_dir={tmp_path / 'cache'}"
    assert cli.run_tool("plan", [*QUICK, cache, "device=cpu", "measure=true"]) == 0
    capsys.readouterr()
    grid = ["-m", *QUICK, cache, "device=cpu2,cpu", "sync.k=1,2", "plan.csv=ranking.csv", "plan.price_per_hour=2"]
    assert cli.run_tool("plan", grid) == 0
    printed = capsys.readouterr().out
    assert "Fastest setup that is equivalent to one fp32 worker: cpu (" in printed
    assert "cpu2, cpu2 · k=2: not measured: add measure=true" in printed
    with Path("ranking.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["setup"] for row in rows] == ["cpu", "cpu2", "cpu2 · k=2"]
    assert [row["certificate"] for row in rows] == ["equivalent", "equivalent", "comparable"]
    assert float(rows[0]["price"]) == pytest.approx(float(rows[0]["total_s"]) / 1800)
    assert (rows[0]["fits"], rows[1]["fits"]) == ("True", "")
    assert [path.name for path in here.iterdir()] == ["cache", "ranking.csv"] or not (here / "outputs").exists()


def test_a_sweep_says_when_it_will_end(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If all of its jobs were measured."""
    cache = f"cache_dir={tmp_path / 'cache'}"
    assert cli.run_tool("plan", [*QUICK, cache, "device=cpu", "measure=true"]) == 0
    assert cli.main(["-m", *QUICK, cache, "device=cpu", "seed=0,1", "hydra.sweep.dir=swept"], 0.0) == 0
    assert "predicted: " in capsys.readouterr().out
    assert read(Path("swept/0"), "summary.json")["prediction"] is not None
    assert cli.main(["-m", *QUICK, cache, "device=cpu,cpu2", "hydra.sweep.dir=other"], 0.0) == 0
    assert "predicted: " not in capsys.readouterr().out


def test_devices_that_are_not_here(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each device and link is a setup; a model that was measured here needs no size."""
    monkeypatch.setenv("COLUMNS", "160")
    grid = ["-m", *QUICK, "device=gpu4", "hardware=t4,a100", "link=pcie3,ethernet1", "plan.parameters=1e8"]
    assert cli.run_tool("plan", [*grid, "plan.csv=ranking.csv"]) == 0
    with Path("ranking.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    times = {row["overrides"]: float(row["training_s"]) for row in rows}
    assert times["hardware=a100 link=pcie3"] == min(times.values())
    assert times["hardware=t4 link=ethernet1"] == max(times.values())
    large = ["-m", *QUICK, "device=gpu", "hardware=rtx3090", "plan.parameters=7e9", "adapter=none,lora,qlora"]
    assert cli.run_tool("plan", [*large, "plan.csv=large.csv"]) == 0
    with Path("large.csv").open() as file:
        fits = {row["overrides"]: row["fits"] for row in csv.DictReader(file)}
    assert fits == {"adapter=none": "False", "adapter=lora": "False", "adapter=qlora": "True"}
    capsys.readouterr()
    single = [*QUICK, f"cache_dir={here / 'cache'}", "device=gpu4", "hardware=a100", "link=ethernet1"]
    assert cli.run_tool("plan", single) == cli.EXIT_USER_ERROR
    assert "plan.parameters=N" in capsys.readouterr().err
    assert cli.run_tool("plan", [*single, "measure=true"]) == 0
    assert cli.run_tool("plan", single) == 0
    printed = capsys.readouterr().out
    assert printed.count("answer: on 4 × A100") == 2
    assert "From published figures" in printed
