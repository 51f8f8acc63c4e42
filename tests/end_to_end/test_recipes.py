"""Recipes for files of the user, and the examples of docs/own-recipe.md, run through the command line."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from benchmarks.peers.trained_tokenizer import trained_tokenizer
from recipes.synthetic.grammar import generate
from runner import cli
from runner.folder.evaluation_rows import read_rows
from tests.processes import TIMEOUT_S, output, start
from tests.recipes import zoo
from tests.runs import only_folder, read
from tests.tiny_models import save_bert

GUIDE = Path(__file__).parents[2] / "docs" / "own-recipe.md"
LABELS = ("entailment", "neutral", "contradiction")


def write_pairs(path: Path, seed: int, count: int) -> None:
    sentences = [row.sentence for row in generate(seed, 2 * count, 2)[0]]
    rows = [
        {"sentence1": sentences[2 * i], "sentence2": sentences[2 * i + 1], "gold_label": LABELS[i % 3]}
        for i in range(count)
    ]
    rows.append({"sentence1": "A.", "sentence2": "B.", "gold_label": "-"})  # MultiNLI has such rows without a label
    path.write_text("\n".join(map(json.dumps, rows)))


def test_mnli_on_two_workers(here: Path) -> None:
    """Files as MultiNLI has them, a model without weights, padding to max_length."""
    write_pairs(here / "train.jsonl", 0, 45)
    write_pairs(here / "dev.jsonl", 1, 12)
    BertConfig(
        vocab_size=400, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ).save_pretrained(here / "shape")
    trained_tokenizer("bert", 400, [row.sentence for row in generate(0, 200, 2)[0]]).save_pretrained(here / "shape")
    data = ["train=train.jsonl", "eval=dev.jsonl", "text_column=sentence1", "pair_column=sentence2"]
    overrides = [
        "recipe=mnli",
        *(f"recipe.data.{setting}" for setting in (*data, "label_column=gold_label")),
        *("recipe.model.name=shape", "recipe.model.init=random", "recipe.padding=max_length", "recipe.max_length=48"),
        *("device=cpu2", "batch.global_batch=20", "epochs=1", "tracking=none"),
    ]
    assert cli.main(overrides, time.time()) == 0
    folder = only_folder(here, "mnli")
    summary = read(folder, "summary.json")
    assert summary["samples_seen"] == 45
    assert set(summary["eval"]) == {"accuracy", "macro_f1", "loss"}
    assert "recipe.padding=none" in " ".join(one["sentence"] for one in summary["diagnoses"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    pair = tokenizer("The nun slept.", "It ran.", return_tensors="pt")
    assert pair["token_type_ids"].unique().tolist() == [0, 1]
    assert model(**pair).logits.shape == (1, 3)


def test_squad_on_one_and_on_two_workers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp64 under `equivalence=exact`: the same EM and F1 to the last digit, over every question once."""
    train, evaluation = zoo.write(here)
    overrides = [
        *("recipe=squad", f"recipe.data.train={train}", f"recipe.data.eval={evaluation}"),
        *(f"recipe.model.name={save_bert(here / 'bert', zoo.texts())}", "recipe.max_length=48"),
        *("recipe.doc_stride=8", "recipe.max_query_length=12", "optimizer.lr=5e-3", "tracking=none"),
        *("precision=fp64", "equivalence=exact"),
    ]
    found = []
    for device in ("cpu", "cpu2"):
        assert cli.main([*overrides, f"device={device}", f"hydra.run.dir={device}"], time.time()) == 0
        summary, ledger = read(here / device, "summary.json"), read(here / device, "ledger.json")
        by_row = {name: values.tolist() for name, values in read_rows(here / device).items()}
        assert {name: sum(values) / 12 for name, values in by_row.items()} == pytest.approx(summary["eval"])
        found.append((summary["eval"], by_row, ledger["digest"], summary["certificate"]))
        assert summary["data"]["eval_groups"] == 12 < summary["data"]["eval_samples"]
        assert (ledger["unit"], ledger["groups"]) == ("windows", "questions")
        assert [epoch["groups_seen"] for epoch in ledger["epochs"]] == [40, 40]
        assert [epoch["samples_seen"] for epoch in ledger["epochs"]] == [summary["data"]["train_samples"]] * 2
    assert found[0] == found[1]
    assert found[0][0]["f1"] > 0
    printed = capsys.readouterr().out
    assert "over 12 questions" in printed


