"""`runner.publish` with a server that has the Hub's interface: what is uploaded loads again, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants
from safetensors.numpy import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from runner import cli
from runner.run.model_card import HERE
from tests import processes
from tests.processes import output, wait_until
from tests.runs import run
from tests.tools.publish.hub import TOKEN, Dropped, Hub, Refused, Repository

NAME = "me/my-model"
MODEL = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert run("hydra.run.dir=run", "device=cpu", "max_steps=2") == 0
    return root / "run"


@pytest.fixture
def trained(finished: Path, here: Path) -> Path:
    """A copy of a finished run in the current folder."""
    return Path(shutil.copytree(finished, here / "run")).relative_to(here)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server, and this process as if it had been started with the environment for it."""
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    addresses = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", addresses)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


def publish(*arguments: str) -> int:
    return cli.run_tool("publish", list(arguments))


def posted(hub: Hub, method: str, part: str) -> int:
    return sum(one == method and part in path for one, path in hub.requests)


def test_what_was_uploaded_loads_again(trained: Path, hub: Hub, tmp_path: Path) -> None:
    """With its card, whose example now names the repository."""
    assert publish(str(trained), "--to", NAME) == 0
    assert hub.files(NAME).keys() == {".gitattributes", "README.md", *MODEL}
    loaded = AutoModelForSequenceClassification.from_pretrained(NAME, cache_dir=tmp_path / "cache")
    own = load_file(trained / "model" / "model.safetensors")
    assert {name: value.numpy().tobytes() for name, value in loaded.state_dict().items()} == {
        name: value.tobytes() for name, value in own.items()
    }
    assert AutoTokenizer.from_pretrained(NAME, cache_dir=tmp_path / "cache")("the dog sleeps")["input_ids"]
    card = hub.files(NAME)["README.md"].decode()
    assert f'name = "{NAME}"\n' in card
    assert card == (trained / "model" / "README.md").read_text().replace(HERE, f'name = "{NAME}"')
    assert ModelCard(card).data.pipeline_tag == "text-classification"


def test_only_files_of_a_model_are_uploaded(trained: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Others in the folder are left out, and named."""
    (trained / "model" / "LICENSE").write_text("MIT")
    others = {".env", "notes.txt", "optimizer.pt", "secrets.json", "below/config.json"}
    for name in others:
        (trained / "model" / name).parent.mkdir(exist_ok=True)
        (trained / "model" / name).write_text("mine")
    assert publish(str(trained), "--to", NAME) == 0
    assert hub.files(NAME).keys() == {".gitattributes", "README.md", "LICENSE", *MODEL}
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "left out" in line)
    assert set(line.partition(": ")[2].split(", ")) == others


def test_dry_run_sends_nothing(
    trained: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows which files would go where, also without a token."""
    monkeypatch.delenv("HF_TOKEN")
    assert publish(str(trained), "--to", NAME, "--private", "--revision", "tried", "--dry-run") == 0
    assert hub.requests == []
    shown = capsys.readouterr().out
    for part in (f"{hub.url}/{NAME}", "branch tried, private", *MODEL, "README.md"):
        assert part in shown
    assert f"{(trained / 'model' / 'model.safetensors').stat().st_size:,} bytes" in shown


def test_commits_onto_what_is_there(trained: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of another model are removed, people's own stay, and nothing is committed twice."""
    kept = {"LICENSE": b"MIT", "picture.png": b"png", ".gitattributes": b"", "gguf/model.gguf": b"gguf"}
    other = {"adapter_config.json": b"{}", "model-00001-of-00002.safetensors": b"weights", "config.json": b"{}"}
    hub.repositories[NAME] = Repository(branches={"main": [{**kept, **other, "README.md": b"old"}]})
    assert publish(str(trained), "--to", NAME) == 0
    assert hub.files(NAME).keys() == {*kept, "README.md", *MODEL}
    assert {name: hub.files(NAME)[name] for name in kept} == kept
    removed = capsys.readouterr().out.partition("removed there: ")[2].splitlines()[0]
    assert set(removed.split(", ")) == {"adapter_config.json", "model-00001-of-00002.safetensors"}
    assert publish(str(trained), "--to", NAME) == 0
    assert len(hub.repositories[NAME].branches["main"]) == 2
    assert "nothing has changed" in capsys.readouterr().out


def test_private_and_on_a_branch(trained: Path, hub: Hub) -> None:
    assert publish(str(trained), "--to", NAME, "--private", "--revision", "second") == 0
    assert hub.repositories[NAME].private
    assert hub.files(NAME).keys() == {".gitattributes"}
    assert hub.files(NAME, "second").keys() > MODEL


@pytest.mark.parametrize("private", [True, False])
def test_private_is_not_sent_to_a_public_repository(trained: Path, hub: Hub, private: bool) -> None:
    hub.repositories[NAME] = Repository(private=private)
    assert publish(str(trained), "--to", NAME, "--private", "--revision", "second") == (0 if private else 2)
    assert ("second" in hub.repositories[NAME].branches) == private


def test_finishes_an_upload_whose_commit_was_lost(trained: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights, which have arrived, are not sent again."""

    def drop(method: str, path: str) -> None:
        if "/commit/" in path:
            raise Dropped

    hub.before = drop
    assert publish(str(trained), "--to", NAME) == 2
    assert "the same command finishes the upload" in capsys.readouterr().err
    assert hub.files(NAME).keys() == {".gitattributes"}
    hub.before = lambda method, path: None
    assert publish(str(trained), "--to", NAME) == 0
    assert posted(hub, "PUT", "/lfs/") == 1
    assert hub.files(NAME).keys() > MODEL


def test_finishes_an_upload_that_was_killed(trained: Path, hub: Hub, here: Path) -> None:
    """A process with nothing but its environment, killed while it sends the weights."""
    arrived, go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "PUT":
            arrived.set()
            go_on.wait(60)
            raise Dropped

    hub.before = hold
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = ["-m", "runner.publish", str(trained), "--to", NAME]
    process = processes.start(here, *command, **environment)
    wait_until(lambda: arrived.is_set() or process.poll() is not None, output(here))
    assert process.poll() is None, output(here)
    processes.kill(process)
    go_on.set()
    assert hub.files(NAME).keys() == {".gitattributes"}
    hub.before = lambda method, path: None
    again = processes.start(here, *command, **environment)
    assert again.wait(processes.TIMEOUT_S) == 0, output(here)
    assert hub.files(NAME).keys() > MODEL
    assert TOKEN not in output(here)


def test_a_run_without_a_card_gets_one(trained: Path, hub: Hub) -> None:
    """The folder stays as it is."""
    card = trained / "model" / "README.md"
    expected = card.read_text()
    card.unlink()
    assert publish(str(trained), "--to", NAME) == 0
    assert hub.files(NAME)["README.md"].decode() == expected.replace(HERE, f'name = "{NAME}"')
    assert not card.exists()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of the error, which does not hold the token."""
    assert publish(*arguments) == 2
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err
    (line,) = printed.err.splitlines()
    return line


def fail(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "FAILED"}))


def link(folder: Path) -> None:
    (folder / "model" / "config.json").rename("elsewhere.json")
    (folder / "model" / "config.json").symlink_to(Path("elsewhere.json").absolute())


def name_a_folder(folder: Path) -> None:
    (folder / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "/home/me/bert"}')


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (fail, "FAILED"),
        (link, "link"),
        (lambda folder: shutil.rmtree(folder / "model"), "model/"),
        (lambda folder: (folder / "model" / "model.safetensors").unlink(), "weights"),
        (lambda folder: (folder / "config.yaml").unlink(), "neither the folder of a run"),
        (name_a_folder, "base_model_name_or_path=/home/me/bert"),
    ],
    ids=["failed", "link", "no model", "no weights", "no run", "adapter for a folder"],
)
def test_refuses_a_run(
    damage: Callable[[Path], None], expected: str, trained: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(trained)
    assert expected in refused(capsys, str(trained), "--to", NAME)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["mine", "me/my model", "me/../model", "https://host/me/mine", "me/", "/me"])
