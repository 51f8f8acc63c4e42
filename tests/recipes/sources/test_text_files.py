"""Labelled texts from files and from the Hub: no row is lost, and a malformed one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from recipes.sources.text_files import TextFiles
from recipes.tasks.classification import Corpus, LabelledText
from runner.errors import UserError

COLA = "s\t0\t*\tbad it is\ns\t1\t\tit is good\n"
HEADER = "id\tgold\tsentence1\tsentence2\n"
PAIRS_TSV = HEADER + "7\t1\tA dog ran.\tIt ran.\n8\t0\tIt fell.\tNothing fell.\n"
PAIRS_JSON = [
    {"gold": 1, "sentence1": "A dog ran.", "sentence2": "It ran.", "genre": "x"},
    {"gold": 0, "sentence1": "It fell.", "sentence2": "Nothing fell."},
]
PAIRS = LabelledText(["A dog ran.", "It fell."], [1, 0], ["It ran.", "Nothing fell."])
BY_POSITION: dict[str, Any] = {"text_column": 3, "label_column": 1, "columns": 4}
BY_NAME: dict[str, Any] = {"text_column": "sentence1", "pair_column": "sentence2", "label_column": "gold"}
NAMED = ("columns inferred: text 'text', label 'label'",)
NAMES = ["entailment", "neutral", "contradiction"]


def json_lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(train: str | bytes, evaluation: str | bytes | None = None, /, suffix: str = ".tsv", **settings: Any) -> Corpus:
    for part, content in (("train", train), ("eval", train if evaluation is None else evaluation)):
        Path(part + suffix).write_bytes(content if isinstance(content, bytes) else content.encode())
    files = {"train": f"train{suffix}", "eval": f"eval{suffix}"}
    return TextFiles(**{**files, **settings}).read()


def refusal(*content: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(*content, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is read -------------------------------------------------------------------------------------------


def test_columns_by_position(here: Path) -> None:
    corpus = read(COLA, "s\t1\t\tone\ns\t0\t\ttwo\n", **BY_POSITION)
    assert corpus.train == LabelledText(["bad it is", "it is good"], [0, 1])
    assert corpus.eval == LabelledText(["one", "two"], [1, 0])
    assert corpus.source == "train.tsv, eval.tsv"


@pytest.mark.parametrize(
    "text",
    [
        *(
            '"he said',
            '"a" "b',
            "'tis",
            "\\n a backslash",
            "a,b;c",
            "line\u2028separator",
            "form\x0cfeed and \x1c more",
        ),
        *("next\x85line", "a lone \r return", "ärger · 北京 · 🙂", "# no comment", "NA", "null", "1.5"),
    ],
)
def test_no_row_is_lost(here: Path, text: str) -> None:
    """Quotes, markers of missing values and other line separators are text: pandas' defaults would change them."""
    lines = [f"s\t{number % 2}\t\t{text if number in (1, 3) else 'row'}" for number in range(6)]
    corpus = read("\n".join(lines), **BY_POSITION)
    assert corpus.train == LabelledText(["row", text, "row", text, "row", "row"], [0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(
    "content", [COLA.rstrip("\n"), COLA.replace("\n", "\r\n"), "\ufeff" + COLA, COLA.replace("\n", "\n\n  \n")]
)
def test_line_ends_blank_lines_and_byte_order_mark(here: Path, content: str) -> None:
    assert read(content, **BY_POSITION).digest == read(COLA, **BY_POSITION).digest


def test_columns_by_name(here: Path) -> None:
    """The same pairs from a file with a header, in any order of columns, from JSON Lines and by position."""
    moved = "sentence2\tsentence1\tgold\nIt ran.\tA dog ran.\t1\nNothing fell.\tIt fell.\t0\n"
    position = {"text_column": 2, "pair_column": 3, "label_column": 1, "columns": 4}
    found = [
        read(PAIRS_TSV, **BY_NAME),
        read(moved.replace("\t", " \t "), **BY_NAME),
        read(json_lines(*PAIRS_JSON) + "\n", suffix=".jsonl", **BY_NAME),
        read(PAIRS_TSV.removeprefix(HEADER), **position),
    ]
    assert all(corpus.train == PAIRS for corpus in found)
    assert len({corpus.digest for corpus in found}) == 1
    assert read(PAIRS_TSV, **{**BY_NAME, "pair_column": None}).train.pairs is None


@pytest.mark.parametrize("form", ["[1].csv", "tsv", "parquet"])
def test_formats(here: Path, form: str) -> None:
    """The same rows from tables and from typed data, whose class label's names are the classes."""
    features = Features({"label": ClassLabel(names=["ham", "spam"]), "text": Value("string")})
    named = Dataset.from_dict({"label": ["ham", "spam", "spam", "ham"], "text": LONG})
    named.to_csv("data.[1].csv")  # no pattern
    named.to_csv("data.tsv", sep="\t")
    Dataset.from_dict({"label": [0, 1, 1, 0], "text": LONG}, features=features).to_parquet("data.parquet")
    corpus = TextFiles(train=f"data.{form}", eval=f"data.{form}").read()
    assert (corpus.train.texts, corpus.train.labels, corpus.label_names) == (LONG, [0, 1, 1, 0], ("ham", "spam"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.parquet", b"no parquet", "x.parquet cannot be read as .parquet data"),
        ("x.json", b'{"label": [', "x.json cannot be read as .json data"),
        ("x.xlsx", b"", "x.xlsx is a .xlsx file, which is not read"),
        ("x.jsonl", b"", "x.jsonl"),
        ("x.csv", b"\n \n", "x.csv is empty"),
        ("twice.csv", b"text,text\na,b\n", "twice.csv has two columns of the name 'text'"),
    ],
)
def test_files_that_cannot_be_read(here: Path, name: str, content: bytes, words: str) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        TextFiles(train=name, eval=name).read()
    assert str(caught.value).startswith("recipe.data.train=")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_with_several_splits(here: Path) -> None:
    DatasetDict(dev=Dataset.from_dict({"text": LONG, "label": CLASSES})).save_to_disk("saved")
    with pytest.raises(UserError, match=r"recipe\.data\.train=saved .* give saved/dev"):
        TextFiles(train="saved", eval="saved").read()
    assert TextFiles(train="saved/dev", eval="saved/dev").read().train.texts == LONG


def test_label_names_skipped_labels_and_limits(here: Path) -> None:
    """Labels are names or their numbers; limits count the rows that are not skipped."""
    rows = "a\tneutral\nb\t-\nc\tentailment\nd\t2\ne\t-\nf\tneutral\n"
    settings: dict[str, Any] = {"text_column": 0, "label_column": 1, "columns": 2, "label_names": NAMES}
    corpus = read(rows, **settings, skip_labels=["-"], max_eval_samples=2)
    assert corpus.train == LabelledText(["a", "c", "d", "f"], [1, 0, 2, 1])
    assert (len(corpus.eval), corpus.label_names, corpus.train.notes) == (2, tuple(NAMES), ())
    # Names that look like numbers are names.
    stars = read("a\t1\nb\t2\nc\t3\n", **{**settings, "label_names": ["1", "2", "3"]})
    assert stars.train.labels == [0, 1, 2]
    assert "'-'" in refusal(rows, **settings)
    assert "did you mean 'neutral'" in refusal("a\tnuetral\n", **settings)


def test_comma_separated(here: Path) -> None:
    """Quotes as in RFC 4180, and lines as an editor counts them, although a quoted text has line ends."""
    rows = 'label,text\r\n1,"a ""b"", c\r\nd"\r\n\r\n0,e\r\n'
    settings: dict[str, Any] = {"suffix": ".csv", "text_column": "text", "label_column": "label"}
    assert read(rows, **settings).train == LabelledText(['a "b", c\r\nd', "e"], [1, 0])
    assert "line 6 has no text" in refusal(rows + "1,\n", **settings)
    assert "line 5" in refusal(rows + "1,f,g\n", **settings)  # pandas' own message
    assert read("1,a\n0,b\n", **{**settings, "text_column": 1, "label_column": 0, "columns": 2}).train.labels == [1, 0]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_of_a_csv(here: Path, separator: str) -> None:
    """Named by the header alone: texts may contain any of them, and a header of one name has none."""
    rows = [["text", "label"], ["a, b and c", "1"], ["d", "0"]]
    content = "\n".join(separator.join(f'"{cell}"' for cell in row) for row in rows)
    assert read(content, suffix=".csv").train == LabelledText(["a, b and c", "d"], [1, 0], notes=NAMED)
    Path("texts.csv").write_text(f'text\n"one{separator} two"\n')
    assert TextFiles(text_column="text").read_part("eval", "texts.csv").texts == [f"one{separator} two"]
    Path("bare.csv").write_text(f"one{separator} two\n")
    assert TextFiles(text_column=0, columns=1).read_part("eval", "bare.csv").texts == [f"one{separator} two"]
    no_header = refusal(content, suffix=".csv", text_column=0, label_column=1, columns=2)
    assert "1 column between commas" in no_header


def test_an_inferred_column_is_called_inferred(here: Path) -> None:
    content = table(text=LONG, label=["1.5", "2.5", "1.5", "2.5"])
    assert "recipe.data.label_column=label (inferred) has numbers such as" in refusal(content, suffix=".csv")
    typed = refusal(content, suffix=".csv", text_column="text", label_column="label")
    assert "recipe.data.label_column=label has numbers such as" in typed


# --- what is inferred ---------------------------------------------------------------------------------------

LONG = ["a rather long first text", "the second one is long too", "and so is the third one", "the fourth is the last"]


def table(**columns: list[Any]) -> str:
    return pandas.DataFrame(columns).to_csv(index=False)


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["spam", "ham", "ham", "spam"], ("ham", "spam"), [1, 0, 0, 1]),
        (["10", "9", "9", "-1"], ("-1", "9", "10"), [2, 1, 1, 0]),
        (["1", "0", "0", "1"], ("0", "1"), [1, 0, 0, 1]),
    ],
)
def test_labels_are_inferred(here: Path, labels: list[str], names: tuple[str, ...], numbers: list[int]) -> None:
    """They are numbered in their order, numbers by value, and the mapping is stated unless it changes nothing."""
    corpus = read(table(text=LONG, label=labels), suffix=".csv")
    assert (corpus.label_names, corpus.train.labels) == (names, numbers)
    stated = ", ".join(f"'{name}' is class {number}" for number, name in enumerate(names))
    assert any(stated in note for note in corpus.notes) is (names != ("0", "1"))


