"""`recipe=squad` through the command line: the same numbers on one worker and on two, and plans without anything."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from runner import cli
from tests.recipes import zoo
from tests.tiny_models import save_bert


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("zoo")
    train, evaluation = zoo.write(folder)
    model = save_bert(folder / "bert", zoo.texts())
    return [
        "recipe=squad",
        f"recipe.data.train={train}",
        f"recipe.data.eval={evaluation}",
        f"recipe.model.name={model}",
        "recipe.max_length=48",
        "recipe.doc_stride=8",
        "recipe.max_query_length=12",
        "optimizer.lr=5e-3",
        "tracking=none",
    ]


def trained(root: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The summary and the ledger of a run in a folder of its own."""
    monkeypatch.chdir(root)
    assert cli.main([*overrides, f"hydra.run.dir={root / 'run'}"], time.time()) == 0
    summary, ledger = (json.loads((root / "run" / name).read_text()) for name in ("summary.json", "ledger.json"))
    return summary, ledger


def test_two_workers_find_what_one_finds(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In fp64 under `equivalence=exact`: the same EM and F1 to the last digit, over every question once."""
    found = []
    for device in ("cpu", "cpu2"):
        root = tmp_path / device
        root.mkdir()
        summary, ledger = trained(
            root, monkeypatch, *overrides, f"device={device}", "precision=fp64", "equivalence=exact"
        )
        found.append((summary["eval"], ledger["digest"], summary["certificate"]))
        assert summary["data"]["eval_groups"] == 12
        assert summary["data"]["eval_samples"] > 12
        assert (ledger["unit"], ledger["groups"]) == ("windows", "questions")
        assert [epoch["groups_seen"] for epoch in ledger["epochs"]] == [40, 40]
        assert [epoch["samples_seen"] for epoch in ledger["epochs"]] == [summary["data"]["train_samples"]] * 2
    assert found[0] == found[1]
    assert found[0][0]["f1"] > 0
    said = capsys.readouterr().out
    assert "over 12 questions" in said
    assert "of 40 questions" in said  # the plan


def test_plan_without_data_weights_or_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan.train_samples` states the size of a training set that is not on this machine."""
    published = ["recipe=squad", "recipe.model.name=bert-large-uncased", "batch=per_device", "device=gpu4", "sync.k=16"]
    assert cli.plan_main(published) == 2
    assert "plan.train_samples=N" in capsys.readouterr().err
    assert cli.plan_main([*published, "plan.train_samples=88524"]) == 0
    said = capsys.readouterr().out
    rows = {line.strip().split("  ")[0]: line for line in said.splitlines()}
    assert "177,048" in rows["samples"]
    assert "5,534" in rows["optimizer steps"]
    assert " 32 " in rows["global batch"]  # 8 a worker
    assert "there is no training data" in said
    assert "recipe.model.name=bert-large-uncased" in said


def test_a_run_without_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be planned cannot be trained: exit 2, and no folder. `plan.train_samples` is for `runner.plan` only."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipe=squad", "recipe.model.name=bert-large-uncased", "device=cpu"], time.time()) == 2
    assert cli.main(["device=cpu", "plan.train_samples=5"], time.time()) == 2
    assert not (tmp_path / "outputs").exists()
