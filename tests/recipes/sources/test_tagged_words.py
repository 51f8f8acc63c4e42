"""Words and tags from rows of lists and from CoNLL's form; malformed ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from recipes.sources.tagged_words import TaggedWords
from recipes.tasks.token_classification import TaggedCorpus
from runner.errors import UserError

pytestmark = pytest.mark.usefixtures("here")

WORDS = [["EU", "rejects", "call", "."], ["Peter", "Blackburn"]]
TAGS = [["B-ORG", "O", "O", "O"], ["B-PER", "I-PER"]]
NAMES = ("B-ORG", "B-PER", "I-PER", "O")
NUMBERS = [[0, 3, 3, 3], [1, 2]]

CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
call NN I-NP O
. . O O

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER
"""
TWO = "EU B-ORG\nrejects O\ncall O\n. O\n\nPeter B-PER\nBlackburn I-PER\n\n\n"


def read(name: str, content: str | None = None, evaluation: str | None = None, **settings: Any) -> TaggedCorpus:
    if content is not None:
        Path(name).write_text(content)
        Path(f"eval-{name}").write_text(content if evaluation is None else evaluation)
    return TaggedWords(**{"train": name, "eval": f"eval-{name}" if content is not None else name, **settings}).read()


def json_lines(words: list[Any], tags: list[Any], names: tuple[str, str] = ("tokens", "tags")) -> str:
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in zip(words, tags, strict=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", json_lines(WORDS, TAGS)),
        ("t.json", json.dumps([{"tokens": words, "tags": tags} for words, tags in zip(WORDS, TAGS, strict=True)])),
        ("t.conll", CONLL_2003),
        ("t.txt", TWO),
        ("t.tsv", TWO.replace(" ", "\t")),
        ("t.bio", "\ufeff" + TWO.replace("\n", "\r\n")),
    ],
)
def test_forms(name: str, content: str) -> None:
    """The same sentences from each; tags are sorted and the result is told."""
    corpus = read(name, content)
    assert (corpus.train.words, corpus.train.tags, corpus.names) == (WORDS, NUMBERS, NAMES)
    assert corpus.digest == read("other.jsonl", json_lines(WORDS, TAGS)).digest
    assert any("B-ORG, B-PER, I-PER, O" in note for note in corpus.notes)


def test_typed_data_sets() -> None:
    """Numbers have the names of the data set, or those that are set."""
    tags = ["O", "B-PER", "I-PER", "B-ORG"]
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=tags))})
    rows = Dataset.from_dict({"tokens": WORDS, "ner_tags": [[3, 0, 0, 0], [1, 2]]}, features=features)
    rows.to_parquet("t.parquet")
    rows.save_to_disk("saved")
    for name in ("t.parquet", "saved"):
        corpus = read(name, tags_column="ner_tags")
        assert (corpus.names, corpus.train.tags, corpus.notes) == (tuple(tags), [[3, 0, 0, 0], [1, 2]], corpus.notes)
        assert not any("inferred" in note for note in corpus.notes)
    other = read("t.parquet", tags_column="ner_tags", label_names=["-", "P", "p", "G"])
    assert (other.names, other.train.tags) == (("-", "P", "p", "G"), [[3, 0, 0, 0], [1, 2]])
    named = read("t.jsonl", json_lines(WORDS, TAGS), label_names=[*NAMES[::-1], "B-LOC"])
    assert named.train.tags == [[3, 0, 0, 0], [2, 1]]


def test_columns_of_conll() -> None:
    """Other columns by position; words keep white space that separates no columns."""
    corpus = read("t.conll", CONLL_2003, tags_column=1)
    assert corpus.names == (".", "NN", "NNP", "VBZ")
    words = read("t.conll", "1\tNew\u00a0York\tB-LOC\n2\tis here\tO\n", tokens_column=1).train.words
    assert words == [["New\u00a0York", "is here"]]


