"""The acceptability corpus: its sizes and balance, its minimal pairs, and some of its grammar by hand."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from recipes.synthetic import grammar
from recipes.synthetic.grammar import PHENOMENA, REFLEXIVES, Row, generate

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def parts() -> tuple[list[Row], list[Row]]:
    """The corpus in its usual sizes."""
    return generate(seed=0, train_size=8000, eval_size=1000)


def sentences(rows: list[Row]) -> list[str]:
    return [row.sentence for row in rows]


def by_source(rows: list[Row]) -> Counter[tuple[str, int]]:
    return Counter((row.source, row.label) for row in rows)


def drawn(source: str, count: int = 2000) -> list[grammar.Pair]:
    """Pairs of one phenomenon, as it draws them."""
    rng = random.Random(7)
    return [PHENOMENA[source](rng) for _ in range(count)]


# --- sizes, balance and separation --------------------------------------------------------------------------


def test_default_sizes_are_exact(parts: tuple[list[Row], list[Row]]) -> None:
    """Just as many rows are written as were asked for."""
    train, held_out = parts
    assert (len(train), len(held_out)) == (8000, 1000)


@pytest.mark.parametrize(("train_size", "eval_size"), [(0, 0), (1, 0), (0, 1), (2, 1), (7, 3), (101, 33), (40, 8)])
def test_other_sizes_are_exact(train_size: int, eval_size: int) -> None:
    """Sizes which are odd, tiny or no multiple of the number of phenomena are kept to as well."""
    train, held_out = generate(3, train_size, eval_size)
    assert (len(train), len(held_out)) == (train_size, eval_size)
    for rows in (train, held_out):
        labels = Counter(row.label for row in rows)
        assert abs(labels[0] - labels[1]) <= 1


def test_labels_are_balanced_in_every_phenomenon(parts: tuple[list[Row], list[Row]]) -> None:
    """Each phenomenon has a quarter of each part, half of it acceptable."""
    train, held_out = parts
    assert by_source(train) == {(source, label): 1000 for source in PHENOMENA for label in (0, 1)}
    assert by_source(held_out) == {(source, label): 125 for source in PHENOMENA for label in (0, 1)}


def test_no_sentence_comes_twice(parts: tuple[list[Row], list[Row]]) -> None:
    """Neither within a part nor in both: what is evaluated was not trained on."""
    train, held_out = parts
    everything = sentences(train) + sentences(held_out)
    assert len(set(everything)) == len(everything)


def test_both_members_of_a_pair_are_in_the_same_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair drawn for the corpus is found whole in one part, and no row is without its pair."""
    pairs: list[grammar.Pair] = []
    fresh_pairs = grammar._fresh_pairs

    def recording(*args: object) -> list[grammar.Pair]:
        found = fresh_pairs(*args)  # type: ignore[arg-type]
        pairs.extend(found)
        return found

    monkeypatch.setattr(grammar, "_fresh_pairs", recording)
    parts = generate(0, 800, 200)
    assert len(pairs) == 500
    for rows in parts:
        labels = {row.sentence: row.label for row in rows}
        inside = [pair for pair in pairs if set(pair) & set(labels)]
        assert len(labels) == 2 * len(inside)
        assert all((labels[good], labels[bad]) == (1, 0) for good, bad in inside)


def test_an_odd_part_leaves_the_partner_out_of_both_parts() -> None:
    """One size more adds the partner of the sentence that was alone, and changes nothing else."""
    odd, even = generate(5, 81, 40), generate(5, 82, 40)
    (partner,) = set(sentences(even[0])) - set(sentences(odd[0]))
    assert set(sentences(odd[0])) < set(sentences(even[0]))
    assert set(sentences(odd[1])) == set(sentences(even[1]))
    assert partner not in sentences(odd[1])


@pytest.mark.parametrize(("train_size", "eval_size"), [(10**9, 1000), (10, 10**9)])
def test_more_than_the_grammar_can_give_is_refused(train_size: int, eval_size: int) -> None:
    """The error names what was asked for and what there is, and it comes at all."""
    with pytest.raises(ValueError, match=rf"^{train_size + eval_size} sentences .* only about \d{{5,6}}$"):
        generate(0, train_size, eval_size)


