"""Prepared data on disk: built once per content, reused by every later run, and built again if it was damaged."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.errors import UserError, first_line
from runner.folder.files import checksums, damage, digest_of, is_from_disk
from runner.log import LOG

#: Raise it when the layout of cached folders changes, so that old entries are not read as new ones.
LAYOUT_VERSION = 3
_CHECKSUMS, _DRAFT, _DAMAGED = "checksums.json", ".draft-", ".damaged-"

#: Called with what is done and the total while an entry is built: first with 0 done, last with everything done.
Progress = Callable[[int, int], None]
#: A draft without a new file for so long was left by a process that died, and no run still reads a damaged entry.
_ABANDONED_AFTER_S = 24 * 3600.0


def silent(done: int, total: int) -> None:
    """Shows no progress."""


class Cache:
    """A folder of entries, each named by the hash of everything that its content depends on."""

    def __init__(self, root: str | Path, progress: Progress | None = None) -> None:
        self.root = Path(root).expanduser().resolve()
        self.progress = progress or silent

    def get(self, key: dict[str, Any], build: Callable[[Path], None]) -> Path:
        """The entry for `key` (JSON data), all of whose files were checked.

        `build` writes it into an empty folder if it is missing, or damaged, with a warning. An entry appears by one
        rename, so that several runs can build the same one at once. Raises UserError.
        """
        key = {"layout": LAYOUT_VERSION, **key}
        entry = self.root / digest_of(key)[:24]
        if _damage(entry) is None:
            return entry
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            draft = Path(tempfile.mkdtemp(dir=self.root, prefix=_DRAFT))
        except OSError as error:
            raise UserError(
                f"cache_dir={self.root} is not writable ({error.strerror}): set another cache_dir"
            ) from error
        try:
            build(draft)
            (draft / "key.json").write_text(json.dumps(key, sort_keys=True))
            written = checksums(draft, sorted(path for path in draft.rglob("*") if path.is_file()))
            (draft / _CHECKSUMS).write_text(json.dumps(written))
            draft.chmod(0o755)  # temporary folders are private, but a cache may be shared
            self._place(draft, entry)
        except Exception as error:
            if isinstance(error, UserError) or not is_from_disk(error, self.root):
                raise
            reason = f"cache_dir={self.root} does not take the prepared data ({first_line(error)})"
            raise UserError(f"{reason}: free space there, or set another cache_dir") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return entry

    def _place(self, draft: Path, entry: Path) -> None:
        """Rename the draft to the entry, unless another run has placed one. A damaged one is renamed first."""
        try:
            os.replace(draft, entry)
            return
        except OSError:
            if not entry.is_dir():
                raise
        if _damage(entry) is None:
            return
        try:
            with (self.root / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # of several runs that found the damage, one replaces it
                if (problem := _damage(entry)) is None:
                    return
                # Not removed in place: another run may have mapped its files.
                os.replace(entry, Path(tempfile.mkdtemp(dir=self.root, prefix=_DAMAGED)) / entry.name)
                os.replace(draft, entry)
        except OSError as error:
            raise UserError(
                f"cache_dir={self.root} has a damaged entry, {entry.name}, that cannot be replaced ({error.strerror}): "
                "remove it, or set another cache_dir"
            ) from error
        LOG.warning(f"the cache entry {entry} was damaged ({problem}) and has been rebuilt")

    def _remove_abandoned(self) -> None:
        for folder in (*self.root.glob(f"{_DRAFT}*"), *self.root.glob(f"{_DAMAGED}*")):
            with contextlib.suppress(FileNotFoundError):  # another run removed or finished it
                if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:
                    shutil.rmtree(folder, ignore_errors=True)


def _damage(entry: Path) -> str | None:
    """The damage of an entry, in words; None if all of its files are as they were written."""
    try:
        content = json.loads((entry / _CHECKSUMS).read_text())
        written = {name: (size, digest) for name, (size, digest) in content.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{_CHECKSUMS} cannot be read ({first_line(error)})"
    return damage(entry, written)
