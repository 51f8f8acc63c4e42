"""The command `python -m runner.publish`: what it uploads, and the upload."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from rich.console import Console
from rich.markup import escape

from runner.config.arguments import ArgumentParser
from runner.errors import UserError, first_line, require
from runner.folder.reading import opened, read_json
from runner.folder.record import RunRecord
from runner.run.earlier import folder_of_mlflow_run, saved_model
from runner.run.model_card import FILE_NAME as MODEL_CARD
from runner.run.model_card import HERE, hub_name, is_hub_name, model_card
from runner.track.secrets import masked

_ADAPTER = "adapter_config.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
#: The files of a model. In the repository, those of another model would be loaded with it: they are removed.
_MODEL = (
    *(*_WEIGHTS, "*.safetensors.index.json", "pytorch_model.bin.index.json", _ADAPTER),
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    # Vocabularies as the tokenizers of transformers name them.
    *("*.model", "*.spm", "vocab*.json", "*_vocab.json", "vocab.txt", "merges.txt", "dict.txt", "bpe.codes"),
    *("*.tokenizer", "normalizer.json", "byte_maps.json", "emoji.json", "word_*.json"),
)
#: Everything that is uploaded.
_ALLOWED = (*_MODEL, MODEL_CARD, "LICENSE*")


@dataclass(frozen=True)
class _Upload:
    """What goes where. `files`: content, or where it is, by name; `left_out`: other names in the model's folder."""

    run: Path
    repository: str
    revision: str
    private: bool
    files: Mapping[str, Path | bytes]
    left_out: Sequence[str]

    @property
    def url(self) -> str:
        return f"{constants.ENDPOINT}/{self.repository}"


def publish(arguments: Sequence[str], console: Console) -> int:
    """Run the command with these arguments; the exit code. Raises UserError."""
    parser = ArgumentParser(
        prog="python -m runner.publish",
        description="Upload the model of a finished run, with its model card, to the Hugging Face Hub, as one commit. "
        "The server is HF_ENDPOINT or huggingface.co; the token is that of `hf auth login`, or HF_TOKEN.",
        epilog="example: python -m runner.publish outputs/cola/2026-11-21_11-35-02-ad47 --to me/cola --private",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a finished run, or its MLflow run id")
    parser.add_argument("--to", required=True, metavar="OWNER/NAME", help="the repository; made if it does not exist")
    parser.add_argument("--private", action="store_true", help="make the repository private, or refuse a public one")
    parser.add_argument("--revision", default="main", metavar="BRANCH", help="the branch; made if it does not exist")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be uploaded")
    options = parser.parse_intermixed_args(list(arguments))
    valid = "/" in options.to and is_hub_name(options.to)
    require(valid, "--to", options.to, "use owner/name, with letters, digits, ., - and _")
    upload = _prepare(_run_folder(options.run), options.to, options.revision, options.private)
    _show(upload, console)
    if options.dry_run:
        console.print("dry run: nothing was uploaded")
    else:
        if get_token() is None:
            raise UserError(f"there is no token for {upload.url}: run `hf auth login`, or set HF_TOKEN")
        with _errors_explained(upload), console.status("uploading"):
            done = _send(upload, console)
        console.print(done, soft_wrap=True, markup=False)
    return 0


def _run_folder(given: str) -> Path:
    path = Path(given).expanduser()
    run = path if (path / "config.yaml").is_file() else folder_of_mlflow_run(given, Path("outputs"))
    if run is None:
        below = Path("outputs").absolute()
        raise UserError(f"{given} is neither the folder of a run nor the MLflow run id of one below {below}: give one")
    return run


def _prepare(run: Path, repository: str, revision: str, private: bool) -> _Upload:
    """Choose the files. Raises UserError if the run has no model that others could load."""
    model = saved_model(run)
    names = sorted(path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file())
    files: dict[str, Path | bytes] = {name: model / name for name in names if _matches(name, _ALLOWED)}
    if not any(_matches(name, _WEIGHTS) for name in files):
        raise UserError(f"{model} has no weights ({' or '.join(_WEIGHTS)}): train the run again")
    if _ADAPTER in files:
        base = read_json(model / _ADAPTER).get("base_model_name_or_path")
        if hub_name(base) is None:
            raise UserError(
                f"{model / _ADAPTER} has base_model_name_or_path={base}, which only this machine has: write the name "
                "that this model has on the Hub there, or train with adapter.merge=true"
            )
    if MODEL_CARD in files:
        try:
            with opened(model / MODEL_CARD) as file:
                card = file.read().decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{model / MODEL_CARD} is not in UTF-8 ({error}): save it in UTF-8") from error
    else:  # it could not be written when the run ended, or was removed
        record = RunRecord.read(run)
        assert record is not None
        card = model_card(run, record)
    files[MODEL_CARD] = card.replace(HERE, f'name = "{repository}"').encode()
    return _Upload(run, repository, revision, private, files, [name for name in names if name not in files])


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)


def _show(upload: _Upload, console: Console) -> None:
    branch = f"branch {upload.revision}{', private' if upload.private else ''}"
    console.print(escape(f"{upload.run} to {masked(upload.url)} ({branch}):"), soft_wrap=True)
    for name, content in sorted(upload.files.items()):
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        console.print(f"{size:>16,} bytes  {escape(name)}", soft_wrap=True)
    if upload.left_out:
        console.print(f"  left out: {escape(', '.join(upload.left_out))}", soft_wrap=True)


def _send(upload: _Upload, console: Console) -> str:
    """Make the repository and the branch if needed, and the commit; a sentence that says where it is."""
    api, repository, revision = HfApi(), upload.repository, upload.revision
    api.create_repo(repository, private=upload.private or None, exist_ok=True)
    if upload.private and not api.model_info(repository).private:
        raise UserError(f"--private: {upload.url} exists and is public: make it private there, or choose another name")
    if revision != constants.DEFAULT_REVISION:
        api.create_branch(repository, branch=revision, exist_ok=True)
    before = api.model_info(repository, revision=revision)
    there = [file.rfilename for file in before.siblings or ()]
    removed = [name for name in there if _matches(name, _MODEL) and name not in upload.files]
    if removed:
        console.print(f"  removed there: {escape(', '.join(removed))}", soft_wrap=True)
    commit = api.create_commit(
        repository,
        [
            *(CommitOperationAdd(name, content) for name, content in upload.files.items()),
            *(CommitOperationDelete(name) for name in removed),
        ],
        commit_message=f"Model of the run {upload.run.resolve().name}",
        revision=revision,
    )
    if commit.oid == before.sha:
        return f"nothing has changed: {masked(upload.url)} has this model"
    return f"published: {masked(commit.commit_url)}"


@contextlib.contextmanager
def _errors_explained(upload: _Upload) -> Iterator[None]:
    """Turn what the Hub's client raises into a UserError."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be uploaded: unset it") from error
    except HfHubHTTPError as error:
        reason = error.server_message or first_line(error)
        rule = "check the name, and that the token may write there"
        raise UserError(f"{upload.url} was refused by the server ({' '.join(reason.split())}): {rule}") from error
    except ValueError as error:  # such as the server's answer about the metadata of the card
        card = upload.run / "model" / MODEL_CARD
        raise UserError(f"{upload.url} was not accepted ({' '.join(str(error).split())}): correct {card}") from error
    except (OSError, HTTPError, RuntimeError) as error:
        reason = first_line(error.__cause__ or error)
        raise UserError(
            f"{upload.url} could not be reached ({reason}): the same command finishes the upload later"
        ) from error