def test_negative_sizes_are_refused() -> None:
    """A size below zero is an error and not an empty part."""
    with pytest.raises(ValueError, match="train_size=-2, eval_size=4"):
        generate(0, -2, 4)


# --- determinism --------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_rows(parts: tuple[list[Row], list[Row]]) -> None:
    """Rows and their order depend on the seed, and on nothing that an earlier call left behind."""
    assert generate(0, 8000, 1000) == parts
    assert generate(1, 8000, 1000) != parts


def test_rows_do_not_depend_on_the_order_of_hashes() -> None:
    """Processes with different hash seeds, as the workers of a job have, write the same corpus."""
    program = "from recipes.synthetic.grammar import generate; print(generate(4, 120, 40))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {f"{generate(4, 120, 40)}\n".encode()}


def test_the_global_random_state_is_left_alone() -> None:
    """Writing a corpus neither reads nor moves the generator that the rest of a run may use."""
    random.seed(11)
    before = random.getstate()
    generate(0, 40, 8)
    assert random.getstate() == before


# --- the rows -----------------------------------------------------------------------------------------------


def test_the_columns_are_those_of_cola(parts: tuple[list[Row], list[Row]]) -> None:
    """A star marks the unacceptable rows and only those."""
    assert {(row.label, row.mark) for rows in parts for row in rows} == {(1, ""), (0, "*")}


def test_sentences_are_plain_lower_case_words(parts: tuple[list[Row], list[Row]]) -> None:
    """Words are divided by single spaces, and there are from 3 to 14 of them."""
    for rows in parts:
        for row in rows:
            words = row.sentence.split(" ")
            assert all(word.isascii() and word.isalpha() and word.islower() for word in words), row
            assert 3 <= len(words) <= 14, row


def test_evaluation_needs_no_new_words(parts: tuple[list[Row], list[Row]]) -> None:
    """A vocabulary made from the training part covers the evaluation part."""
    vocabularies = [{word for row in rows for word in row.sentence.split()} for rows in parts]
    assert vocabularies[1] <= vocabularies[0]
    assert 100 <= len(vocabularies[0]) <= 250


def test_no_sentence_has_both_labels() -> None:
    """What one seed calls acceptable no other one calls bad: the label is the grammar's and not chance's."""
    labels: dict[str, int] = {}
    for seed in range(6):
        for rows in generate(seed, 8000, 1000):
            for row in rows:
                assert labels.setdefault(row.sentence, row.label) == row.label, row


@pytest.mark.parametrize("seed", SEEDS)
def test_no_word_gives_the_label_away(seed: int) -> None:
    """Every word is found with both labels, and the frequent ones with neither nearly all the time."""
    counts: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}
    for row in generate(seed, 8000, 1000)[0]:
        counts[row.label].update(row.sentence.split())
    assert set(counts[0]) == set(counts[1])
    for word in counts[1]:
        total = counts[0][word] + counts[1][word]
        assert total < 100 or 0.2 < counts[1][word] / total < 0.8, (word, counts[1][word], total)


# --- the pairs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["agreement", "reflexive", "argument_structure"])
def test_the_members_of_a_pair_differ_in_one_word(source: str) -> None:
    """A pair is minimal: one word is another one, and the rest is the same."""
    for good, bad in drawn(source):
        differing = [pair for pair in zip(good.split(), bad.split(), strict=True) if pair[0] != pair[1]]
        assert len(differing) == 1, (good, bad)


def test_word_order_pairs_differ_in_two_neighbours() -> None:
    """Both members have the same words, and just two neighbours have changed places."""
    for good, bad in drawn("word_order"):
        words, moved = good.split(), bad.split()
        at = next(at for at, (one, other) in enumerate(zip(words, moved, strict=True)) if one != other)
        assert moved == [*words[:at], words[at + 1], words[at], *words[at + 2 :]], (good, bad)


def test_verbs_agree_with_the_subject() -> None:
    """The forms in the acceptable sentence and in the other one are those of different numbers."""
    forms = [("is", "are"), ("was", "were"), ("has", "have")]
    forms += [(verb.singular, verb.plural) for verb in grammar.INTRANSITIVE]
    for good, bad in drawn("agreement"):
        words = good.split()
        swapped = next(pair for pair in zip(words, bad.split(), strict=True) if pair[0] != pair[1])
        plural = words[0] in ("these", "many")
        assert swapped in forms or swapped[::-1] in forms, (good, bad)
        if words[0] != "the":
            assert (swapped[::-1] if plural else swapped) in forms, (good, bad)


