"""A seeded corpus of linguistic acceptability, written by a small grammar of English.

A stand-in for CoLA without a download. Sentences come in minimal pairs: an acceptable one, and one that differs only in
what makes it unacceptable. Every word occurs with both labels, and counting words classifies about six sentences of ten
correctly, so a model has to learn the grammar:

    agreement            the keys near the vase are dirty        * the keys near the vase is dirty
    reflexive            the king behind the nun praised himself * the king behind the nun praised herself
    word_order           the old nun slept in rome               * the nun old slept in rome
    argument_structure   the prince repaired the vase            * the prince sneezed the vase
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# --- the lexicon --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noun:
    singular: str
    plural: str


@dataclass(frozen=True)
class Verb:
    """An intransitive verb: `sleeps`, `sleep` (also the bare form) and `slept`."""

    singular: str
    plural: str
    past: str


def _nouns(text: str) -> tuple[Noun, ...]:
    return tuple(Noun(*entry.split("/")) for entry in text.split())


# Only these nouns determine the gender of a reflexive: "the teacher" can be himself or herself.
MALE = _nouns("boy/boys king/kings uncle/uncles prince/princes monk/monks")
FEMALE = _nouns("girl/girls queen/queens aunt/aunts princess/princesses nun/nuns")
PROFESSIONS = _nouns("teacher/teachers doctor/doctors pilot/pilots artist/artists")
PEOPLE = MALE + FEMALE + PROFESSIONS

# Things small enough to be handed to someone.
THINGS = _nouns("key/keys clock/clocks camera/cameras radio/radios vase/vases violin/violins toy/toys")
MACHINES = _nouns("machine/machines computer/computers engine/engines printer/printers")

PLACES = ("paris", "rome", "london", "berlin", "madrid", "oslo", "vienna", "lisbon")

SINGULAR_DETERMINERS = ("the", "this", "every")
PLURAL_DETERMINERS = ("the", "these", "many")
PLURAL_SHARE = 0.3  # of subjects and objects: the singular is the more frequent number, as in real text

PERSON_ADJECTIVES = ("old", "young", "tall", "clever", "famous", "rich", "lazy", "shy")
THING_ADJECTIVES = ("heavy", "dirty", "expensive", "beautiful", "modern", "cheap", "large")
# All of them can stand before the verb.
ADVERBS = ("often", "never", "rarely", "suddenly", "secretly", "sometimes", "always", "quietly")

# These never have an object. Left out: "walked the dog", "vanished the coin", "fell the tree".
INTRANSITIVE = (
    Verb("sleeps", "sleep", "slept"),
    Verb("sneezes", "sneeze", "sneezed"),
    Verb("yawns", "yawn", "yawned"),
    Verb("faints", "faint", "fainted"),
    Verb("shivers", "shiver", "shivered"),
)

# These have exactly one object. Left out: "the boy ate", "the aunt bought him a key".
PERSON_OR_THING_VERBS = ("admired", "ignored", "described", "praised")
THING_VERBS = (*PERSON_OR_THING_VERBS, "repaired", "damaged")
GIVING = ("gave", "handed")  # have two objects: "the aunt handed the boy" lacks one
MACHINE_VERBS = ("repaired", "damaged", "restarted")  # what a machine can do to itself

REFLEXIVES = ("himself", "herself", "itself", "themselves")

# Words that must precede the next word. Not adjectives of things, since "ignored the vase dirty" can be read as "while
# it was dirty", and not adverbs, which may follow their verbs.
LEADING = {*SINGULAR_DETERMINERS, *PLURAL_DETERMINERS, *PERSON_ADJECTIVES, "will", "did", "not", "in", "near"}

# --- phrases ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phrase:
    """A noun phrase, and the number that its verb must agree with."""

    text: str
    plural: bool


def maybe(rng: random.Random, text: str) -> str:
    """`text` or nothing with equal probability, so that sentences differ in length."""
    return text if rng.random() < 0.5 else ""


def join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def noun_phrase(rng: random.Random, nouns: Sequence[Noun], adjective: str = "") -> Phrase:
    noun, plural = rng.choice(nouns), rng.random() < PLURAL_SHARE
    determiner = rng.choice(PLURAL_DETERMINERS if plural else SINGULAR_DETERMINERS)
    return Phrase(join(determiner, adjective, noun.plural if plural else noun.singular), plural)


def person(rng: random.Random) -> Phrase:
    """A subject for any verb: `these tall pilots`."""
    return noun_phrase(rng, PEOPLE, adjective=maybe(rng, rng.choice(PERSON_ADJECTIVES)))


def thing(rng: random.Random) -> Phrase:
    """An object: `every expensive vase`."""
    return noun_phrase(rng, THINGS, adjective=maybe(rng, rng.choice(THING_ADJECTIVES)))


def place(rng: random.Random) -> str:
    return join(rng.choice(("in", "near")), rng.choice(PLACES))


def attractor(rng: random.Random, nouns: Sequence[Noun]) -> str:
    """A noun in either number between the subject and its verb: `the keys`."""
    noun = rng.choice(nouns)
    return join("the", rng.choice((noun.singular, noun.plural)))


def person_modifier(rng: random.Random) -> str:
    other = attractor(rng, PEOPLE)
    verb = rng.choice(PERSON_OR_THING_VERBS)
    return rng.choice((f"near {other}", f"behind {other}", f"who {verb} {other}", f"who {other} {verb}"))


def thing_modifier(rng: random.Random) -> str:
    near = attractor(rng, THINGS + MACHINES)
    owner = attractor(rng, PEOPLE)
    return rng.choice((f"near {near}", f"behind {near}", f"that {owner} {rng.choice(THING_VERBS)}"))


# --- the phenomena: each draws a minimal pair --------------------------------------------------------------

Pair = tuple[str, str]  # acceptable, unacceptable
Forms = tuple[str, str]  # singular, plural


def person_predicate(rng: random.Random) -> tuple[Forms, str]:
    """Both forms of a verb for a person, and the rest of the sentence."""
    kind = rng.randrange(3)
    if kind == 0:
        verb = rng.choice(INTRANSITIVE)
        return (verb.singular, verb.plural), maybe(rng, place(rng))
    if kind == 1:
        verb_past = rng.choice(THING_VERBS)
        return ("has", "have"), join(verb_past, thing(rng).text)
    return rng.choice((("is", "are"), ("was", "were"))), rng.choice(PERSON_ADJECTIVES)


def thing_predicate(rng: random.Random) -> tuple[Forms, str]:
    return rng.choice((("is", "are"), ("was", "were"))), rng.choice(THING_ADJECTIVES)


def agreement(rng: random.Random) -> Pair:
    """The verb agrees with its subject, not with a noun that is closer."""
    if rng.random() < 0.5:
        subject, modifier = person(rng), person_modifier(rng)
        (singular, plural), rest = person_predicate(rng)
    else:
        subject, modifier = noun_phrase(rng, THINGS + MACHINES), thing_modifier(rng)
        (singular, plural), rest = thing_predicate(rng)
    start = join(subject.text, maybe(rng, modifier))
    good, bad = (plural, singular) if subject.plural else (singular, plural)
    return join(start, good, rest), join(start, bad, rest)


def reflexive_subject(rng: random.Random, pronoun: str) -> tuple[str, str]:
    """A subject for `pronoun`, and a verb. Not "every": many speakers accept "every boy praised themselves"."""
    plural = pronoun == "themselves"
    determiner = rng.choice(PLURAL_DETERMINERS if plural else ("the", "this"))
    if pronoun == "itself" or (plural and rng.random() < 0.25):
        nouns, modifier, verb = MACHINES, thing_modifier(rng), rng.choice(MACHINE_VERBS)
    else:
        nouns = {"himself": MALE, "herself": FEMALE, "themselves": PEOPLE}[pronoun]
        modifier, verb = person_modifier(rng), rng.choice(PERSON_OR_THING_VERBS)
    noun = rng.choice(nouns)
    return join(determiner, noun.plural if plural else noun.singular, maybe(rng, modifier)), verb


def reflexive(rng: random.Random) -> Pair:
    """The reflexive has the number and gender of the subject."""
    good, bad = rng.sample(REFLEXIVES, 2)
    subject, verb = reflexive_subject(rng, good)
    start = join(subject, maybe(rng, rng.choice(ADVERBS)), verb)
    return join(start, good), join(start, bad)


def word_order(rng: random.Random) -> Pair:
    """A word follows the one that it must precede: `the nun old`, `sleep will`, `rome in`."""
    subject, auxiliary = person(rng).text, rng.choice(("", "will", "did not", rng.choice(ADVERBS)))
    verb = rng.choice(INTRANSITIVE)
    if auxiliary in ("will", "did not"):
        rest = join(verb.plural, place(rng))
    elif rng.random() < 0.5:
        rest = join(verb.past, place(rng))
    else:
        rest = join(rng.choice(THING_VERBS), thing(rng).text, maybe(rng, place(rng)))
    words = join(subject, auxiliary, rest).split()
    swaps = [at for at, word in enumerate(words) if word in LEADING]
    at = rng.choice(swaps)
    return " ".join(words), " ".join([*words[:at], words[at + 1], words[at], *words[at + 2 :]])


def no_object(rng: random.Random) -> tuple[str, str, str]:
    """`slept in rome`, * `repaired in rome`."""
    return rng.choice(INTRANSITIVE).past, rng.choice(THING_VERBS), maybe(rng, place(rng))


def one_object(rng: random.Random) -> tuple[str, str, str]:
    """`repaired the vase`, * `slept the vase`."""
    return rng.choice(THING_VERBS), rng.choice(INTRANSITIVE).past, thing(rng).text


def two_objects(rng: random.Random) -> tuple[str, str, str]:
    """`handed the boy the key`, * `praised the boy the key`."""
    objects = join(noun_phrase(rng, PEOPLE).text, noun_phrase(rng, THINGS).text)
    return rng.choice(GIVING), rng.choice(PERSON_OR_THING_VERBS), objects


def person_object(rng: random.Random) -> tuple[str, str, str]:
    """`praised the boy`, * `handed the boy`."""
    return rng.choice(PERSON_OR_THING_VERBS), rng.choice(GIVING), person(rng).text


# Every class of verbs is right in one frame and wrong in another, so no verb determines the label. The frames have
# different frequencies: a small model learns them only if verbs correlate a little with the label.
FRAMES = (no_object, *[one_object] * 3, *[two_objects] * 2, person_object)


def argument_structure(rng: random.Random) -> Pair:
    """A verb has exactly the objects that it needs."""
    good, bad, complement = rng.choice(FRAMES)(rng)
    start = join(person(rng).text, maybe(rng, rng.choice(ADVERBS)))
    return join(start, good, complement), join(start, bad, complement)


PHENOMENA: dict[str, Callable[[random.Random], Pair]] = {
    "agreement": agreement,
    "reflexive": reflexive,
    "word_order": word_order,
    "argument_structure": argument_structure,
}

# --- the corpus ---------------------------------------------------------------------------------------------

MOST_DRAWS = 50_000  # draws of one phenomenon before it counts as exhausted


@dataclass(frozen=True)
class Row:
    """`source`: the phenomenon. `label`: 1 for acceptable."""

    source: str
    label: int
    sentence: str


def generate(seed: int, train_size: int, eval_size: int) -> tuple[list[Row], list[Row]]:
    """A training and an evaluation set of these sizes; the same seed gives the same rows.

    No sentence occurs twice, and no minimal pair is split between the sets, so that the pairs of the evaluation set are
    unseen. In a set of odd size one sentence has no partner. Raises ValueError if the grammar has too few sentences.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    train: list[Row] = []
    held_out: list[Row] = []
    for source, for_train, for_eval in zip(PHENOMENA, _shares(train_size), _shares(eval_size), strict=True):
        pairs = _fresh_pairs(rng, source, for_train + for_eval, seen)
        if len(pairs) < for_train + for_eval:
            raise ValueError(
                f"of {train_size + eval_size} sentences the grammar can generate only about "
                f"{2 * len(pairs) * len(PHENOMENA)}"
            )
        rows = [Row(source, label, pair[1 - label]) for pair in pairs for label in (1, 0)]
        train += rows[: 2 * for_train]
        held_out += rows[2 * for_train :]
    train, held_out = train[:train_size], held_out[:eval_size]  # one less than there are, if the size is odd
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def _shares(size: int) -> list[int]:
    """Pairs of each phenomenon for a set of `size` sentences, as evenly as possible."""
    pairs, kinds = (size + 1) // 2, len(PHENOMENA)
    return [pairs // kinds + (kind < pairs % kinds) for kind in range(kinds)]


def _fresh_pairs(rng: random.Random, source: str, wanted: int, seen: set[str]) -> list[Pair]:
    """Up to `wanted` pairs of sentences that are not in `seen`, which they are added to."""
    pairs: list[Pair] = []
    for _ in range(MOST_DRAWS):
        if len(pairs) == wanted:
            break
        pair = PHENOMENA[source](rng)
        if seen.isdisjoint(pair):
            seen.update(pair)
            pairs.append(pair)
    return pairs
