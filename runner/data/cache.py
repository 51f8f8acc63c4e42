"""Tokenised data on disk: built once per content, and reused by every later run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.errors import UserError, first_line
from runner.folder.files import is_from_disk

#: Raise it when the layout of cached folders changes, so that old entries are not read as new ones.
LAYOUT_VERSION = 2
_DRAFT = ".draft-"

#: Called with what is done and the total while an entry is built: first with 0 done, last with everything done.
Progress = Callable[[int, int], None]
#: A draft without a new file for so long was left by a process that died.
_ABANDONED_AFTER_S = 24 * 3600.0


def silent(done: int, total: int) -> None:
    """Shows no progress."""


class Cache:
    """A folder of entries, each named by the hash of everything that its content depends on."""

    def __init__(self, root: str | Path, progress: Progress | None = None) -> None:
        self.root = Path(root).expanduser().resolve()
        self.progress = progress or silent

    def get(self, key: dict[str, Any], build: Callable[[Path], None]) -> Path:
        """The entry for `key` (JSON data); `build` writes it into an empty folder if it is missing.

        An entry appears by one rename, so that several runs can build the same one at once. Raises UserError.
        """
        text = json.dumps({"layout": LAYOUT_VERSION, **key}, sort_keys=True)
        entry = self.root / hashlib.sha256(text.encode()).hexdigest()[:24]
        if entry.is_dir():
            return entry
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned_drafts()
            draft = Path(tempfile.mkdtemp(dir=self.root, prefix=_DRAFT))
        except OSError as error:
            raise UserError(
                f"cache_dir={self.root} is not writable ({error.strerror}): set another cache_dir"
            ) from error
        try:
            build(draft)
            (draft / "key.json").write_text(text)
            draft.chmod(0o755)  # temporary folders are private, but a cache may be shared
            os.replace(draft, entry)
        except Exception as error:
            if isinstance(error, OSError) and entry.is_dir():  # another run finished the same entry first
                return entry
            if isinstance(error, UserError) or not is_from_disk(error, self.root):
                raise
            reason = f"cache_dir={self.root} does not take the tokenised data ({first_line(error)})"
            raise UserError(f"{reason}: free space there, or set another cache_dir") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return entry

    def _remove_abandoned_drafts(self) -> None:
        for draft in self.root.glob(f"{_DRAFT}*"):
            with contextlib.suppress(FileNotFoundError):  # another run removed or finished it
                if time.time() - draft.stat().st_mtime > _ABANDONED_AFTER_S:
                    shutil.rmtree(draft, ignore_errors=True)
