"""The acceptability corpus: sizes and balance, minimal pairs, and some of its grammar by hand."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter

import pytest

from recipes.synthetic import grammar
from recipes.synthetic.grammar import PHENOMENA, REFLEXIVES, Row, generate


@pytest.fixture(scope="module")
def parts() -> tuple[list[Row], list[Row]]:
    """The corpus in its default sizes."""
    return generate(seed=0, train_size=8000, eval_size=1000)


def drawn(source: str, count: int = 2000) -> list[grammar.Pair]:
    rng = random.Random(7)
    return [PHENOMENA[source](rng) for _ in range(count)]


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


def test_words(parts: tuple[list[Row], list[Row]]) -> None:
    """3 to 14 lower case words; the evaluation set needs no new ones, and no frequent word determines the label."""
    vocabularies = [{word for row in rows for word in row.sentence.split(" ")} for rows in parts]
    assert all(word.isascii() and word.isalpha() and word.islower() for word in vocabularies[0])
    assert vocabularies[1] <= vocabularies[0]
    assert {len(row.sentence.split()) for rows in parts for row in rows} <= set(range(3, 15))
    counts: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}
    for row in parts[0]:
        counts[row.label].update(row.sentence.split())
    for word in vocabularies[0]:
        total = counts[0][word] + counts[1][word]
        assert 0 < counts[1][word] < total
        assert total < 100 or 0.2 < counts[1][word] / total < 0.8, word


def test_no_sentence_has_both_labels() -> None:
    labels: dict[str, int] = {}
    for seed in range(3):
        for rows in generate(seed, 8000, 1000):
            for row in rows:
                assert labels.setdefault(row.sentence, row.label) == row.label, row


@pytest.mark.parametrize("source", PHENOMENA)
def test_pairs_are_minimal(source: str) -> None:
    """One word differs, or for word order two neighbours are exchanged."""
    for good, bad in drawn(source):
        differing = [(a, b) for a, b in zip(good.split(), bad.split(), strict=True) if a != b]
        if source == "word_order":
            assert [differing[0], differing[-1][::-1]] == [differing[0]] * 2
            assert len(differing) == 2
        else:
            assert len(differing) == 1, (good, bad)


def test_verbs_agree_with_the_subject() -> None:
    """Also where a noun of the other number is closer to the verb."""
    forms = [("is", "are"), ("was", "were"), ("has", "have")]
    forms += [(verb.singular, verb.plural) for verb in grammar.INTRANSITIVE]
    plurals = {noun.plural for noun in grammar.PEOPLE + grammar.THINGS + grammar.MACHINES}
    attracted = 0
    for good, bad in drawn("agreement"):
        words = good.split()
        at = next(at for at, (one, other) in enumerate(zip(words, bad.split(), strict=True)) if one != other)
        pair = (words[at], bad.split()[at])
        if words[0] == "the":
            assert pair in forms or pair[::-1] in forms
        else:
            assert (pair[::-1] if words[0] in ("these", "many") else pair) in forms, (good, bad)
        attracted += words[0] in ("this", "every") and words[at - 1] in plurals
    assert attracted > 50


def test_reflexives_refer_to_the_subject() -> None:
    expected = {noun.singular: "himself" for noun in grammar.MALE}
    expected |= {noun.singular: "herself" for noun in grammar.FEMALE}
    expected |= {noun.singular: "itself" for noun in grammar.MACHINES}
    expected |= {noun.plural: "themselves" for noun in grammar.PEOPLE + grammar.MACHINES}
    for good, bad in drawn("reflexive"):
        pronoun = expected[good.split()[1]]
        assert good.split()[-1] == pronoun, good
        assert bad.split()[-1] in set(REFLEXIVES) - {pronoun}, bad


def test_classes_of_verbs_do_not_overlap() -> None:
    """Verbs that are right with and without an object would make wrong labels."""
    classes = [{verb.past for verb in grammar.INTRANSITIVE}, set(grammar.THING_VERBS), set(grammar.GIVING)]
    verbs = set().union(*classes)
    assert sum(map(len, classes)) == len(verbs)
    assert not verbs & {"ate", "read", "wrote", "sang", "cooked", "walked", "ran", "opened", "broke", "noticed"}


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ("agreement", r"the keys (near|behind) the \w+ are \w+", r"the keys (near|behind) the \w+ is \w+"),
        ("agreement", r"every \w+ sleeps", r"every \w+ sleep"),
        ("reflexive", r"the king \w+ himself", r"the king \w+ herself"),
        ("word_order", r"the old \w+ (will|did not) \w+ in \w+", r"the \w+ old (will|did not) \w+ in \w+"),
        ("argument_structure", r"\w+ \w+ repaired the vase", r"\w+ \w+ sneezed the vase"),
        ("argument_structure", r"the \w+ gave the \w+ the \w+", r"the \w+ praised the \w+ the \w+"),
    ],
)
def test_expected_pairs_are_drawn(source: str, good: str, bad: str) -> None:
    """Textbook examples, the acceptable sentence first."""
    assert any(re.fullmatch(good, one) and re.fullmatch(bad, other) for one, other in drawn(source, 40_000))
    assert not any(re.fullmatch(bad, one) and re.fullmatch(good, other) for one, other in drawn(source))
