"""Documents from plain text: files in every shape that editors leave, the Hub, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from recipes.tasks.packing import Size

from recipes.sources.plain_text import KnownSize, PlainText
from recipes.tasks.language_model import Documents
from runner.config.compose import compose, settings
from runner.config.instantiate import build_recipe
from runner.data.cache import Cache
from runner.errors import Unavailable, UserError
from tests.recipes.letters import LETTERS, save_gpt2, word_tokenizer

TEXT = "one\ntwo\n\nthree\n \n\n  four\nfive\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(content: str | bytes, here: Path, **of: Any) -> Documents:
    path = here / "train.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (here / "eval.txt").write_text("held out\n")
    return PlainText("train.txt", "eval.txt", **of).read()


# --- documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("lines", ["one", "two", "three", "  four", "five"]),
        ("paragraphs", ["one\ntwo", "three", "  four\nfive"]),
        ("files", ["one\ntwo\n\nthree\n \n\n  four\nfive"]),
    ],
)
@pytest.mark.parametrize(
    "content", [TEXT, TEXT.rstrip("\n"), TEXT.replace("\n", "\r\n"), "\ufeff" + TEXT, "\n\n" + TEXT + "\n\n"]
)
def test_kinds_of_documents(documents: str, expected: list[str], content: str, here: Path) -> None:
    """A line, a paragraph or all; line ends around it, a byte order mark and blank ones are no documents."""
    found = read(content, here, documents=documents)
    assert found.train == expected
    assert found.eval == ["held out"]
    assert found.source == "train.txt, eval.txt"


@pytest.mark.parametrize(
    "text", ["line\u2028separator", "form\x0cfeed", "next\x85line", "tab\tand  blanks ", "北京 🙂"]
)
def test_a_line_stays_whole(text: str, here: Path) -> None:
    """Line ends of other kinds, and blanks, are plain text."""
    assert read(f"first\n{text}\nlast", here).train == ["first", text, "last"]


def test_patterns(here: Path) -> None:
    """A pattern takes its files in the order of their names, folders left out; a file's own name is no pattern."""
    (here / "corpus" / "deep").mkdir(parents=True)
    (here / "corpus" / "c.txt").mkdir()
    for name in ("b.txt", "a.txt", "deep/d.txt", "other.md"):
        (here / "corpus" / name).write_text(f"of {name}\n")
    (here / "x[1].txt").write_text("brackets\n")

    def found(pattern: str) -> Any:
        return PlainText(pattern, "x[1].txt").read().train

    assert found("corpus/*.txt") == ["of a.txt", "of b.txt"]
    assert found("corpus/**/*.txt") == ["of a.txt", "of b.txt", "of deep/d.txt"]
    assert found("corpus/[b-c].txt") == ["of b.txt"]
    assert found(str(here / "corpus" / "?.txt")) == ["of a.txt", "of b.txt"]
    assert PlainText("x[1].txt", "x[1].txt").read().eval == ["brackets"]


def test_first_documents(here: Path) -> None:
    """A limit takes the first documents of a part, and one beyond them takes all."""
    assert read(TEXT, here, max_train_samples=2).train == ["one", "two"]
    assert read(TEXT, here, max_train_samples=99, max_eval_samples=1).train[-1] == "five"
    assert read("a\nb\n", here, max_eval_samples=1, documents="files").train == ["a\nb"]


def test_digest_follows_every_document(here: Path) -> None:
    """A changed text, border, order or part changes the digest; the same documents in another form do not."""
    same = read(TEXT, here).digest
    assert read(TEXT.replace("\n", "\r\n\r\n"), here).digest == same
    others = [
        read(TEXT.replace("two", "tow"), here).digest,
        read(TEXT.replace("one\ntwo", "two\none"), here).digest,
        read(TEXT.replace("one\ntwo", "onetwo"), here).digest,
        read(TEXT.replace("one\ntwo", "onet\nwo"), here).digest,
        read(TEXT + "six", here).digest,
        read(TEXT, here, documents="paragraphs").digest,
        read(TEXT, here, max_train_samples=4).digest,
        Documents(["held out"], read(TEXT, here).train, "").digest,
    ]
    assert len({same, *others}) == 9


# --- the Hub ------------------------------------------------------------------------------------------------

