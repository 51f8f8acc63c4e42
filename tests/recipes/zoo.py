"""SQuAD's form, with questions about animals: long paragraphs, several answers, answers at every place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ANIMALS = ("otter", "heron", "badger", "newt", "stork", "lynx", "toad", "vole")
PLACES = ("river", "reed bed", "old wood", "pond", "church tower", "dark forest", "garden", "meadow")


def paragraph(number: int) -> dict[str, Any]:
    """One animal, two questions. Every third paragraph is several times as long, the answers near its end."""
    animal, place = ANIMALS[number % 8], PLACES[(number // 8 + number) % 8]
    before = f"This is page {number} of the book. " * (12 if number % 3 == 0 else 1)
    context = f"{before}The {animal} lives in the {place}, and sleeps by day."

    def answer(text: str) -> dict[str, Any]:
        return {"text": text, "answer_start": context.rindex(text)}

    return {
        "context": context,
        "qas": [
            {
                "id": f"where-{number}",
                "question": f"Where does the {animal} live?",
                "answers": [answer(f"the {place}"), answer(place)],
            },
            {"id": f"when-{number}", "question": f"When does the {animal} sleep?", "answers": [answer("by day")]},
        ],
    }


def content(first: int, count: int) -> dict[str, Any]:
    return {"version": "1.1", "data": [{"title": "Zoo", "paragraphs": [paragraph(first + i) for i in range(count)]}]}


def texts() -> list[str]:
    """Everything that `content` can say, for a vocabulary."""
    paragraphs = [paragraph(number) for number in range(64)]
    return [text for one in paragraphs for text in (one["context"], *(asked["question"] for asked in one["qas"]))]


def write(folder: Path, train: int = 20, evaluation: int = 6) -> tuple[Path, Path]:
    """So many paragraphs, each with two questions, in two files."""
    files = (folder / "zoo-train.json", folder / "zoo-eval.json")
    for path, first, count in ((files[0], 0, train), (files[1], train, evaluation)):
        path.write_text(json.dumps(content(first, count)))
    return files
