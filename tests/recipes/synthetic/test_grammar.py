"""The acceptability corpus: its content, which a digest fixes, sizes and balance, and minimal pairs."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest

from recipes.synthetic.grammar import PHENOMENA, Row, generate


@pytest.fixture(scope="module")
def parts() -> tuple[list[Row], list[Row]]:
    """The corpus in its default sizes."""
    return generate(seed=0, train_size=8000, eval_size=1000)


def test_the_corpus_never_changes(parts: tuple[list[Row], list[Row]]) -> None:
    """Published results and golden runs depend on every sentence and its place; the global random state does not."""
    before = random.getstate()
    assert generate(0, 8000, 1000) == parts
    assert random.getstate() == before
    text = "\n".join(f"{row.label} {row.sentence}" for rows in parts for row in rows)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "a47e57e5bc29a26b"
    assert generate(1, 8000, 1000) != parts


@pytest.mark.parametrize("sizes", [(8000, 1000), (1, 0), (2, 1), (7, 3), (101, 33)])
def test_sizes_and_balance(sizes: tuple[int, int]) -> None:
    for rows, size in zip(generate(3, *sizes), sizes, strict=True):
        assert len(rows) == size
        assert abs(sum(2 * row.label - 1 for row in rows)) <= 1


def test_more_sentences_than_the_grammar_has() -> None:
    with pytest.raises(ValueError, match="sentences"):
        generate(0, 10**9, 10)


def test_phenomena_are_balanced_and_pairs_are_not_split(parts: tuple[list[Row], list[Row]]) -> None:
    """In every phenomenon half of the sentences are acceptable; no sentence occurs twice or in both sets."""
    for rows in parts:
        counts = Counter((row.source, row.label) for row in rows)
        assert set(counts.values()) == {len(rows) // 8}
    sentences = [row.sentence for rows in parts for row in rows]
    assert len(set(sentences)) == len(sentences)
    # The first draws are those of the first phenomenon.
    rng = random.Random(0)
    pairs = [set(PHENOMENA["agreement"](rng)) for _ in range(1200)]
    evaluated = {row.sentence for row in parts[1]}
    assert {len(pair & evaluated) for pair in pairs} == {0, 2}
