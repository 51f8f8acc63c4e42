"""`recipe=mnli` as it is configured: every form of its data, and what it was tuned with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from recipes.models.pretrained import Pretrained
from recipes.tasks.classification import Corpus, LabelledText, SequenceClassification
from runner.config.compose import compose, settings
from runner.config.instantiate import build_recipe

PREMISES = ["A dog ran.", "It rained.", "Nobody came.", "The nun slept."]
HYPOTHESES = ["An animal ran.", "The sun was up.", "Some came.", "She snored."]
LABELS = ["entailment", "neutral", "contradiction", "-"]
EXPECTED = LabelledText(PREMISES[:3], [0, 1, 2], HYPOTHESES[:3])


def recipe(*overrides: str) -> SequenceClassification:
    built = build_recipe(settings(compose(["recipe=mnli", *overrides])).recipe, [])
    assert isinstance(built, SequenceClassification)
    return built


def read(*overrides: str) -> Corpus:
    return recipe(*overrides).data.read()


def files(folder: Path, suffix: str, content: str) -> list[str]:
    """The overrides for two files with this content."""
    for part in ("train", "dev"):
        (folder / f"{part}{suffix}").write_text(content)
    return [f"recipe.data.train={folder / f'train{suffix}'}", f"recipe.data.eval={folder / f'dev{suffix}'}"]


def test_tab_separated_with_a_header(tmp_path: Path) -> None:
    """Files with the columns premise, hypothesis and label need nothing but their names."""
    rows = ["\t".join(row) for row in zip(["0", "1", "2", "3"], PREMISES, HYPOTHESES, LABELS, strict=True)]
    given = files(tmp_path, ".tsv", "\n".join(["index\tpremise\thypothesis\tlabel", *rows]))
    assert read(*given).train == read(*given).eval == EXPECTED


def test_multinlis_own_files(tmp_path: Path) -> None:
    """MultiNLI's JSON Lines are read by the names of their fields; pairs without agreement are left out."""
    content = "".join(
        json.dumps({"gold_label": label, "sentence1": premise, "sentence2": hypothesis, "annotator_labels": [label]})
        + "\n"
        for premise, hypothesis, label in zip(PREMISES, HYPOTHESES, LABELS, strict=True)
    )
    names = ["recipe.data.text_column=sentence1", "recipe.data.pair_column=sentence2"]
    given = files(tmp_path, ".jsonl", content)
    assert read(*given, *names, "recipe.data.label_column=gold_label").train == EXPECTED


def test_glues_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the Hub come GLUE's parts and class numbers, and of the two evaluation parts the matched one."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    part = Dataset.from_dict(
        {"premise": PREMISES[:3], "hypothesis": HYPOTHESES[:3], "label": [0, 1, 2], "idx": [0, 1, 2]}
    )
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None) -> Any:
        asked.append((name, config))
        return {"train": part, "validation_matched": part, "validation_mismatched": None}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    corpus = read()
    assert asked == [("nyu-mll/glue", "mnli")]
    assert corpus.train == corpus.eval == EXPECTED


def test_what_is_known_without_the_data() -> None:
    """The sizes are those that GLUE publishes, and smaller ones where fewer rows are wanted."""
    of = recipe().expected_facts()
    assert of is not None
    assert (of.train_samples, of.eval_samples, of.estimated) == (392_702, 9_815, True)
    assert "nyu-mll/glue/mnli" in of.source
    small = recipe("recipe.data.max_train_samples=1000").expected_facts()
    assert small is not None
    assert (small.train_samples, small.eval_samples) == (1000, 9_815)


def test_what_it_was_tuned_with() -> None:
    """BERT-base at 2e-5 for 32 pairs, three epochs, accuracy; the default batch is the one it was tuned for."""
    config = settings(compose(["recipe=mnli"]))
    assert (config.optimizer.lr, config.scaling.reference_batch, config.batch.global_batch) == (2e-5, 32, 32)
    assert (config.epochs, config.schedule.warmup_share, config.evaluation.metric) == (3, 0.06, "accuracy")
    built = recipe()
    assert built.max_length == 128
    assert list(built.metric_names) == ["accuracy", "macro_f1", "loss"]
    assert built.model == Pretrained("bert-base-uncased")


def test_a_task_of_ones_own_is_one_file(tmp_path: Path) -> None:
    """A recipe for other pairs is a file that takes mnli's and says what differs."""
    folder = tmp_path / "conf" / "recipe"
    folder.mkdir(parents=True)
    (folder / "paraphrases.yaml").write_text(
        "defaults: [mnli, _self_]\nname: paraphrases\ndata:\n  train: p.tsv\n  eval: p.tsv\n"
        "  text_column: one\n  pair_column: other\n  label_column: same\n  label_names: null\n"
    )
    path = tmp_path / "p.tsv"
    path.write_text("one\tother\tsame\nIt ran.\tIt was running.\t1\nIt ran.\tIt fell.\t0\n")
    config = settings(
        compose(
            ["recipe=paraphrases", f"recipe.data.train={path}", f"recipe.data.eval={path}"], [str(tmp_path / "conf")]
        )
    )
    built = build_recipe(config.recipe, [])
    assert isinstance(built, SequenceClassification)
    corpus = built.data.read()
    assert corpus.train == LabelledText(["It ran.", "It ran."], [1, 0], ["It was running.", "It fell."])
