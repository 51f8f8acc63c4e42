"""Small files of each kind of label, and a model that reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from tests.tiny_models import save_bert

CLASSES = ("food", "music", "sport")
_OF_CLASS = {"food": ("soup", "bread"), "music": ("song", "band"), "sport": ("goal", "team")}
_NAMES = {"PER": ("Ada", "Grace M. Hopper", "Alan Turing"), "LOC": ("U.K.", "New York", "Oslo")}

Tagged = tuple[list[str], list[str]]


def text_of(classes: Sequence[str], number: int) -> str:
    """A text that the classes can be told from."""
    return " ".join(["I like", *(_OF_CLASS[name][number % 2] for name in classes), "very much " * (number % 3)]).strip()


def class_sets(count: int, seed: int) -> list[tuple[str, list[str]]]:
    """Texts and their classes: none, one or several."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        classes = [name for name in CLASSES if draw.random() < 0.4]
        found.append((text_of(classes, number), classes))
    return found


def tagged(count: int, seed: int) -> list[Tagged]:
    """Sentences of 2 to 14 words with entities, of one to three words, in IOB2."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        words, tags = ["Today"], ["O"]
        for _ in range(draw.randint(1, 3)):
            kind = draw.choice(sorted(_NAMES))
            name = draw.choice(_NAMES[kind]).split()
            words += [*name, "rests"]
            tags += [f"B-{kind}", *[f"I-{kind}"] * (len(name) - 1), "O"]
        found.append((words, tags))
    return found


def conll(sentences: Sequence[Tagged], between: str = " ") -> str:
    return "".join(
        "".join(f"{word}{between}{tag}\n" for word, tag in zip(*one, strict=True)) + "\n" for one in sentences
    )


def write_jsonl(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write(folder: Path, train: int = 40, evaluation: int = 12, dropout: float = 0.0) -> dict[str, list[str]]:
    """Files for four recipes; for each recipe its overrides, with a model that reads them."""
    for part, count, seed in (("train", train, 0), ("eval", evaluation, 1)):
        rows = class_sets(count, seed)
        write_jsonl(folder / f"sets-{part}.jsonl", [{"text": text, "labels": labels} for text, labels in rows])
        pairs = [
            {"premise": text, "hypothesis": text_of([CLASSES[number % 3]], number), "label": CLASSES[number % 3]}
            for number, (text, _) in enumerate(rows)
        ]
        write_jsonl(folder / f"pairs-{part}.jsonl", pairs)
        numbers = [f"{text},{2 * len(labels) - 0.25 * len(text.split())}\n" for text, labels in rows]
        (folder / f"numbers-{part}.csv").write_text("text,score\n" + "".join(numbers))
        sentences = [{"tokens": words, "tags": tags} for words, tags in tagged(count, seed)]
        write_jsonl(folder / f"words-{part}.jsonl", sentences)
    texts = [text for text, _ in class_sets(train, 0)] + [" ".join(words) for words, _ in tagged(train, 0)]
    model = save_bert(folder / "bert", texts)
    config = json.loads((model / "config.json").read_text())
    changed = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "initializer_range": 0.3}
    (model / "config.json").write_text(json.dumps({**config, **changed}))
    files = {
        "text_classification": "pairs-{}.jsonl",
        "multi_label": "sets-{}.jsonl",
        "text_regression": "numbers-{}.csv",
        "token_classification": "words-{}.jsonl",
    }
    return {
        recipe: [
            *(f"recipe={recipe}", f"recipe.model.name={model}"),
            *(f"recipe.data.{part}={folder / name.format(part)}" for part in ("train", "eval")),
        ]
        for recipe, name in files.items()
    }