SIZE = KnownSize("owner/data/part (train, validation)", 100, 5000, 10, 700)
HUB: dict[str, Any] = {"hub_name": "owner/data", "hub_config": "part", "hub_size": SIZE}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A Hub with one data set; what it is asked for."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = []

    def load_dataset(name: str, config: str | None) -> Any:
        asked.append((name, config))
        parts = {
            "train": {"text": ["", " = Title = \n", "first\nsecond\n"], "id": [0, 1, 2]},
            "validation": {"text": ["held out\n"], "id": [3]},
            "blank": {"text": ["\n"], "id": [4]},
        }
        return {name: Dataset.from_dict(part) for name, part in parts.items()}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


def test_data_set_of_the_hub(hub: list[Any]) -> None:
    """Rows of the Hub are split as files are, blank ones left out."""
    found = PlainText(**HUB).read()
    assert found.train == [" = Title = ", "first", "second"]
    assert found.eval == ["held out"]
    assert found.source == "Hub: owner/data/part (train, validation)"
    assert PlainText(**HUB, documents="files", max_train_samples=2).read().train == [" = Title = ", "first\nsecond"]
    assert hub == [("owner/data", "part")] * 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hub_train": "dev"}, "recipe.data has no part 'dev' on the Hub: owner/data has train, validation, blank"),
        ({"hub_eval": "dev"}, "recipe.data has no part 'dev' on the Hub"),
        ({"hub_eval": "blank"}, "recipe.data.hub_name=owner/data holds no text in its part 'blank'"),
        ({"hub_text": "sentence"}, "recipe.data has no column 'sentence' on the Hub: owner/data has text, id"),
        ({"hub_text": "id"}, "recipe.data.hub_text=id is no column of texts"),
    ],
)
def test_wrong_names_of_the_hub(hub: list[Any], changes: dict[str, Any], named: str) -> None:
    """Parts and columns that there are not are refused with those that there are."""
    with pytest.raises(UserError) as caught:
        PlainText(**{**HUB, **changes}).read()
    assert str(caught.value).startswith(named)
    assert "\n" not in str(caught.value)


def test_known_size() -> None:
    """A published size is that of one data set and its parts, and shrinks with the documents that are taken."""
    known = PlainText(**HUB).expected()
    assert known is not None
    assert (known.train, known.eval) == (Size(100, 5000), Size(10, 700))
    assert "owner/data/part" in known.source
    known = PlainText(**HUB, max_train_samples=25, max_eval_samples=11).expected()
    assert known is not None
    assert (known.train, known.eval) == (Size(25, 1250), Size(10, 700))
    others: list[dict[str, Any]] = [{"hub_name": "x"}, {"hub_config": "x"}, {"hub_train": "x"}, {"hub_size": None}]
    for changes in (*others, {"train": "a.txt", "eval": "b.txt"}):
        assert PlainText(**{**HUB, **changes}).expected() is None


def test_the_shipped_size_is_of_the_shipped_data_set() -> None:
    """`runner.plan recipe=causal_lm` can tell steps without the data, and not those of other data."""
    facts = recipe_of().expected_facts()
    assert facts is not None
    assert facts.estimated
    assert 18_000 < facts.train_samples < 19_000
    assert 1_800 < facts.eval_samples < 2_000
    facts = recipe_of("recipe.packing=documents", "recipe.data.max_eval_samples=100").expected_facts()
    assert facts is not None
    assert (facts.train_groups, facts.eval_groups) == (23_767, 100)
    assert recipe_of("recipe.data.hub_config=wikitext-103-raw-v1").expected_facts() is None


# --- what is refused ----------------------------------------------------------------------------------------


def recipe_of(*overrides: str) -> Any:
    config = settings(compose(["recipe=causal_lm", *overrides]))
    return build_recipe(config.recipe, config.trusted_packages)


FILES = ["recipe.data.train=good.txt", "recipe.data.eval=good.txt"]

CONTENT = {"good.txt": b"a b\nc\n", "empty.txt": b"", "blank.txt": b"\n \r\n", "latin.bin": b"caf\xe9\n"}