def test_numbers_do_not_replace_inferred_names(here: Path) -> None:
    assert "'1'" in refusal(table(text=LONG, label=list("abab")), table(text=LONG, label=list("ab11")), suffix=".csv")


CLASSES = ["b", "a", "a", "b"]


@pytest.mark.parametrize(
    ("columns", "text", "pair"),
    [
        ({"id": [1, 2, 3, 4], "Sentence": LONG, "Label": CLASSES}, LONG, None),
        ({"label": CLASSES, "subject": LONG, "n": [1, 2, 3, 4]}, LONG, None),  # by content
        ({"review": LONG, "stars": CLASSES}, LONG, None),
        ({"idx": [1, 2, 3, 4], "premise": LONG, "hypothesis": LONG[::-1], "label": CLASSES}, LONG, LONG[::-1]),
        ({"answer": LONG, "question": CLASSES, "label": CLASSES}, CLASSES, LONG),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_columns_are_inferred(here: Path, columns: dict[str, Any], text: Any, pair: Any, suffix: str) -> None:
    frame = pandas.DataFrame(columns)
    write: dict[str, Any] = {
        ".csv": lambda: frame.to_csv(index=False),
        ".tsv": lambda: frame.to_csv(index=False, sep="\t"),
        ".jsonl": lambda: frame.to_json(orient="records", lines=True),
    }
    corpus = read(write[suffix](), suffix=suffix)
    assert (corpus.train.texts, corpus.train.pairs, corpus.train.labels) == (text, pair, [1, 0, 0, 1])
    assert any("columns inferred" in note for note in corpus.notes)


@pytest.mark.parametrize(
    ("columns", "setting", "words"),
    [
        ({"text": LONG, "review": LONG, "label": CLASSES}, "text", "'text' and 'review'"),
        ({"title": LONG, "story": LONG[::-1], "label": CLASSES}, "text", "'title' and 'story'"),
        ({"text": LONG, "verdict": CLASSES, "source": CLASSES}, "label", "'verdict' and 'source'"),
        ({"text": LONG, "label": CLASSES, "target": CLASSES}, "label", "'label' and 'target'"),
        ({"text": LONG, "premise": LONG, "hypothesis": LONG, "label": CLASSES}, "text", "'premise'"),
        ({"text": LONG, "id": [1, 2, 3, 4]}, "label", "none"),
        ({"id": [1, 2, 3, 4], "label": CLASSES}, "text", "none"),
    ],
)
def test_ambiguous_columns(here: Path, columns: dict[str, Any], setting: str, words: str) -> None:
    """All columns are listed; the setting that the message names resolves it."""
    message = refusal(table(**columns), suffix=".csv")
    assert message.startswith(f"recipe.data.{setting}_column=null ")
    assert words in message
    assert all(name in message for name in columns)
    if words != "none":
        name = words.split("'")[-2]
        assert read(table(**columns), suffix=".csv", **{f"{setting}_column": name}).train.labels == [1, 0, 0, 1]


def test_first_row_is_not_lost_as_a_header(here: Path) -> None:
    rows = "".join(f"{text},{label}\n" for text, label in zip(LONG * 2, CLASSES * 2, strict=True))
    assert "header" in refusal(rows, suffix=".csv")


def test_evaluation_file_has_the_columns_of_the_training_file(here: Path) -> None:
    train = table(message=LONG, label=CLASSES)
    more = table(label=CLASSES, message=LONG, other=LONG[::-1])
    assert read(train, more, suffix=".csv").eval.texts == LONG
    assert "recipe.data.text_column=message" in refusal(train, table(text=LONG, label=CLASSES), suffix=".csv")


# --- one part alone -----------------------------------------------------------------------------------------


def test_part_with_given_classes(here: Path) -> None:
    """Classes are a saved model's, in its order, not those of a training file; numbers are classes too."""
    Path("new.csv").write_text(table(text=LONG, label=["spam", "spam", "0", "ham"]))
    part = TextFiles().read_part("eval", "new.csv", ["spam", "ham"])
    assert (part.texts, part.labels) == (LONG, [0, 0, 0, 1])
    assert len(TextFiles(eval="new.csv", max_eval_samples=2).read_part("eval", label_names=["spam", "ham"])) == 2
    with pytest.raises(UserError, match="'ham'"):
        TextFiles().read_part("eval", "new.csv", ["spam", "eggs"])


def test_part_without_labels(here: Path) -> None:
    """Every text in the order of the file, whatever limits and labels are configured."""
    Path("new.csv").write_text(table(text=LONG))
    source = TextFiles(max_eval_samples=2, label_column="gold", text_column="text", skip_labels=["-"])
    assert source.read_part("eval", "new.csv") == LabelledText(LONG, None)
    Path("pairs.jsonl").write_text(json_lines(*PAIRS_JSON))
    assert TextFiles().read_part("eval", "pairs.jsonl").pairs == PAIRS.pairs
    with pytest.raises(UserError, match=r"recipe\.data\.eval=null"):
        TextFiles().read_part("eval")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_a_file_to_predict_for_names_its_columns(here: Path, suffix: str) -> None:
    """Where columns of the training data have positions, a header is no text, whatever its columns are."""
    cola = TextFiles(columns=4, text_column=3, label_column=1)
    for names in (["sentence"], ["source", "label", "mark", "Sentence"], ["id", "text"]):
        columns = dict.fromkeys(names, LONG)
        lines = json_lines(*(dict.fromkeys(names, text) for text in LONG))
        separated = pandas.DataFrame(columns).to_csv(sep="," if suffix == ".csv" else "\t", index=False)
        Path(f"new{suffix}").write_text(lines if suffix == ".jsonl" else separated)
        part = cola.read_part("eval", f"new{suffix}")
        assert part.texts == LONG
        assert names[-1] in part.notes[0]
    Path("pairs.csv").write_text(table(premise=LONG, hypothesis=LONG))
    with pytest.raises(UserError, match="pairs of texts"):
        cola.read_part("eval", "pairs.csv")


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("s\t1\t\tfive\tcolumns", "line 4 has 5 columns, and the first line has 4"),
        ("s\t1\tthree columns", "line 4 has no text in recipe.data.text_column=3"),
        ("s\tyes\t\ttext", "line 4 has the label 'yes' in recipe.data.label_column=1"),
        ("s\t1.0\t\ttext", "line 4 has the label '1.0'"),
        ("s\t-1\t\ttext", "line 4 has the label '-1'"),
        ("s\t1234567\t\ttext", "line 4 has the label '1234567'"),
    ],
)
def test_malformed_lines(here: Path, line: str, words: str) -> None:
    """A malformed line is named by file and number as an editor counts it, blank lines included."""
    message = refusal(COLA, COLA + "\n" + line + "\n", **BY_POSITION)
    assert message.startswith("recipe.data.eval=eval.tsv")
    assert words in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ": line 3 is not JSON"),
        ("[1, 2]", ": line 3 is not a JSON object"),
        ('{"gold": 1, "sentence1": "A."}', ": row 3 has no text"),
        (json.dumps({**PAIRS_JSON[0], "sentence2": None}), ": row 3 has no text"),
        ('{"gold": "yes", "sentence1": "A.", "sentence2": "B."}', ": row 3 has the label 'yes'"),
    ],
)
def test_malformed_json_lines(here: Path, line: str, words: str) -> None:
    message = refusal(json_lines(*PAIRS_JSON) + line, suffix=".jsonl", **BY_NAME, label_names=["0", "1"])
    assert message.startswith("recipe.data.train=train.jsonl")
    assert words in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"s\t1\t\tcaf\xe9\n", "is not UTF-8 text (byte 8)"),
        (COLA.replace("\t", "  "), "has 1 column"),
        ("s\t1\t\ta\ns\t1\t\tb\n", "only labels of class 1"),
        ("s\t1\t\ta\ns\t\t\tb\n", "line 2 has no label"),
        (COLA + "s\t1\t\tno\0thing\n", "line 3 has NUL characters"),
        ("".join(f"s\tlabel {n}\t\ta\n" for n in range(30)), "30 different values"),
    ],
)
def test_content_that_cannot_be_used(here: Path, content: str | bytes, words: str) -> None:
    message = refusal(content, COLA, **BY_POSITION)
    assert words in message
    assert "recipe.data." in message