def test_refuses_a_name(name: str, trained: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--to={name}" in refused(capsys, str(trained), "--to", name)
    assert hub.requests == []


def test_without_a_token(
    trained: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN" in refused(capsys, str(trained), "--to", NAME)
    assert hub.requests == []


def test_the_server_refuses(
    trained: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repository of somebody else, an error of the server, and a token that it does not know."""
    assert "You don't have the rights" in refused(capsys, str(trained), "--to", "somebody-else/model")

    def fail(method: str, path: str) -> None:
        if "/commit/" in path:
            raise Refused(500, "out of order")

    hub.before = fail
    assert "out of order" in refused(capsys, str(trained), "--to", NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    assert "Invalid credentials" in refused(capsys, str(trained), "--to", NAME)
    assert hub.files(NAME).keys() == {".gitattributes"}


def test_without_a_network(
    trained: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody_answers:
        nobody_answers.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody_answers.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert f"{address}/{NAME} could not be reached" in refused(capsys, str(trained), "--to", NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(capsys, str(trained), "--to", NAME)


def test_metadata_that_the_server_refuses(trained: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """It asks before it sends the weights."""
    card = trained / "model" / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nlicense: [mit]\n", 1))
    assert '"license" must be a string' in refused(capsys, str(trained), "--to", NAME)
    assert posted(hub, "PUT", "/lfs/") == 0


def test_a_card_in_another_encoding(trained: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    (trained / "model" / "README.md").write_bytes("für".encode("latin-1"))
    assert "README.md is not in UTF-8" in refused(capsys, str(trained), "--to", NAME)


def test_vocabularies_of_other_tokenizers(trained: Path, hub: Hub) -> None:
    """Those of Marian, FSMT, BERTweet and ProphetNet."""
    names = {"source.spm", "target.spm", "vocab-src.json", "target_vocab.json", "bpe.codes", "prophetnet.tokenizer"}
    for name in names:
        (trained / "model" / name).write_text("")
    assert publish(str(trained), "--to", NAME) == 0
    assert hub.files(NAME).keys() > names


def test_help_says_where_it_sends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        publish("--help")
    assert "HF_ENDPOINT" in capsys.readouterr().out
    assert os.environ["HF_HUB_OFFLINE"] == "1"
