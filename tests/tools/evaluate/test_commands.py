"""`runner.evaluate` and `runner.predict` on models that runs of this process have saved."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pandas
import pytest
import torch
import yaml
from peft import PeftConfig, PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    GPT2Config,
    pipeline,
)

from benchmarks.peers.trained_tokenizer import special_ids, trained_tokenizer
from recipes.synthetic.grammar import generate
from runner import cli
from runner.tools.compare.from_folders import read_folders
from runner.tools.compare.from_mlflow import ExistingStore
from runner.track.mlflow_model import save_mlflow_model
from tests.recipes import labelled, pictures, writers, zoo
from tests.runs import TRACKED, read, run, store, stored_runs
from tests.tiny_models import save_bert

WORDS = ("good", "bad", "film", "book", "very", "this", "is")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `run`, the tiny recipe trained by two workers and logged to MLflow."""
    folder = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(folder)
    assert run("hydra.run.dir=outputs/run", "device=cpu2", base=TRACKED) == 0
    yield folder
    os.chdir(before)


@pytest.fixture
def trained(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder, in the current folder's `outputs`, without evaluations."""
    monkeypatch.chdir(root)
    shutil.rmtree(root / "outputs" / "run" / "evaluations", ignore_errors=True)
    return Path("outputs/run")


def result_of(folder: Path) -> Path:
    """The only evaluation of a run."""
    (found,) = (folder / "evaluations").iterdir()
    return found


def evaluated(folder: Path, *overrides: str) -> dict[str, Any]:
    """Evaluate the run in `folder`; the content of `summary.json`, from a new folder each time."""
    shutil.rmtree(folder / "evaluations", ignore_errors=True)
    assert cli.run_tool("evaluate", [str(folder), *overrides]) == 0
    summary: dict[str, Any] = read(result_of(folder), "summary.json")
    return summary


def test_same_metrics_and_a_child_in_mlflow(trained: Path) -> None:
    """The same bits on the same workers; and nothing that compares runs takes the result for a run."""
    summary = evaluated(trained)
    own = read(trained, "summary.json")
    assert summary["eval"] == own["eval"]
    assert (summary["world_size"], summary["data"]["eval_samples"]) == (2, 30)
    folder = result_of(trained)
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "metrics.jsonl", "summary.json", "tracking.json"}

    client = store(Path.cwd())
    child, parent = (client.get_run(one["mlflow_run_id"]) for one in (summary, own))
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert child.info.experiment_id == parent.info.experiment_id
    assert (child.info.status, child.info.run_name) == ("FINISHED", f"evaluation of {parent.info.run_name}")
    assert child.data.metrics == {f"eval/{name}": pytest.approx(value) for name, value in own["eval"].items()}
    assert child.data.tags["evaluation.model"] == "outputs/run/model"
    assert {"evaluation.weights", "evaluation.data"} <= set(child.data.tags)
    assert child.inputs.dataset_inputs[0].tags[0].value == "evaluation"

    assert not read_folders([("one", folder)], None).runs
    existing = ExistingStore(None)
    assert [one.info.run_id for one in existing.run_or_children(parent.info.run_id)] == [parent.info.run_id]
    assert [one.source for one in existing.read(stored_runs(Path.cwd()), None).runs] == [parent.info.run_id]


def test_other_workers_and_batches_by_run_id(trained: Path) -> None:
    own = read(trained, "summary.json")
    overrides = ["device=cpu", "evaluation.micro_batch=7", "tracking=none"]
    assert cli.run_tool("evaluate", [own["mlflow_run_id"], *overrides]) == 0
    summary = read(result_of(trained), "summary.json")
    assert (summary["world_size"], summary["micro_batch"], summary["mlflow_run_id"]) == (1, 7, None)
    assert summary["eval"] == pytest.approx(own["eval"], rel=1e-5)