def test_plan_without_data_weights_or_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan.train_samples` states the size of a training set that is not on this machine."""
    published = ["recipe=squad", "recipe.model.name=bert-large-uncased", "batch=per_device", "device=gpu4", "sync.k=16"]
    assert cli.run_tool("plan", published) == cli.EXIT_USER_ERROR
    assert "plan.train_samples=N" in capsys.readouterr().err
    assert cli.run_tool("plan", [*published, "plan.train_samples=88524"]) == 0
    printed = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    for row in ("samples 177,048", "optimizer steps 5,534", "global batch 32"):
        assert any(one.startswith(row) for one in rows), row
    assert "recipe.model.name=bert-large-uncased" in printed


# --- docs/own-recipe.md -------------------------------------------------------------------------------------


def blocks(language: str, part: str) -> str:
    """The guide's code block in this language that contains `part`."""
    found = re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return next(block for block in found if part in block)


@pytest.fixture
def guide(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder from which Python imports, as it does from the current one."""
    monkeypatch.syspath_prepend(str(here))
    for name in ("letters", "tickets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (here / "my_conf" / "recipe").mkdir(parents=True)
    return here


def test_own_recipe_class(guide: Path) -> None:
    """The guide's recipe class, in a folder outside the project, trains on two workers."""
    (guide / "letters").mkdir()
    (guide / "letters" / "__init__.py").write_text(blocks("python", "class NextLetter"))
    (guide / "my_conf" / "recipe" / "letters.yaml").write_text(blocks("yaml", "letters.NextLetter"))
    (guide / "names.txt").write_text("\n".join(f"name{i * i}" for i in range(60)) + "\n")
    options = ["--config-dir=my_conf", "recipe=letters", "trusted_packages=[letters]", "device=cpu2", "tracking=none"]
    assert cli.main([*options, "accumulation.steps=2", "batch.global_batch=16", "epochs=1"], time.time()) == 0
    summary = read(only_folder(guide, "letters"), "summary.json")
    assert summary["samples_seen"] == 54
    assert 1 < summary["eval"]["perplexity"] < 400


def test_own_source_of_texts(guide: Path) -> None:
    """The guide's source and its recipe, at most 40 lines, train by the guide's command, or its short form `runner`."""
    code, config = blocks("python", "class Tickets"), blocks("yaml", "tickets.Tickets")
    assert len(code.splitlines()) + len(config.splitlines()) <= 40
    (guide / "tickets.py").write_text(code)
    (guide / "my_conf" / "recipe" / "tickets.yaml").write_text(config)
    rows = [f'"It is broken, ""{place}"" again",{team}\n' for place, team in (("door", "house"), ("mail", "net"))]
    for name, times in (("tickets", 20), ("tickets_dev", 4)):
        (guide / f"{name}.csv").write_text("subject,team\n" + "".join(rows) * times)
    save_bert(guide / "my_model", rows)
    arguments = shlex.split(blocks("sh", "recipe=tickets"))
    assert arguments[:3] == ["python", "-m", "runner"]
    script = str(Path(sys.executable).with_name("runner"))
    process = start(guide, script, *arguments[3:], "device=cpu", "tracking=none", "batch.global_batch=8")
    assert process.wait(timeout=TIMEOUT_S) == 0, output(guide)
    summary = read(only_folder(guide, "tickets"), "summary.json")
    assert summary["samples_seen"] == 3 * 40
    assert set(summary["eval"]) == {"accuracy", "macro_f1", "loss"}
