"""A token classification task from the paragraphs of a file in SQuAD's format: which words are names?

Words are in lower case, and the tag says whether a word was capitalised without starting its sentence.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

#: Lengths of sentences, in words: shorter ones have no context, and longer ones are mostly lists.
_WORDS = range(5, 61)


def write_names(squad: Path, out: Path) -> None:
    """Write a JSON Lines file with `tokens` and `tags` for each sentence."""
    articles = json.loads(squad.read_text(encoding="utf-8"))["data"]
    with out.open("w", encoding="utf-8") as file:
        for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
            for sentence in re.split(r"(?<=[.!?])\s+", paragraph["context"]):
                words = re.findall(r"\w+|[^\w\s]", sentence)
                if len(words) in _WORDS:
                    tags = ["B-NAME" if at and word[0].isupper() else "O" for at, word in enumerate(words)]
                    file.write(json.dumps({"tokens": [word.lower() for word in words], "tags": tags}) + "\n")