def test_a_sharded_model(trained: Path) -> None:
    """Three workers, of which one has fewer micro-batches than the others."""
    overrides = ["device=cpu", "device.workers=3", "sharding=fsdp", "evaluation.micro_batch=2", "tracking=none"]
    assert cli.run_tool("evaluate", [str(trained), *overrides]) == 0
    assert read(result_of(trained), "summary.json")["eval"] == pytest.approx(read(trained, "summary.json")["eval"])


def test_settings_that_its_training_could_not_have(trained: Path) -> None:
    """A run with identical bits is evaluated with a sharded model."""
    config = trained / "config.yaml"
    before = config.read_text()
    config.write_text(
        yaml.safe_dump({**yaml.safe_load(before), "equivalence": {"mode": "identical", "shards": 8, "threads": 1}})
    )
    try:
        summary = evaluated(trained, "sharding=fsdp", "tracking=none")
        assert summary["eval"] == pytest.approx(read(trained, "summary.json")["eval"])
    finally:
        config.write_text(before)


def test_predictions_in_the_order_of_samples(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "predictions.csv"
    arguments = [str(trained), "-o", str(output), "tracking=none"]
    assert cli.run_tool("predict", arguments) == 0
    table = pandas.read_csv(output)
    names = ("unacceptable", "acceptable")
    assert list(table.columns) == ["text", "predicted", "label", *(f"probability_{name}" for name in names)]
    assert table.text.tolist() == [row.sentence for row in generate(0, 100, 30)[1]]
    assert table.label.tolist() == [names[row.label] for row in generate(0, 100, 30)[1]]
    assert table.filter(like="probability").sum(axis=1).to_numpy() == pytest.approx(1, abs=1e-5)
    assert max(len(str(value).strip("0.")) for value in table.probability_acceptable) <= 6
    accuracy = 100 * (table.predicted == table.label).mean()
    assert accuracy == pytest.approx(read(result_of(trained), "summary.json")["eval"]["accuracy"])

    content = output.read_bytes()
    assert cli.run_tool("predict", arguments) == cli.EXIT_USER_ERROR
    assert output.read_bytes() == content
    assert cli.run_tool("predict", [*arguments, "--overwrite"]) == 0
    assert output.read_bytes() == content


def test_predictions_for_another_file_without_labels(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("the nun sleeps\n\nsleeps the nun the\n")
    output = tmp_path / "mine.jsonl"
    given = ["-o", str(output), f"--input={tmp_path / 'mine.txt'}", "device=cpu", "tracking=none"]
    assert cli.run_tool("predict", [str(trained), *given]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["text"] for row in rows] == ["the nun sleeps", "sleeps the nun the"]
    assert all("predicted" in row and "label" not in row for row in rows)
    assert read(result_of(trained), "summary.json")["eval"] == {}


def test_texts_that_a_spreadsheet_takes_for_formulas(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are as they were in the file, which is said; or quoted, if that is asked for."""
    (tmp_path / "mine.txt").write_text("=HYPERLINK(1)\nthe nun sleeps\n")
    output = tmp_path / "mine.csv"
    given = [str(trained), "-o", str(output), f"--input={tmp_path / 'mine.txt'}", "device=cpu", "tracking=none"]
    assert cli.run_tool("predict", given) == 0
    assert "--spreadsheet" in capsys.readouterr().out
    assert pandas.read_csv(output).text.tolist() == ["=HYPERLINK(1)", "the nun sleeps"]
    assert cli.run_tool("predict", [*given, "--overwrite", "--spreadsheet"]) == 0
    assert "--spreadsheet" not in capsys.readouterr().out
    assert pandas.read_csv(output).text.tolist() == ["'=HYPERLINK(1)", "the nun sleeps"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["outputs"], "outputs"),
        (["outputs/run/summary.json"], "summary.json"),
        (["outputs/none"], "outputs/none"),
        (["0" * 32], "0" * 32),
        (["outputs/run/model"], "recipe="),
        (["outputs/none", "recipe=cola", "recipe.data.eval=x.tsv"], "outputs/none"),
        (["outputs/run", "optimizer.lr=1"], "optimizer.lr"),
        (["outputs/run", "device=cpu,cpu2"], "device=cpu,cpu2"),
        (["outputs/run", "recipe.model.heads=3"], "recipe.model.heads"),
        (["outputs/run", "recipe=cola", "recipe.max_length=16"], "recipe.data"),
        ([], "MODEL_OR_RUN"),
    ],
)
def test_wrong_input(trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    before = sorted(Path("outputs").rglob("*"))
    assert cli.run_tool("evaluate", arguments) == cli.EXIT_USER_ERROR
    message = capsys.readouterr().err
    assert named in message
    assert len(message.splitlines()) == 1
    assert sorted(Path("outputs").rglob("*")) == before


@pytest.mark.parametrize("output", ["x.txt", "no/such/folder/x.csv", "outputs"])
def test_wrong_output(trained: Path, capsys: pytest.CaptureFixture[str], output: str) -> None:
    assert cli.run_tool("predict", [str(trained), "-o", output]) == cli.EXIT_USER_ERROR
    assert "--output" in capsys.readouterr().err


def test_under_torchrun(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run_tool("evaluate", [str(trained)]) == cli.EXIT_USER_ERROR
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "named"), [("KILLED", "KILLED"), (None, "KILLED"), ("FINISHED", "model/")])
def test_run_without_a_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str | None, named: str
) -> None:
    """Killed by a signal, killed without a chance to write its summary, or cleaned up."""
    shutil.copy(trained / "config.yaml", tmp_path)
    if status is not None:
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
    assert cli.run_tool("evaluate", [str(tmp_path)]) == cli.EXIT_USER_ERROR
    assert named in capsys.readouterr().err


def test_code_named_by_a_folder_is_not_trusted(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    config = tmp_path / "copy" / "config.yaml"
    text = config.read_text().replace("recipes.tasks.classification.SequenceClassification", "os.system")
    config.write_text(text.replace("trusted_packages: []", "trusted_packages: [os]"))
    assert "trusted_packages: [os]" in config.read_text()
    assert cli.run_tool("evaluate", [str(tmp_path / "copy")]) == cli.EXIT_USER_ERROR
    assert "trusted_packages" in capsys.readouterr().err


def test_a_folder_decides_neither_where_the_result_is_sent_nor_what_is_written(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    card, settings = read(folder, "tracking.json"), yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "tracking.json").write_text(json.dumps({**card, "store": "http://127.0.0.1:9"}))
    assert cli.run_tool("evaluate", [str(folder)]) == cli.EXIT_USER_ERROR
    assert "tracking.uri=http://127.0.0.1:9" in capsys.readouterr().err

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    settings["tracking"]["experiment"] = "${oc.env:AWS_SECRET_ACCESS_KEY}"
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "cache_dir": str(tmp_path / "cache")}))
    (folder / "model" / "link").symlink_to(tmp_path)
    assert cli.run_tool("evaluate", [str(folder), "tracking=none"]) == cli.EXIT_USER_ERROR
    assert "model/link is a link" in capsys.readouterr().err
    (folder / "model" / "link").unlink()
    evaluated(folder, f"tracking.uri=sqlite:///{tmp_path / 'named.db'}")
    assert not (tmp_path / "cache").exists()
    assert read(result_of(folder), "tracking.json")["experiment"] == "${oc.env:AWS_SECRET_ACCESS_KEY}"


def test_model_of_another_task(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, evaluation = zoo.write(tmp_path)
    overrides = ["recipe.max_length=32", "recipe.max_query_length=8", "recipe.doc_stride=4", "tracking=none"]
    arguments = ["recipe=squad", f"recipe.data.eval={evaluation}", "device=cpu", *overrides]
    assert cli.run_tool("evaluate", [str(trained), *arguments]) == cli.EXIT_USER_ERROR
    assert "qa_outputs" in capsys.readouterr().err
    assert not (trained / "evaluations").exists()


def test_labels_are_those_of_the_saved_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without its run, and a file with one of the three classes: numbers made from the file would be others."""
    classes = ("awful", "fine", "great")
    rows = [f"this film is very {word} {number}\t{classes[number % 3]}" for number, word in enumerate(WORDS * 6)]
    for name, chosen in (("train", rows), ("dev", rows[:9]), ("test", rows[2::3]), ("other", ["this\tdull"])):
        (here / f"{name}.tsv").write_text("\n".join(["text\tlabel", *chosen]) + "\n")
    model = save_bert(here / "bert", rows)
    common = ["recipe=text_classification", "tracking=none", "device=cpu"]
    data = ["recipe.data.train=train.tsv", "recipe.data.eval=dev.tsv", f"recipe.model.name={model}", "max_steps=2"]
    assert run("hydra.run.dir=run", *data, base=common) == 0

    arguments = ["run/model", *common, "recipe.data.eval=test.tsv", "hydra.run.dir=result", "-o", "test.csv"]
    assert cli.run_tool("predict", arguments) == 0
    table = pandas.read_csv("test.csv")
    assert set(table.label) == {"great"}
    assert [name for name in table.columns if name.startswith("prob")] == [f"probability_{name}" for name in classes]
    assert set(table.predicted) <= set(classes)
    capsys.readouterr()
    assert cli.run_tool("evaluate", ["run", "recipe.data.eval=other.tsv"]) == cli.EXIT_USER_ERROR
    assert "dull" in capsys.readouterr().err


def three_classes(here: Path) -> tuple[list[str], Path, list[str]]:
    """Rows of three classes in `train.tsv` and `dev.tsv`, a model for them, and the overrides that name the files."""
    rows = [
        f"this film is very {word} {number}\t{('awful', 'fine', 'great')[number % 3]}"
        for number, word in enumerate(WORDS * 6)
    ]
    for name, chosen in (("train", rows), ("dev", rows[:9])):
        (here / f"{name}.tsv").write_text("\n".join(["text\tlabel", *chosen]) + "\n")
    base = save_bert(here / "bert", rows)
    common = ["recipe=text_classification", "recipe.data.train=train.tsv", "recipe.data.eval=dev.tsv", "tracking=none"]
    return rows, base, common


def test_an_adapter(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is evaluated, loads with PEFT, transformers and MLflow, can be trained further, and saved merged if wanted."""
    rows, base, common = three_classes(here)
    lora = ["adapter=lora", "adapter.rank=2", "optimizer.lr=1e-2", "max_steps=3", "device=cpu"]
    assert run("hydra.run.dir=run", f"recipe.model.name={base}", *lora, base=common) == 0
    own = read(here / "run", "summary.json")
    assert 0 < own["trained_parameters"] < own["parameters"]
    assert f"{own['trained_parameters']:,} of {own['parameters']:,} parameters trained" in capsys.readouterr().out
    assert evaluated(here / "run", "device=cpu2")["eval"] == own["eval"]

    config = AutoConfig.from_pretrained("run/model")
    whole = AutoModelForSequenceClassification.from_pretrained(base, config=config)
    loaded = PeftModel.from_pretrained(whole, "run/model").eval()
    tokens = AutoTokenizer.from_pretrained("run/model")("this film is very good 3", return_tensors="pt")
    assert loaded.config.id2label == {0: "awful", 1: "fine", 2: "great"}

    by_transformers = AutoModelForSequenceClassification.from_pretrained("run/model").eval()
    assert by_transformers.config.id2label == loaded.config.id2label
    assert torch.allclose(by_transformers(**tokens).logits, loaded(**tokens).logits, atol=1e-6)
    (best,) = pipeline("text-classification", "run/model")("this film is very good 3")
    assert save_mlflow_model(here / "run" / "model", here / "mlflow", here / "run" / "config.yaml")
    table = mlflow.pyfunc.load_model(here / "mlflow").predict(["this film is very good 3", "bad"])
    assert [*table] == ["label", *sorted(loaded.config.id2label.values(), key=lambda name: -table[name][0])]
    assert (table["label"][0], table[best["label"]][0]) == (best["label"], best["score"])

    merged = [f"recipe.model.name={base}", *lora, "adapter.merge=true"]
    assert run("hydra.run.dir=merged", *merged, base=common) == 0
    model = AutoModelForSequenceClassification.from_pretrained("merged/model").eval()
    assert not Path("merged/model/adapter_config.json").exists()
    assert torch.allclose(model(**tokens).logits, loaded(**tokens).logits, atol=1e-6)
    assert evaluated(here / "merged")["eval"] == pytest.approx(own["eval"], rel=1e-5)

    further = ["recipe.model.name=run/model", "optimizer.lr=1e-30", "max_steps=1", "device=cpu"]
    assert run("hydra.run.dir=further", *further, base=common) == 0
    assert read(here / "further", "summary.json")["eval"] == pytest.approx(own["eval"], rel=1e-5)

    base.rename(here / "moved")
    capsys.readouterr()
    assert cli.run_tool("evaluate", ["run"]) == cli.EXIT_USER_ERROR
    assert f"its base model {base} does not exist" in capsys.readouterr().err
    save_bert(base, rows, positions=64)
    assert cli.run_tool("evaluate", ["run"]) == cli.EXIT_USER_ERROR
    assert "position_embeddings.weight has [64, 16]" in capsys.readouterr().err


def test_an_adapter_next_to_weights_in_4_bits(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluated with the same 4 bits; other tools load it onto the whole model, or onto 4 bits of bitsandbytes."""
    _, base, common = three_classes(here)
    common += ["adapter.rank=2", "optimizer.lr=1e-2", "max_steps=3", "device=cpu", f"recipe.model.name={base}"]
    for name, more in (("run", []), ("merged", ["adapter.merge=true"])):
        assert run(f"hydra.run.dir={name}", *more, base=["adapter=qlora", *common]) == 0
    assert run("hydra.run.dir=lora", base=["adapter=lora", *common]) == 0
    own, of_lora = (read(here / name, "summary.json") for name in ("run", "lora"))
    for name in ("parameters", "trained_parameters"):
        assert own[name] == of_lora[name]
    assert own["eval"]["loss"] != of_lora["eval"]["loss"]
    assert evaluated(here / "run", "device=cpu2")["eval"] == own["eval"]

    tokens = AutoTokenizer.from_pretrained("run/model")("this film is very good 3", return_tensors="pt")
    config = AutoConfig.from_pretrained("run/model")
    new = PeftConfig.from_pretrained("run/model").modules_to_save
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=new)
    in_4_bits = AutoModelForSequenceClassification.from_pretrained(base, config=config, quantization_config=bits)
    by_peft = PeftModel.from_pretrained(in_4_bits, "run/model")
    by_transformers = AutoModelForSequenceClassification.from_pretrained("run/model", quantization_config=bits)
    merged = AutoModelForSequenceClassification.from_pretrained("merged/model").eval()
    expected = merged(**tokens).logits
    for loaded in (by_peft.eval(), by_transformers.eval()):
        for layer in loaded.modules():  # where bitsandbytes would evaluate in bf16
            layer.support_avx512bf16_for_cpu = False
        assert torch.allclose(loaded(**tokens).logits, expected, atol=1e-5)
    Path("asked.tsv").write_text("text\nthis film is very good 3\n")
    assert cli.run_tool("predict", ["run", "--input=asked.tsv", "-o", "answers.csv"]) == 0
    answers = pandas.read_csv("answers.csv").filter(like="probability_")
    assert answers.to_numpy() == pytest.approx(expected.softmax(-1).detach().numpy(), abs=1e-5)
    (best,) = pipeline("text-classification", "run/model")("this film is very good 3")
    assert best["label"] in ("awful", "fine", "great")

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    assert cli.run_tool("evaluate", ["run"]) == cli.EXIT_USER_ERROR
    assert evaluated(here / "merged")["eval"] == pytest.approx(own["eval"], rel=1e-5)
    capsys.readouterr()
    assert run("hydra.run.dir=again", base=["adapter=qlora", *common]) == cli.EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert "adapter=qlora" in error
    assert "[qlora]" in error
    assert not Path("again").exists()


def test_questions(here: Path) -> None:
    """In fp64, whose weights would lose digits if they were read as fp32; and without the training file."""
    train, evaluation = zoo.write(here)
    overrides = [
        *("recipe=squad", f"recipe.data.train={train}", f"recipe.data.eval={evaluation}", "max_steps=3"),
        *(f"recipe.model.name={save_bert(here / 'bert', zoo.texts())}", "recipe.max_length=48"),
        *("recipe.doc_stride=8", "recipe.max_query_length=12", "precision=fp64", "tracking=none"),
    ]
    assert run("hydra.run.dir=run", "device=cpu", base=overrides) == 0
    train.unlink()
    assert evaluated(here / "run", "device=cpu2")["eval"] == read(here / "run", "summary.json")["eval"]

    asked = json.loads(evaluation.read_text())
    for paragraph in asked["data"][0]["paragraphs"]:
        for question in paragraph["qas"]:
            del question["answers"]
    (here / "asked.json").write_text(json.dumps(asked))
    assert cli.run_tool("predict", ["run", "-o", "answers.csv", "--input=asked.json"]) == 0
    table = pandas.read_csv("answers.csv")
    assert list(table.columns) == ["id", "question", "answer", "score"]
    assert table.id.tolist() == [f"{what}-{20 + number}" for number in range(6) for what in ("where", "when")]
    contexts = [one["context"] for one in asked["data"][0]["paragraphs"] for _ in one["qas"]]
    assert all(answer in context for answer, context in zip(table.answer, contexts, strict=True))

    assert save_mlflow_model(here / "run" / "model", here / "mlflow", here / "run" / "config.yaml")
    questions = pandas.DataFrame({"question": table.question, "context": contexts})
    served = mlflow.pyfunc.load_model(here / "mlflow").predict(questions)
    assert served.answer.tolist() == table.answer.tolist()
    assert served.score.tolist() == pytest.approx(table.score.tolist(), rel=1e-3)


def test_text_and_perplexity(here: Path) -> None:
    lines = [row.sentence for row in generate(0, 60, 20)[0]]
    (here / "train.txt").write_text("\n".join(lines[:40]))
    (here / "dev.txt").write_text("\n".join(lines[40:]))
    data = ["recipe.data.train=train.txt", "recipe.data.eval=dev.txt", "recipe.packing=documents", "max_steps=2"]
    model = ["recipe.model.name=shape", "recipe.model.init=random", "recipe.block_size=16"]
    shape = GPT2Config(vocab_size=400, n_embd=16, n_layer=1, n_head=2, n_positions=32, **special_ids("gpt2"))
    shape.save_pretrained("shape")
    trained_tokenizer("gpt2", 400, lines).save_pretrained("shape")
    assert run("hydra.run.dir=run", "device=cpu", *data, *model, base=["recipe=causal_lm", "tracking=none"]) == 0
    own = read(here / "run", "summary.json")["eval"]
    assert evaluated(here / "run")["eval"] == own
    assert cli.run_tool("predict", ["run", "-o", "rows.csv", "device=cpu2", "hydra.run.dir=result"]) == 0
    table = pandas.read_csv("rows.csv")
    assert list(table.columns) == ["document", "tokens", "loss", "perplexity"]
    assert table.document.nunique() == 20
    targets = table.tokens - 1
    assert (table.loss * targets).sum() / targets.sum() == pytest.approx(own["loss"], rel=1e-5)


def test_other_labels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several classes, a number, a tag for each word: the run's metrics again, and a row for each sample."""
    for recipe, overrides in labelled.write(here).items():
        assert run(f"hydra.run.dir={recipe}", "device=cpu2", "max_steps=3", "tracking=none", base=overrides) == 0
        own = read(here / recipe, "summary.json")["eval"]
        again = evaluated(here / recipe, "device=cpu")
        assert (again["eval"], again["data"]["eval_samples"]) == (pytest.approx(own, rel=1e-3), 12)
    assert "labels inferred: 'food' is class 0, 'music' is class 1" in capsys.readouterr().out

    assert cli.run_tool("predict", ["multi_label", "-o", "sets.csv", "tracking=none"]) == 0
    sets = pandas.read_csv("sets.csv")
    assert [json.loads(labels) for labels in sets.label] == [labels for _, labels in labelled.class_sets(12, 1)]
    chosen = [[name for name in labelled.CLASSES if row[f"probability_{name}"] > 0.5] for _, row in sets.iterrows()]
    assert [json.loads(labels) for labels in sets.predicted] == chosen

    assert cli.run_tool("predict", ["text_regression", "-o", "numbers.csv", "tracking=none"]) == 0
    numbers = pandas.read_csv("numbers.csv")
    assert list(numbers.columns) == ["text", "predicted", "label"]
    assert ((numbers.predicted - numbers.label) ** 2).mean() == pytest.approx(
        read(here / "text_regression", "summary.json")["eval"]["mse"], rel=1e-4
    )

    Path("words.txt").write_text("Today\nAda\n\nOslo\nrests\n")
    given = ["token_classification", "-o", "words.jsonl", "--input=words.txt", "tracking=none"]
    assert cli.run_tool("predict", given) == 0
    rows = [json.loads(line) for line in Path("words.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [["Today", "Ada"], ["Oslo", "rests"]]
    assert {tag for row in rows for tag in row["predicted"]} <= {"O", "B-LOC", "I-LOC", "B-PER", "I-PER"}
    assert all(row.keys() == {"tokens", "predicted"} and len(row["predicted"]) == 2 for row in rows)


def test_replies_of_a_chat_adapter(here: Path) -> None:
    """Two workers that average every four steps; the adapter loads in PEFT with its template, and answers questions."""
    writers.save_llama(here / "model", writers.MARKED)
    for name, count in (("train", 40), ("dev", 6)):
        writers.write_rows(here / f"{name}.jsonl", writers.chats(count))
    data = ["recipe.data.train=train.jsonl", "recipe.data.eval=dev.jsonl", "recipe.model.name=model"]
    options = ["adapter=lora", "sync.k=4", "max_steps=6", "recipe.max_length=128", "recipe.max_new_tokens=8"]
    base = ["recipe=chat", "tracking=none", "hydra.run.dir=run", "device=cpu2"]
    assert run(*data, *options, base=base) == 0
    model = AutoModelForCausalLM.from_pretrained("run/model")  # without a copy of the weights that the adapter changes
    assert [path.name for path in Path("run/model").glob("*.safetensors")] == ["adapter_model.safetensors"]
    tokenizer = AutoTokenizer.from_pretrained("run/model")
    assert tokenizer.get_chat_template() == writers.MARKED
    asked = [{"messages": row["messages"][:-1]} for row in writers.chats(5)]
    writers.write_rows(here / "asked.jsonl", asked)
    tables = []
    for device, sharding in (("cpu", "none"), ("cpu2", "none"), ("cpu2", "fsdp")):
        name = f"{device}-{sharding}"
        options = ["--input=asked.jsonl", f"device={device}", f"sharding={sharding}", "precision=fp64"]
        assert cli.run_tool("predict", ["run", "-o", f"{name}.jsonl", f"hydra.run.dir={name}", *options]) == 0
        tables.append(pandas.read_json(f"{name}.jsonl", lines=True))
    assert all(table.generated.equals(tables[0].generated) for table in tables)
    assert tables[0].input.tolist() == [row["messages"][-1]["content"] for row in asked]
    ids = tokenizer.apply_chat_template(asked[1]["messages"], add_generation_prompt=True, return_tensors="pt")
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    tokens = model.double().generate(**ids, max_new_tokens=8, do_sample=False, eos_token_id=ends)[0]
    reply = tokenizer.decode(tokens[ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert tables[0].generated[1] == reply.strip()
    assert save_mlflow_model(here / "run" / "model", here / "mlflow", here / "run" / "config.yaml")
    assert isinstance(mlflow.pyfunc.load_model(here / "mlflow").predict(["Where does the owl live?"])[0], str)


def test_texts_of_a_sequence_to_sequence_model(here: Path) -> None:
    """`runner.predict` generates, evaluations of the run only with recipe.generate=true."""
    writers.save_t5(here / "model")
    for name, count in (("train", 30), ("dev", 6)):
        writers.write_rows(here / f"{name}.jsonl", writers.pairs(count))
    data = ["recipe.data.train=train.jsonl", "recipe.data.eval=dev.jsonl", "recipe.model.name=model", "max_steps=2"]
    columns = ["recipe.data.source_column=translation.en", "recipe.data.target_column=translation.de"]
    options = ["recipe.max_new_tokens=8", "recipe.max_source_length=64", "hydra.run.dir=run", "device=cpu"]
    assert run(*data, *columns, *options, base=["recipe=seq2seq", "tracking=none"]) == 0
    own = read(here / "run", "summary.json")["eval"]
    summary = evaluated(here / "run", "device=cpu2", "recipe.generate=true")["eval"]
    assert {name: summary[name] for name in own} == pytest.approx(own, rel=1e-4)
    assert set(summary) - set(own) == {"exact_match", "rouge1", "rouge2", "rougeL", "bleu"}
    assert cli.run_tool("predict", ["run", "-o", "texts.csv", "hydra.run.dir=result"]) == 0
    table = pandas.read_csv("texts.csv")
    assert list(table.columns) == ["input", "generated", "reference", "loss", "perplexity"]
    assert table.reference.tolist() == [row["translation"]["de"] for row in writers.pairs(6)]

    assert save_mlflow_model(here / "run" / "model", here / "mlflow", here / "run" / "config.yaml")
    assert mlflow.pyfunc.load_model(here / "mlflow").predict(table.input.tolist()) == table.generated.tolist()


def test_images(here: Path) -> None:
    """An adapter, which a head for other classes is a part of: evaluated, used for predictions and served by MLflow."""
    pictures.write_folder(here / "train", 30)
    pictures.write_folder(here / "dev", 9, first=100)
    pictures.save_vit(here / "vit", labels=5)
    data = ["recipe.data.train=train", "recipe.data.eval=dev", "recipe.model.name=vit", "device=cpu", "max_steps=3"]
    lora = ["adapter=lora", "adapter.rank=2"]
    assert run("hydra.run.dir=run", *data, *lora, base=["recipe=image_classification", "tracking=none"]) == 0
    own = read(here / "run", "summary.json")["eval"]
    assert evaluated(here / "run", "device=cpu2")["eval"] == pytest.approx(own, rel=1e-5)
    shutil.copytree(here / "dev" / "red", here / "asked" / "more")
    asked = ["--input=asked", "-o", "asked.csv", "hydra.run.dir=result"]
    assert cli.run_tool("predict", ["run", *asked]) == 0
    table = pandas.read_csv("asked.csv")
    files = sorted((here / "asked").rglob("*.png"))
    assert table.image.tolist() == [file.relative_to(here / "asked").as_posix() for file in files]

    assert save_mlflow_model(here / "run" / "model", here / "mlflow", here / "run" / "config.yaml")
    served = mlflow.pyfunc.load_model(here / "mlflow")
    contents = [file.read_bytes() for file in files]
    answers = served.predict([base64.b64encode(content).decode() for content in contents])
    assert answers.equals(served.predict(pandas.DataFrame({"image": contents})))
    assert answers.label.tolist() == table.predicted.tolist()
    for name in pictures.CLASSES:
        assert answers[name].tolist() == pytest.approx(table[f"probability_{name}"].tolist(), abs=1e-5)
    for wrong in (str(files[0]), f"file://{files[0]}"):  # not read from this machine
        with pytest.raises((ValueError, OSError)):
            served.predict([wrong])


def test_recipe_without_transformers(here: Path) -> None:
    assert run("hydra.run.dir=run", "device=cpu", base=["recipe=linear", "tracking=none"]) == 0
    assert evaluated(here / "run")["eval"] == read(here / "run", "summary.json")["eval"]
