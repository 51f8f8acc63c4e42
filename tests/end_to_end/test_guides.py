"""The examples of the guides, taken from their pages and run as printed."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from runner import cli
from tests.tiny_models import save_bert

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_a_recipe_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's recipe class, in a folder outside the project, trains on two workers, tokens counted exactly."""
    code = next(block for block in blocks("python") if "class NextLetter" in block)
    config = next(block for block in blocks("yaml") if "letters.NextLetter" in block)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "__init__.py").write_text(code)
    (tmp_path / "my_conf" / "recipe").mkdir(parents=True)
    (tmp_path / "my_conf" / "recipe" / "letters.yaml").write_text(config)
    (tmp_path / "names.txt").write_text("\n".join(f"name{i * i}" for i in range(60)) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--config-dir=my_conf", "recipe=letters", "trusted_packages=[letters]", "device=cpu2", "tracking=none"]
    try:
        assert cli.main([*options, "accumulation.steps=2", "batch.global_batch=16", "epochs=1"], time.time()) == 0
    finally:
        sys.modules.pop("letters", None)
    (folder,) = (tmp_path / "outputs" / "letters").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples_seen"] == 54
    assert 1 < summary["eval"]["perplexity"] < 400


def test_forty_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's source of texts and its recipe, at most 40 lines, train by the command that stands there."""
    code = next(block for block in blocks("python") if "class Tickets" in block)
    config = next(block for block in blocks("yaml") if "tickets.Tickets" in block)
    command = next(block for block in blocks("sh") if "recipe=tickets" in block)
    assert len(code.splitlines()) + len(config.splitlines()) <= 40
    (tmp_path / "tickets.py").write_text(code)
    (tmp_path / "my_conf" / "recipe").mkdir(parents=True)
    (tmp_path / "my_conf" / "recipe" / "tickets.yaml").write_text(config)
    rows = [f'"It is broken, ""{place}"" again",{team}\n' for place, team in (("door", "house"), ("mail", "net"))]
    for name, times in (("tickets", 20), ("tickets_dev", 4)):
        (tmp_path / f"{name}.csv").write_text("subject,team\n" + "".join(rows) * times)
    save_bert(tmp_path / "my_model", rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = shlex.split(command)
    assert arguments[:3] == ["python", "-m", "runner"]
    try:
        assert cli.main([*arguments[3:], "device=cpu", "tracking=none", "batch.global_batch=8"], time.time()) == 0
    finally:
        sys.modules.pop("tickets", None)
    (folder,) = (tmp_path / "outputs" / "tickets").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples_seen"] == 3 * 40
    assert set(summary["eval"]) == {"accuracy", "macro_f1", "loss"}