def test_classes_of_the_evaluation_set(here: Path) -> None:
    """They may be fewer than those of the training set, but not others."""
    assert read(COLA, "s\t1\t\tonly\n", **BY_POSITION).eval.labels == [1]
    assert "line 3 has the label '7'" in refusal(COLA, COLA + "s\t7\t\tx\n", **BY_POSITION)
    rows = "a\t0\nb\t1\n"
    settings: dict[str, Any] = {"text_column": 0, "label_column": 1, "columns": 2, "label_names": NAMES}
    assert "'contradiction'" in refusal(rows, **settings)  # a class that is never trained


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": "x.jsonl"}, "recipe.data.text_column=3 is invalid for x.jsonl"),
        ({"train": ".", "text_column": "a", "label_column": "b", "columns": None}, "recipe.data.train=. is a folder"),
        ({"eval": None, "hub_name": "owner/data"}, "owner/data"),
        ({"text_column": 4}, "recipe.data.text_column=4"),
        ({"label_column": -1}, "recipe.data.label_column=-1"),
        ({"label_column": "gold"}, "recipe.data.label_column=gold"),
        ({"columns": None}, "recipe.data.columns=null"),
        ({"columns": 5}, "recipe.data.columns=5"),
        ({"text_column": "sentense1", "label_column": "gold"}, "recipe.data.text_column=sentense1"),
        ({"label_names": ["one"]}, "recipe.data.label_names"),
        ({"label_names": [True, False]}, "recipe.data.label_names"),
        ({"skip_labels": "-"}, "recipe.data.skip_labels=-"),
        ({"text_column": None}, "recipe.data.label_column=1"),
        ({"text_column": None, "label_column": None, "pair_column": "b"}, "recipe.data.pair_column=b"),
        ({"label_column": None}, "recipe.data.label_column=null"),
        ({"skip_labels": ["0", "1"]}, "recipe.data.skip_labels"),
        ({"hub_pair": "hypothesis"}, "recipe.data.pair_column=null"),
    ],
)
def test_wrong_settings(here: Path, settings: dict[str, Any], words: str) -> None:
    Path("x.jsonl").write_text(json_lines({"text": "a", "label": "b"}))
    assert words in refusal(COLA, **{**BY_POSITION, **settings})


