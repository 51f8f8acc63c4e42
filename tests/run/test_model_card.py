"""The model card that a run leaves with its model: what it claims, what it does not say, and that its example runs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from bitsandbytes.nn import Linear4bit
from huggingface_hub import ModelCard

from runner.folder.evaluation_rows import read_rows, write_rows
from runner.folder.record import RunRecord
from runner.run.model_card import FILE_NAME, model_card
from tests.offline import offline_recipes
from tests.runs import read, run

SHORT = ["device=cpu", "tracking=none", "max_steps=2"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has trained an adapter for a model in a folder on files of this machine, with other steps than plain
    training."""
    root = tmp_path_factory.mktemp("adapter")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        cola = ["recipe=cola", *offline_recipes(root)["cola"]]
        lora = ["adapter=lora", "adapter.rank=2", "precision=bf16", "device=cpu2", "sync.k=2"]
        assert run("hydra.run.dir=run", *lora, base=[*cola, *SHORT[1:]]) == 0
    return root / "run"


@pytest.fixture
def copied(adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "copied"))


def changed(folder: Path, **recipe: Any) -> str:
    """The card of the run if these had been settings of its recipe."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["recipe"] = {**settings["recipe"], **recipe}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return card_of(folder)


def card_of(folder: Path) -> str:
    record = RunRecord.read(folder)
    assert record is not None
    return model_card(folder, record)


def rows(card: str) -> dict[str, list[str]]:
    """The rows of all tables, by their first cell."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in card.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in cells}


def test_says_what_the_run_has_recorded(adapter: Path) -> None:
    card = (adapter / "model" / FILE_NAME).read_text()
    summary, plan, ledger = (read(adapter, f"{name}.json") for name in ("summary", "plan", "ledger"))
    found = rows(card)
    assert found["accuracy"][0] == f"{summary['eval']['accuracy']:.4g}"
    assert found["accuracy"][2] == f"{summary['data']['constant']['accuracy']:.4g}"
    assert found["global batch"][0].startswith(f"{plan['global_batch']} (micro-batch {plan['micro_batch']} ×")
    assert found["learning rate"] == [f"{plan['lr']:.4g}"]
    assert found["adapter"][0].startswith("lora, rank 2")
    assert found["precision"][:3] == ["bf16", "fp32", "different rounding"]  # of the table of what differs
    assert f"**{summary['certificate']}**" in card
    assert ledger["digest"] in card
    assert f"torch {torch.__version__}" in card


def test_metadata_is_that_of_the_hub(adapter: Path) -> None:
    """The Hub's own classes read it back, and the metrics are those of the run."""
    data = ModelCard.load(adapter / "model" / FILE_NAME).data
    assert (data.library_name, data.pipeline_tag) == ("peft", "text-classification")
    assert data.tags == ["finetune-runner", "cola", "lora"]
    assert {one.metric_name: one.metric_value for one in data.eval_results} == read(adapter, "summary.json")["eval"]
    assert data.metrics == ["accuracy", "matthews_correlation"]


def test_claims_nothing_about_what_is_only_here(adapter: Path) -> None:
    """Files and folders are named without their path, and are no data sets or models on the Hub; nor is a licence made
    up."""
    card = (adapter / "model" / FILE_NAME).read_text()
    data = ModelCard(card).data
    assert (data.base_model, data.datasets, data.license) == (None, None, None)
    assert {(one.dataset_type, one.dataset_name) for one in data.eval_results} == {("local", "acceptable.tsv")}
    assert "`model` (a local folder), fine-tuned on `acceptable.tsv`" in card
    assert str(adapter.parent) not in card
    assert not re.search(r"(^|[\s`\"'(:])(/|~)\w", card, re.MULTILINE)


def test_names_of_the_hub(copied: Path) -> None:
    hub = {"hub_name": "nyu-mll/glue", "hub_config": "cola", "hub_train": "train", "hub_eval": "validation"}
    data = {"train": None, "eval": None, "hub_revision": "abc", **hub}
    card = changed(copied, model={"name": "google-bert/bert-base-uncased"}, data=data)
    found = ModelCard(card).data
    assert (found.base_model, found.datasets) == ("google-bert/bert-base-uncased", ["nyu-mll/glue"])
    results = {
        (one.dataset_type, one.dataset_config, one.dataset_split, one.dataset_revision) for one in found.eval_results
    }
    assert results == {("nyu-mll/glue", "cola", "validation", "abc")}
    held_out = ModelCard(changed(copied, data={**data, "eval_share": 0.1})).data
    assert held_out.eval_results[0].dataset_split == "train"
    own_files = ModelCard(changed(copied, data={**data, "eval": "mine/dev.tsv"})).data
    assert (own_files.datasets, own_files.eval_results[0].dataset_type) == (["nyu-mll/glue"], "local")
    random = ModelCard(changed(copied, model={"name": "google-bert/bert-base-uncased", "init": "random"})).data
    assert random.base_model is None


