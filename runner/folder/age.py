"""Which of two runs is the newer one."""

from __future__ import annotations

import json
from pathlib import Path


def started_ms(folder: Path) -> int:
    """When a run began, in milliseconds since the epoch, as MLflow has it: by its card, or its summary's age.

    A file's age is no more than a guess: a folder may have been copied, and a summary completed later.
    """
    try:
        # The card's name is not imported: its module brings torch, and comparing runs takes no second for that.
        return int(json.loads((folder / "tracking.json").read_text(encoding="utf-8"))["started"])
    except (OSError, ValueError, TypeError, KeyError):
        return (folder / "summary.json").stat().st_mtime_ns // 1_000_000
