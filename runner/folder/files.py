"""Files that other processes read at any time, whether they are as they were written, and writable folders."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.errors import RunFailed, UserError, first_line
from runner.folder.reading import read_json

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
#: Bytes: a disk with less is full.
_FULL = 2**20


def strict_json(content: Any, **options: Any) -> str:
    """`json.dumps` for any reader of JSON, which has no such numbers as NaN.

    They become the strings `NaN`, `Infinity` and `-Infinity`, as in protobuf's JSON. Python's `float` reads them.
    """
    return json.dumps(_with_names(content), allow_nan=False, **options)


def _with_names(content: Any) -> Any:
    if isinstance(content, float) and not math.isfinite(content):
        return "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"
    if isinstance(content, Mapping):
        return {key: _with_names(value) for key, value in content.items()}
    return [_with_names(item) for item in content] if isinstance(content, (list, tuple)) else content


#: Bytes that are hashed at once.
_BLOCK = 2**22

#: Size in bytes and SHA-256 of each file of a folder, by its name relative to the folder.
Checksums = Mapping[str, tuple[int, str]]


def digest_of(content: Any) -> str:
    """SHA-256 of JSON-like data, the same for what is read from its file. Other values count as their text."""
    return digest_of_bytes(strict_json(content, sort_keys=True, default=str).encode())


def digest_of_bytes(*parts: bytes) -> str:
    """SHA-256 of these bytes, one after the other."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write a file atomically: readers, and a process killed meanwhile, leave either the old or the new content.

    Raises RunFailed if the disk does not take it.
    """
    write_text(path, strict_json(content, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write text atomically, as `write_json`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes atomically, as `write_json`."""
    draft = path.with_name(f".{path.name.lstrip('.')}-{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a machine that crashes could keep the name and lose the content
        draft.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise RunFailed(f"{path} cannot be written ({error.strerror}): repair the folder, or free space") from error


def require_space(folder: Path, size: int, what: str) -> None:
    """Raises RunFailed, with the numbers, if `what` of `size` bytes has no room in `folder`."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise RunFailed(f"{what} needs {size:,} bytes, and {folder} has {free:,} left: free space there")


def sync_folder(folder: Path) -> None:
    """Return when the folder's files and their names are on the disk."""
    for path in (*(path for path in folder.iterdir() if path.is_file()), folder):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def checksums(folder: Path, files: Iterable[Path]) -> dict[str, tuple[int, str]]:
    """The checksums of `files`, which are in `folder` or below it."""
    return {path.relative_to(folder).as_posix(): (path.stat().st_size, sha256(path)) for path in files}


def damage(folder: Path, written: Checksums) -> str | None:
    """The first file of `folder` that is missing or changed, in words; None if all are as they were `written`."""
    for name, (size, digest) in written.items():
        path = folder / name
        try:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{name} is not in it"
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} of {size:,} bytes"
            if sha256(path) != digest:
                return f"{name} has changed since it was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def check_folder(setting: str, folder: str | Path, size: int = 0) -> None:
    """Refuse a folder that cannot be made or take `size` bytes, and leave nothing behind. Raises UserError."""
    path = existing = Path(folder).expanduser().absolute()
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        # Permissions say too little: root may write anywhere, except to a read-only file system or below /proc.
        with tempfile.TemporaryDirectory(prefix=".runner-", dir=existing) as trial:
            (Path(trial) / path.relative_to(existing)).mkdir(parents=True, exist_ok=True)
            if size:
                (Path(trial) / ".trial").write_bytes(bytes(size))
    except OSError as error:
        reason = f"{existing} is a file" if existing.is_file() else error.strerror or first_line(error)
        raise UserError(f"{setting}={folder} cannot be written to ({reason}): choose another folder") from error


def check_output(option: str, file: Path, overwrite: bool = True, endings: Sequence[str] = ()) -> None:
    """Refuse an output file that cannot be written, or has none of these `endings`, if there are any.

    Raises UserError, also for a file that exists, unless `overwrite`.
    """
    folder = file.absolute().parent
    if endings and file.suffix.lower() not in endings:
        raise UserError(f"{option}={file} has another ending than {' or '.join(endings)}: choose it")
    check_folder(option, folder)
    if file.is_dir() or not folder.is_dir():
        raise UserError(f"{option}={file} cannot be written: name a file in a folder that exists")
    if file.exists() and not overwrite:
        raise UserError(f"{option}={file} exists: choose another file, or add --overwrite")


def is_from_disk(error: Exception, folder: Path) -> bool:
    """True if the disk of `folder`, full, read-only or gone, is the cause: NumPy and tokenizers give no number."""
    if getattr(error, "errno", None) in _DISK_ERRORS or not folder.exists():
        return True
    return shutil.disk_usage(folder).free < _FULL


def started_ms(folder: Path) -> int:
    """When a run started, in milliseconds since the epoch: by `tracking.json`, else when its folder last changed."""
    try:
        # Read without `TrackingRecord`, which is in a package above this one.
        return int(read_json(folder / "tracking.json")["started"])
    except (UserError, ValueError, TypeError, KeyError):
        # A guess: the folder may have been copied.
        return folder.stat().st_mtime_ns // 1_000_000
