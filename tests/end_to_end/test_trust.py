"""No command runs code that a file of `--config-dir` asks for."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from runner import cli
from tests.runs import QUICK

#: Loading, calling or instantiating it leaves a file.
CODE = "from pathlib import Path\nPath('canary').touch()\nclass Evil(dict):\n    pass\n"
FILES = {
    "callbacks": "hydra: {callbacks: {x: {_target_: evil_code.Evil}}}",
    "logging": "hydra: {hydra_logging: {version: 1, handlers: {x: {class: evil_code.Evil}}, root: {handlers: [x]}}}",
    "recipe": "trusted_packages: [evil_code]\nrecipe: {_target_: evil_code.Evil}",
}


def run(arguments: Sequence[str]) -> int:
    return cli.main(arguments, time.time())


def verify(arguments: Sequence[str]) -> int:
    return cli.run_tool("verify", [*arguments, "--a", "", "--b", ""])


def evaluate(arguments: Sequence[str]) -> int:
    return cli.run_tool("evaluate", [".", *arguments])


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "plan": functools.partial(cli.run_tool, "plan"),
    "run": run,
    "sweep": lambda arguments: run(["-m", "seed=0,1", *arguments]),
    "help": lambda arguments: run(["--help", *arguments]),
    "hydra help": lambda arguments: run(["--hydra-help", *arguments]),
    "config": lambda arguments: run(["--cfg=job", *arguments]),
    "info": lambda arguments: run(["--info=all", *arguments]),
    "verify": verify,
    "evaluate": evaluate,
}


@pytest.fixture
def evil(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of choices, and code that can be imported."""
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(sys, "argv", ["runner"])
    (here / "evil_code.py").write_text(CODE)
    for name, text in FILES.items():
        (here / "choices" / "experiment").mkdir(parents=True, exist_ok=True)
        (here / "choices" / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    (here / "config.json").touch()  # for runner.evaluate: the folder of a model
    return here


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_of_a_file(
    evil: Path, command: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(evil.rglob("*"))
    overrides = [f"experiment={file}"] if command != "evaluate" else ["recipe=cola", f"+experiment@_global_={file}"]
    assert COMMANDS[command]([*QUICK[:1], "--config-dir=choices", *overrides]) == cli.EXIT_USER_ERROR
    assert sorted(evil.rglob("*")) == before
    assert "evil_code" not in sys.modules


def test_the_command_line_can(evil: Path) -> None:
    """What is typed is run: here the logging that `--help` sets up."""
    typed = "++hydra.hydra_logging={version: 1, handlers: {x: {class: evil_code.Evil}}, root: {handlers: [x]}}"
    run(["--help", typed])
    assert (evil / "canary").exists()
    del sys.modules["evil_code"]


def test_a_run_has_no_callbacks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hydra calls them in sweeps: what would have no effect is refused."""
    assert run([*QUICK, "+hydra.callbacks.x={_target_: mine.X}"]) == cli.EXIT_USER_ERROR
    assert "hydra.callbacks" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_blocked_callback_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hydra refuses some targets even on the command line, and says so in several lines."""
    assert run(["-m", *QUICK, "+hydra.callbacks.x={_target_: subprocess.Popen}"]) == cli.EXIT_USER_ERROR
    assert "subprocess.Popen" in capsys.readouterr().err
    assert os.environ["HYDRA_FULL_ERROR"] == "1"