# --- the Hub ------------------------------------------------------------------------------------------------


def saved_splits(folder: Path, **splits: Dataset) -> str:
    """A folder that `load_dataset` reads like a data set of the Hub."""
    (folder / "data").mkdir(parents=True)
    for name, rows in splits.items():
        rows.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    return str(folder)


def test_data_set_of_the_hub(tmp_path: Path) -> None:
    """Labels are class numbers or names; splits, parts of them, columns and skipped labels are those configured."""
    texts = {"premise": ["a", "b", "c", "d"], "hypothesis": ["A", "B", "C", "D"]}
    hub = saved_splits(
        tmp_path / "data",
        numbers=Dataset.from_dict({**texts, "label": ["1", "0", "-1", "2"]}),
        names=Dataset.from_dict({**texts, "label": ["neutral", "entailment", "-1", "contradiction"]}),
        holes=Dataset.from_dict({**texts, "hypothesis": ["A", None, "C", "D"], "label": ["0", "1", "2", "0"]}),
    )

    def source(**changes: Any) -> TextFiles:
        given = {"hub_name": hub, "hub_train": "numbers", "hub_eval": "names[:2]"}
        columns = {"hub_text": "premise", "hub_pair": "hypothesis", "pair_column": 1, "columns": 3}
        settings = {"text_column": 0, "label_column": 2, "label_names": NAMES, "skip_labels": ["-1"]}
        return TextFiles(**{**given, **columns, **settings, **changes})  # type: ignore[arg-type]

    corpus = source().read()
    assert corpus.train == LabelledText(["a", "b", "d"], [1, 0, 2], ["A", "B", "D"])
    assert corpus.eval == LabelledText(["a", "b"], [1, 0], ["A", "B"])
    assert corpus.source == f"Hub: {hub}"
    for changes, words in (
        ({"hub_eval": "dev"}, "no split 'dev'"),
        ({"hub_label": "gold"}, "no column 'gold'"),
        ({"hub_train": "holes"}, r"split 'holes'\): row 2 has no text in recipe.data.hub_pair=hypothesis"),
        ({"skip_labels": []}, r"split 'numbers'\): row 3 has the label '-1'"),
        ({"hub_pair": None}, "recipe.data.hub_pair=null"),
    ):
        with pytest.raises(UserError, match=words):
            source(**changes).read()


