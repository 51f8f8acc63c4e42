"""Files that another process may read at any moment, and that a killed one must not leave half written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever looks finds all of it, or what was there before."""
    draft = path.with_name(f".{path.name.lstrip('.')}-{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.rename(path)


def write_json(path: Path, content: Any) -> None:
    """The same of JSON data."""
    write_whole(path, json.dumps(content, indent=1))
