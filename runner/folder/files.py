"""Files that another process may read at any moment, and that a killed one must not leave half written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever looks finds all of it, or what was there before."""
    draft = path.with_name(f".{path.name.lstrip('.')}-{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or a machine that dies may keep the name and lose the content
    draft.rename(path)


def write_json(path: Path, content: Any) -> None:
    """The same of JSON data."""
    write_whole(path, json.dumps(content, indent=1))