def test_names_of_the_hub(tmp_path: Path) -> None:
    """A ClassLabel's names are the classes, unless others are configured; one split can be read alone."""
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    split = Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    hub = saved_splits(tmp_path / "hub", train=split, validation=split)
    corpus = TextFiles(text_column=0, label_column=1, columns=2, hub_name=hub).read()
    assert (corpus.label_names, corpus.train.labels, corpus.train.notes) == (("no", "yes"), [1, 0], ())
    assert TextFiles(hub_name=hub, label_names=["n", "y"]).read().label_names == ("n", "y")
    assert TextFiles(hub_name=hub).read_part("eval") == LabelledText(["a", "b"], None)


def test_loading_scripts_are_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "old.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(UserError, match=r"recipe\.data\.hub_name=.*old cannot be loaded"):
        TextFiles(hub_name=str(folder)).read()


def test_pairs_by_position_need_that_of_the_label(tmp_path: Path) -> None:
    (tmp_path / "mine.tsv").write_text("A dog ran.\tIt ran.\t1\n")
    with pytest.raises(UserError, match=r"recipe\.data\.label_column=null.*position"):
        TextFiles(*2 * [str(tmp_path / "mine.tsv")], text_column=0, pair_column=1, columns=3).read()


def test_texts_alone_where_columns_are_positions(tmp_path: Path) -> None:
    """A file to predict for, of a model trained on a table without a header."""
    (tmp_path / "mine.tsv").write_text("I went there.\nWent there I.\n")
    source = TextFiles(text_column=3, label_column=1, columns=4)
    assert source.read_part("eval", str(tmp_path / "mine.tsv")).texts == ["I went there.", "Went there I."]