def test_one_part_alone() -> None:
    """Tags are those of a model; without them every sentence, whether it has tags or not."""
    Path("t.conll").write_text(TWO)
    part = TaggedWords(eval="t.conll").read_evaluation(None, NAMES[::-1])
    assert part.tags == [[3, 0, 0, 0], [2, 1]]
    assert len(TaggedWords(eval="t.conll", max_eval_samples=1).read_evaluation(None, NAMES)) == 1
    Path("words.txt").write_text("EU\nrejects\n\nPeter\n")
    Path("words.jsonl").write_text(json.dumps({"tokens": ["EU", "rejects"]}) + "\n" + json.dumps({"tokens": ["Peter"]}))
    for name in ("words.txt", "words.jsonl"):
        assert TaggedWords(max_eval_samples=1).read_evaluation(name).words == [["EU", "rejects"], ["Peter"]]
    assert TaggedWords().read_evaluation("t.conll").tags is None
    with pytest.raises(UserError, match=r"'B-ORG'.*the model does not know"):
        TaggedWords(eval="t.conll").read_evaluation(None, ["O", "B-PER", "I-PER"])


@pytest.mark.parametrize(
    ("name", "content", "settings", "words"),
    [
        ("t.jsonl", json_lines(WORDS, [TAGS[0], ["O"]]), {}, "row 2 has 2 words and 1 tags"),
        ("t.jsonl", json_lines(WORDS, [TAGS[0], ["O", None]]), {}, "row 2 has no tag for word 2, 'Blackburn'"),
        ("t.jsonl", json_lines(WORDS, [TAGS[0], None]), {}, "row 2 has no list of tags in 'tags'"),
        ("t.jsonl", json_lines([WORDS[0], ["Peter", ""]], TAGS), {}, "row 2 has no text as word 2"),
        ("t.jsonl", json_lines([WORDS[0], []], [TAGS[0], []]), {}, "row 2 has no words"),
        ("t.conll", TWO.replace("call", "ca\0ll"), {}, "the sentence from line 1 has NUL characters"),
        ("t.jsonl", json_lines(WORDS, TAGS, ("tokens", "ner_tags")), {}, "recipe.data.tags_column=tags is invalid"),
        ("t.jsonl", json_lines(["a b", "c"], ["O", "O"]), {}, "row 1 has no list of tags"),
        ("t.jsonl", json_lines(WORDS, [["O"] * 4, ["O"] * 2]), {}, "only the tag 'O'"),
        ("t.jsonl", json_lines(WORDS, TAGS), {"label_names": ["O", "B-ORG", "B-PER"]}, "row 2 has the tag 'I-PER'"),
        ("t.jsonl", json_lines(WORDS, TAGS), {"label_names": [False, "B-ORG"]}, "recipe.data.label_names="),
        ("t.conll", TWO.replace("call O", "call"), {}, "t.conll: line 3 has 1 column"),
        ("t.conll", TWO, {"tags_column": 2}, "line 1 has 2 columns"),
        ("t.conll", TWO, {"tags_column": "ner"}, "recipe.data.tags_column=ner"),
        ("t.tsv", TWO.replace(" ", "\t").replace("call\tO", "call\t"), {}, "line 1 has no tag for word 3, 'call'"),
        ("t.conll", "\n\n", {}, "has no sentences"),
        ("t.csv", "tokens,tags\n", {}, "t.csv has no lists of words"),
        ("t.conll", TWO, {"train": "nowhere"}, "recipe.data.train=nowhere does not exist"),
    ],
)
def test_what_cannot_be_used(name: str, content: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read(name, content, **settings)
    assert words in str(caught.value)
    assert "recipe.data." in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_tag_of_the_evaluation_set() -> None:
    with pytest.raises(UserError) as caught:
        read("t.conll", TWO, TWO + "Oslo B-LOC\n")
    assert "recipe.data.eval=eval-t.conll: the sentence from line 10 has the tag 'B-LOC'" in str(caught.value)
    assert read("t.conll", TWO, TWO + "Oslo B-LOC\n", label_names=[*NAMES, "B-LOC"]).eval.tags[-1:] == [[4]]
