"""A bundle: the files of runs in a zip file, listed with their digests in a manifest that has a digest itself."""

from __future__ import annotations

import re
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import UserError, first_line
from runner.folder.files import Checksums, checksums, damage, digest_of, strict_json
from runner.folder.lock import is_locked
from runner.folder.reading import JSON_LIMIT, files_below, parse_json
from runner.folder.record import FINISHED, status_of
from runner.run.earlier import plan_of_run
from runner.run.model_card import FILE_NAME as MODEL_CARD

MANIFEST, _FORMAT = "manifest.json", 1
#: A bundle unpacks to at most this many times its bytes: its text packs to a tenth or so.
_RATIO = 100
#: Of each run; the last ones may be missing.
_FILES = ("config.yaml", "plan.json", "certificate.json", "ledger.json", "metrics.jsonl", "summary.json")
_OPTIONAL = ("environment.json", "tracking.json")
#: Times are left out of the zip file: the same content gives the same file.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_CHUNK = 2**20
#: What reading a file that is no bundle raises, also one that is encrypted or cut off.
_NO_BUNDLE = (
    *(OSError, zipfile.BadZipFile, zlib.error, RuntimeError),
    *(KeyError, ValueError, TypeError, AttributeError, OverflowError),
)


@dataclass(frozen=True)
class Bundle:
    """An unpacked bundle. `runs`: a folder for each; `weights`: of their models, by name of the run."""

    digest: str
    runs: tuple[Path, ...]
    weights: Mapping[str, Checksums]


def make_bundle(runs: Sequence[Path], output: Path, with_models: bool) -> str:
    """Write the bundle of finished runs; its digest. Raises UserError.

    `with_models`: with the files of the models, and not only their digests.
    """
    names = [re.sub(r"[^\w.-]", "_", run.resolve().name) for run in runs]
    packed: dict[str, Path] = {}
    weights: dict[str, Checksums] = {}
    for number, run in enumerate(runs):
        _check(run)
        name = names[number] if names.count(names[number]) == 1 else f"{number}-{names[number]}"
        packed |= {f"{name}/{file}": run / file for file in (*_FILES, *_OPTIONAL) if (run / file).exists()}
        # Without the card, in which people write.
        model = [path for path in sorted((run / "model").rglob("*")) if path.is_file() and path.name != MODEL_CARD]
        weights[name] = checksums(run / "model", model)
        if with_models:
            packed |= {f"{name}/model/{path.relative_to(run / 'model').as_posix()}": path for path in model}
    files = {name: next(iter(checksums(path.parent, [path]).values())) for name, path in packed.items()}
    manifest = {"format": _FORMAT, "runs": list(weights), "files": files, "weights": weights}
    digest = digest_of(manifest)
    draft = output.with_name(f".{output.name}")
    try:
        with zipfile.ZipFile(draft, "w") as archive:
            content = strict_json({**manifest, "digest": digest}, indent=1).encode()
            archive.writestr(_entry(MANIFEST, len(content)), content)
            for name, path in packed.items():
                with path.open("rb") as source, archive.open(_entry(name, path.stat().st_size), "w") as target:
                    shutil.copyfileobj(source, target, _CHUNK)
        draft.rename(output)
    except OSError as error:
        raise UserError(f"--output={output} cannot be written ({error.strerror}): choose another file") from error
    finally:
        draft.unlink(missing_ok=True)
    return digest


def _entry(name: str, size: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.file_size, entry.compress_type = size, zipfile.ZIP_DEFLATED
    return entry


def _check(run: Path) -> None:
    """Raises UserError unless the folder holds a run that has finished, and no link to a file that is not the run's."""
    files_below(run)
    if not (run / "config.yaml").exists():
        raise UserError(f"{run} is not the folder of a run (it has no config.yaml): give one")
    status = status_of(run)
    if status != FINISHED or is_locked(run):
        state = "is still running" if is_locked(run) else f"has ended as {status or 'KILLED'}"
        raise UserError(f"{run} {state}: only a run that has finished is evidence of a result")
    for name in _FILES:
        if not (run / name).exists():
            raise UserError(f"{run} has no {name}: restore it")
    plan_of_run(run, refuse_changed=False)


def unpack(file: Path, folder: Path) -> Bundle:
    """Unpack a bundle into an empty folder. Raises UserError if the file is none, or not as it was written."""
    try:
        with zipfile.ZipFile(file) as archive:
            with archive.open(MANIFEST) as packed:
                manifest = parse_json(packed.read(JSON_LIMIT + 1))
            digest = manifest.pop("digest")
            runs, files = manifest["runs"], _checksums(manifest["files"])
            weights = {name: _checksums(manifest["weights"][name]) for name in runs}
            if manifest["format"] != _FORMAT:
                raise UserError(f"{file} has the format {manifest['format']} of another version: update the runner")
            _require_safe(file, folder, runs, files)
            for name, (size, _) in files.items():
                if archive.getinfo(name).file_size != size:
                    raise _changed(file, name, "it has another size")
            for name in files:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy, _CHUNK)
    except _NO_BUNDLE as error:
        raise UserError(
            f"{file} is not a bundle of runner.evidence ({first_line(error)}): give another file"
        ) from error
    if digest_of(manifest) != digest:
        raise _changed(file, MANIFEST, f"it does not have the digest {digest}")
    for name, entry in files.items():
        if (problem := damage(folder, {name: entry})) is not None:
            raise _changed(file, name, problem)
    return Bundle(digest, tuple(folder / name for name in runs), weights)


def _require_safe(file: Path, folder: Path, runs: Sequence[str], files: Checksums) -> None:
    """Refuse a bundle that lists files outside of its folder, or more bytes than it can honestly hold."""
    if not runs or not all(Path(name).name == name and f"{name}/config.yaml" in files for name in runs):
        raise UserError(f"{file} lists no run, or one that it does not contain: do not trust it")
    for name in files:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{file} contains {name}, which is outside of the bundle: do not trust it")
    total = sum(size for size, _ in files.values())
    if total > _RATIO * file.stat().st_size:
        raise UserError(f"{file} would become more than {_RATIO} times as large, {total:,} bytes: do not trust it")
    if total > shutil.disk_usage(folder).free:
        raise UserError(f"{file} needs {total:,} bytes in {folder.parent}, which are not free there: free space")


def _checksums(plain: Mapping[str, Sequence[Any]]) -> Checksums:
    return {name: (int(size), str(digest)) for name, (size, digest) in plain.items()}


def _changed(file: Path, name: str, problem: str) -> UserError:
    return UserError(f"{file} was changed after it was made: {name} is not as in its manifest ({problem})")