#: What is typed, and how the sentence begins.
WRONG: list[tuple[list[str], str]] = [
    ([*FILES, "recipe.block_size=1"], "recipe.block_size=1 cannot be"),
    ([*FILES, "recipe.block_size=-4"], "recipe.block_size=-4 cannot be"),
    ([*FILES, "recipe.block_size=long"], "recipe.block_size=long cannot be: it must be a whole number"),
    ([*FILES, "recipe.block_size=1.5"], "recipe.block_size=1.5 cannot be"),
    ([*FILES, "recipe.block_size=33"], "recipe.block_size=33 is more than the 32 positions of the model"),
    ([*FILES, "recipe.packing=rows"], "recipe.packing=rows is no packing"),
    ([*FILES, "recipe.packing=null"], "recipe.packing=null cannot be"),
    ([*FILES, "recipe.data.documents=line"], "recipe.data.documents=line is no kind of document; did you mean 'lines'"),
    ([*FILES, "recipe.data.max_train_samples=0"], "recipe.data.max_train_samples=0 cannot be"),
    ([*FILES, "recipe.data.max_eval_samples=-1"], "recipe.data.max_eval_samples=-1 cannot be"),
    ([*FILES, "recipe.data.max_eval_samples=all"], "recipe.data.max_eval_samples=all cannot be"),
    ([*FILES, "recipe.data.hub_size=5"], "recipe.data.hub_size is no KnownSize"),
    ([*FILES, "recipe.data.hub_size.train_tokens=many"], "recipe.data.hub_size.train_tokens=many cannot be"),
    ([*FILES, "recipe.data=text.txt"], "recipe.data=text.txt cannot be: it must be a part with a _target_"),
    ([*FILES, "+recipe.data.trian=x"], "there is no setting 'recipe.data.trian'; did you mean 'train'"),
    (FILES[:1], "recipe.data.train is given and recipe.data.eval is not"),
    (FILES[1:], "recipe.data.eval is given and recipe.data.train is not"),
    ([FILES[1], "recipe.data.train=7"], "recipe.data.train=7 cannot be: it must be text"),
    ([FILES[1], "recipe.data.train=away.txt"], "recipe.data.train=away.txt does not exist (looked in "),
    ([FILES[1], "recipe.data.train=away/*.txt"], "recipe.data.train=away/*.txt matches no file (looked in "),
    ([FILES[1], "recipe.data.train=."], "recipe.data.train=. is a folder: give a file, or a pattern such as ./*.txt"),
    ([FILES[1], "recipe.data.train="], "recipe.data.train= cannot be: give the path of a file"),
    ([FILES[1], f"recipe.data.train={'x' * 300}"], f"recipe.data.train={'x' * 300} cannot be looked at: "),
    ([FILES[1], "recipe.data.train=empty.txt"], "recipe.data.train=empty.txt holds no text"),
    ([FILES[1], "recipe.data.train=blank.txt"], "recipe.data.train=blank.txt holds no text"),
    ([FILES[0], "recipe.data.eval=*.bin"], "recipe.data.eval=*.bin, of which latin.bin is one, is not UTF-8"),
    (["recipe.data.hub_name=null"], "there are no training data: give local files with recipe.data.train=…"),
    ([], "there are no training data: give local files with recipe.data.train=…"),
    ([*FILES, "recipe.model.name=./away"], "recipe.model.name=./away does not exist"),
    ([*FILES, "recipe.model.name=endless"], "recipe.model has a tokenizer with neither an end-of-text token nor"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and one whose tokenizer has no end-of-text token."""
    folder = tmp_path_factory.mktemp("models")
    save_gpt2(folder / "good")
    save_gpt2(folder / "endless")
    word_tokenizer(LETTERS, pad_token="<pad>").save_pretrained(folder / "endless")
    return folder


@pytest.mark.parametrize(("typed", "beginning"), WRONG, ids=[" ".join(typed)[-50:] for typed, _ in WRONG])
def test_wrong_input_is_one_sentence(
    typed: list[str], beginning: str, here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user can get wrong is said in one sentence that names setting and value, and leaves no cache entry."""
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "datasets")
    for name, content in CONTENT.items():
        (here / name).write_bytes(content)
    (here / "endless").symlink_to(models / "endless")
    model = [] if any("model.name" in one for one in typed) else [f"recipe.model.name={models / 'good'}"]
    block_size = [] if any("block_size" in one for one in typed) else ["recipe.block_size=16"]
    with pytest.raises(UserError) as caught:
        recipe_of(*typed, *model, *block_size).facts(Cache(here / "cache"))
    message = str(caught.value)
    assert message.startswith(beginning)
    assert "\n" not in message
    assert isinstance(caught.value, Unavailable) is (typed == [])
    assert not [path for path in here.glob("cache/*") if path.is_dir()]