def test_a_folder_hides_a_name_of_the_hub(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for `from_pretrained`."""
    monkeypatch.chdir(copied)
    assert ModelCard(changed(copied, model={"name": "owner/mine"})).data.base_model == "owner/mine"
    (copied / "owner" / "mine").mkdir(parents=True)
    assert ModelCard(card_of(copied)).data.base_model is None


def test_intervals_of_the_evaluation_rows(copied: Path) -> None:
    """1.96 standard errors; none where the rows do not vary, or have no finite values."""
    right = np.array([100.0, 0.0] * 8)
    write_rows(copied, {"accuracy": right, "matthews": np.full(16, np.nan), "loss": np.ones(16)})
    assert read_rows(copied)["accuracy"].shape == (16,)
    found = rows(card_of(copied))
    assert found["accuracy"][1] == f"± {1.96 * right.std(ddof=1) / 4:.2g}" == "± 25"
    assert (found["matthews"][1], found["loss"][1]) == ("", "")


def test_example_loads_the_model(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the model's folder, as it is printed; with the adapter."""
    monkeypatch.chdir(adapter / "model")
    (example,) = re.findall(r"```python\n(.*?)```", (adapter / "model" / FILE_NAME).read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert any(".lora_A." in name for name, _ in names["model"].named_parameters())
    batch = names["tokenizer"]("The book fell.", return_tensors="pt")
    assert names["model"](**batch).logits.shape == (1, 2)


def test_an_adapter_next_to_weights_in_4_bits(here: Path) -> None:
    """The example loads it as it was trained and evaluated; merged, it is a model like others."""
    cola = ["recipe=cola", *offline_recipes(here)["cola"], "adapter=qlora", "adapter.rank=2", *SHORT]
    for name, more in (("run", []), ("merged", ["adapter.merge=true"])):
        assert run(f"hydra.run.dir={name}", *more, base=cola) == 0
    card, merged = (Path(name, "model", FILE_NAME).read_text() for name in ("run", "merged"))
    assert (ModelCard(card).data.tags[2:], ModelCard(merged).data.tags[2:]) == (["lora", "qlora"], [])
    assert "BitsAndBytesConfig" not in merged
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    os.chdir("run/model")
    exec(example, names)
    frozen = [one for one, layer in names["model"].named_modules() if isinstance(layer, Linear4bit)]
    assert frozen
    assert not any("classifier" in one for one in frozen)


def test_untrusted_text_stays_in_its_cell(copied: Path) -> None:
    """Credentials, control characters and what would end a row of a table or the metadata."""
    data = {"train": "https://me:word@host/a.csv?token=abc", "eval": "x|y\n---\n\x1b[2J.csv"}
    card = changed(copied, data=data)
    assert "word" not in card
    assert "abc" not in card
    assert "\x1b" not in card
    assert ModelCard(card).data.pipeline_tag == "text-classification"
    assert all(line.count(" | ") == 1 for line in card.splitlines() if line.startswith("| data |"))


@pytest.mark.parametrize(
    ("recipe", "loads"),
    [
        ("linear", "load_file"),
        ("causal_lm", "AutoModelForCausalLM"),
        ("squad", "AutoModelForQuestionAnswering"),
        ("image_classification", "AutoImageProcessor, AutoModelForImageClassification"),
    ],
)
def test_example_fits_the_recipe(recipe: str, loads: str, here: Path) -> None:
    """Also of a model that is none of transformers, and its example runs."""
    given = offline_recipes(here).get(recipe, [])
    assert run("hydra.run.dir=run", base=[f"recipe={recipe}", *given, *SHORT]) == 0
    card = (here / "run" / "model" / FILE_NAME).read_text()
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert loads in example
    os.chdir(here / "run" / "model")
    exec(example, {})


def test_a_run_that_fails_has_no_card(here: Path) -> None:
    assert run("hydra.run.dir=run", "optimizer=sgd", "optimizer.lr=1e30") == 1
    assert not list(here.glob("run/**/README.md"))
