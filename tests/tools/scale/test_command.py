"""`runner.scale`: a whole test, an interrupted one, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from runner.cli import run_tool
from runner.folder.lock import locked
from tests.replicas import TINY
from tests.runs import stored_runs
from tests.token_recipe import TOKENS

#: A tiny model that learns within a window of 384 samples whether tokens have odd numbers.
BASE = [
    *(one for one in TINY if not one.startswith(("tracking", "precision", "batch", "epochs", "recipe.data"))),
    *(*TOKENS, "recipe.data.train_samples=400", "recipe.data.eval_samples=60", "epochs=4", "optimizer.lr=1e-2"),
    *("scaling.reference_batch=8", "device=cpu2"),
]
SMALL = [*BASE, "--batches", "16,24", "--seeds", "3"]
#: Weights shrink or grow by weight decay alone.
DECAYING = [
    "schedule=constant",
    "optimizer=sgd",
    "optimizer.momentum=0",
    "optimizer.lr=0.0125",
    "optimizer.weight_decay=150",
]


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "branches.jsonl").read_text().splitlines()]


def test_a_test_from_start_to_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files, its run in MLflow, and what the same command does afterwards: more seeds, or nothing."""
    assert run_tool("scale", [*SMALL, "--rules", "sde,linear"]) == 0
    (folder,) = (here / "outputs" / "scale").iterdir()
    result = json.loads((folder / "result.json").read_text())
    first = lines(folder)
    asked = {(row["batch"], row["rule"], row["seed"]) for row in first if row["windows"] == 1}
    assert asked == {(8, "none", seed) for seed in (0, 1, 2)} | {
        (batch, rule, seed) for batch in (16, 24) for rule in ("sde", "linear") for seed in (0, 1, 2)
    }
    losses = {(row["batch"], row["rule"], row["seed"]): row["loss"] for row in first if row["windows"] == 1}
    cell = next(one for one in result["cells"] if (one["batch"], one["rule"]) == (24, "sde"))
    by_hand = sum(losses[24, "sde", seed] - losses[8, "none", seed] for seed in (0, 1, 2)) / 3
    assert cell["difference"]["value"] == pytest.approx(by_hand)
    assert result["answer"] in capsys.readouterr().out.replace("\n", " ")
    assert (folder / "scale.png").stat().st_size > 10_000
    (run,) = stored_runs(here)
    assert run.data.tags["scale.answer"] == result["answer"]
    assert run.info.status == "FINISHED"

    # A crash has cut off the last line, and lost two branches: only they are trained again, with the same losses.
    text = (folder / "branches.jsonl").read_text().splitlines(keepends=True)
    (folder / "branches.jsonl").write_text("".join(text[:-2]) + text[-2][:20])
    assert run_tool("scale", [*SMALL, "--rules", "sde,linear", "--margin", "0.2"]) == 0
    again = lines(folder)
    assert again[: len(text) - 2] == first[:-2]
    key = ("batch", "rule", "seed", "windows")
    assert sorted(([row[name] for name in key], row["loss"]) for row in first) == sorted(
        ([row[name] for name in key], row["loss"]) for row in again if [row[n] for n in key] in
        [[one[n] for n in key] for one in first]
    )  # fmt: skip
    first_run, second = stored_runs(here)
    new = json.loads((folder / "result.json").read_text())
    for one, answer in ((first_run, result["answer"]), (second, new["answer"])):  # another margin, another result
        assert one.data.tags["scale.answer"] == answer
        assert answer in one.data.tags["mlflow.note.content"]
    assert run_tool("scale", [*SMALL, "--rules", "sde,linear", "--margin", "0.2"]) == 0
    assert len(stored_runs(here)) == 2
    # The same branches by their metric, of which more is better.
    assert (
        run_tool("scale", [*SMALL, "--rules", "sde,linear", "--margin", "0.9", "--by", "metric", "tracking=none"]) == 0
    )
    by_metric = json.loads((folder / "result.json").read_text())
    reached = [float(str(row["metric"])) for row in lines(folder) if row["batch"] == 8]
    assert by_metric["by"] == "metric"
    assert by_metric["gained"]["value"] == pytest.approx(sum(reached) / 3 + by_metric["start"])
    with locked(folder):
        assert run_tool("scale", [*SMALL, "--rules", "sde,linear", "--margin", "0.2"]) == 2


def test_a_branch_that_diverges_is_a_result(here: Path) -> None:
    """Weight decay by a gradient shrinks weights below learning rate × decay = 2, and lets them grow above it."""
    test = ["tracking=none", "epochs=40", "--rules", "linear", "--batches", "32", "--start", "0", "--window", "0.025"]
    assert run_tool("scale", [*SMALL, *DECAYING, *test]) == 0
    (folder,) = (here / "outputs" / "scale").iterdir()
    assert {float(str(row["loss"])) for row in lines(folder) if row["batch"] == 32} == {math.inf}
    (cell,) = json.loads((folder / "result.json").read_text())["cells"]
    assert (cell["verdict"], cell["diverged"]) == ("worse", 3)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--batches", "many"], "--batches"),
        (["--batches", "4096"], "--batches"),
        (["--rules", "cube", "--batches", "16"], "--rules"),
        (["--rules", "sde", "optimizer=sgd", "--batches", "16"], "scaling"),
        (["--rules", "sde", "--batches", "80"], "scaling"),
        (["--seeds", "1"], "--seeds"),
        (["--window", "0.5", "--batches", "16"], "--window"),
        (["--margin", "nan"], "--margin"),
        (["sync.k=4"], "sync.k"),
        (["max_steps=60"], "max_steps"),
        (["sharding=fsdp"], "sharding"),
        (["equivalence=identical"], "equivalence.shards"),
        (["accumulation=fit"], "accumulation"),
    ],
)
def test_wrong_input(arguments: list[str], setting: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, exit code 2, and nothing trained."""
    assert run_tool("scale", [*BASE, *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: {setting}="), error
    assert not list(here.glob("outputs/scale/*"))


def test_a_folder_with_a_link(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "precious").write_text("kept")
    (here / "results").mkdir()
    (here / "results" / "branches.jsonl").symlink_to(here / "precious")
    assert run_tool("scale", [*SMALL, "--folder", "results"]) == 2
    assert "branches.jsonl is a link" in capsys.readouterr().err
    assert (here / "precious").read_text() == "kept"


def test_the_reference_batch_has_to_learn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("scale", [*SMALL, "optimizer.lr=1e-30", "--rules", "none", "tracking=none"]) == 2
    assert "--window=" in capsys.readouterr().err