def test_agreement_has_attractors_of_the_other_number() -> None:
    """Some subjects are followed by a noun that the bad verb would go with: the nearest noun is no guide."""
    plurals = {noun.plural for noun in grammar.PEOPLE + grammar.THINGS + grammar.MACHINES}
    misled = 0
    for good, bad in drawn("agreement"):
        words = good.split()
        at = next(at for at, (one, other) in enumerate(zip(words, bad.split(), strict=True)) if one != other)
        misled += words[0] in ("this", "every") and words[at - 1] in plurals
    assert misled > 50


def test_reflexives_refer_to_the_subject() -> None:
    """A subject with a gender of its own takes the reflexive of that gender, whatever noun comes between."""
    expected = {noun.singular: "himself" for noun in grammar.MALE}
    expected |= {noun.singular: "herself" for noun in grammar.FEMALE}
    expected |= {noun.singular: "itself" for noun in grammar.MACHINES}
    expected |= {noun.plural: "themselves" for noun in grammar.PEOPLE + grammar.MACHINES}
    for good, bad in drawn("reflexive"):
        subject = good.split()[1]
        assert good.split()[-1] == expected[subject], good
        assert bad.split()[-1] in set(REFLEXIVES) - {expected[subject]}, bad


def test_verbs_do_not_change_their_class() -> None:
    """No verb is in two classes that the pairs play against each other."""
    intransitive = {verb.past for verb in grammar.INTRANSITIVE}
    classes = [intransitive, set(grammar.THING_VERBS), set(grammar.GIVING)]
    assert sum(map(len, classes)) == len(set().union(*classes))


def test_verbs_that_allow_both_frames_are_in_no_class() -> None:
    """Both "the boy ate" and "the boy ate the cake" are fine, so such verbs would make wrong labels."""
    verbs = {verb.past for verb in grammar.INTRANSITIVE} | set(grammar.THING_VERBS) | set(grammar.GIVING)
    assert not verbs & {
        "ate",
        "read",
        "wrote",
        "sang",
        "cooked",
        "walked",
        "ran",
        "opened",
        "broke",
        "noticed",
    }


# --- some sentences by hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ("agreement", r"the keys (near|behind) the \w+ are \w+", r"the keys (near|behind) the \w+ is \w+"),
        ("agreement", r"every \w+ sleeps", r"every \w+ sleep"),
        ("reflexive", r"the king \w+ himself", r"the king \w+ herself"),
        ("word_order", r"the old \w+ (will|did not) \w+ in \w+", r"the \w+ old (will|did not) \w+ in \w+"),
        ("argument_structure", r"\w+ \w+ repaired the vase", r"\w+ \w+ sneezed the vase"),
        ("argument_structure", r"the \w+ gave the \w+ the \w+", r"the \w+ praised the \w+ the \w+"),
        ("argument_structure", r"every \w+ praised the \w+", r"every \w+ handed the \w+"),
    ],
)
def test_expected_pairs_are_drawn(source: str, good: str, bad: str) -> None:
    """Textbook examples of each phenomenon come out, with the star on the right member."""
    assert any(re.fullmatch(good, one) and re.fullmatch(bad, other) for one, other in drawn(source, 40_000))
    assert not any(re.fullmatch(bad, one) and re.fullmatch(good, other) for one, other in drawn(source))


def test_a_swap_makes_the_word_come_after_its_neighbour() -> None:
    """By hand: the second word and the third one change places."""
    assert grammar._swapped(["the", "old", "nun", "slept"], 1) == ["the", "nun", "old", "slept"]


def test_shares_are_as_even_as_can_be() -> None:
    """By hand: 5 pairs are needed for 9 or 10 sentences, and the first phenomenon gives two of them."""
    assert grammar._shares(8000) == [1000, 1000, 1000, 1000]
    assert grammar._shares(9) == grammar._shares(10) == [2, 1, 1, 1]
    assert grammar._shares(0) == [0, 0, 0, 0]
