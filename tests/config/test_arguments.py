"""The argument parser of the runner's tools."""

from __future__ import annotations

import importlib.metadata

import pytest

from runner import __version__
from runner.config.arguments import ArgumentParser, HydraOptions
from runner.errors import UserError


@pytest.mark.parametrize(("typed", "named"), [(["--port", "many"], "'many'"), (["--killd"], "--killd")])
def test_a_mistake_is_one_sentence(typed: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It names what was typed and how to get help; argparse prints nothing and does not exit."""
    parser = ArgumentParser(prog="python -m runner.track")
    parser.add_argument("--port", type=int)
    with pytest.raises(UserError, match=rf"^[^\n]*{named}[^\n]*python -m runner\.track --help[^\n]*$"):
        parser.parse_args(typed)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--epochs 3", "epochs=3"),
        ("--epochs=3 device=cpu2", "epochs=3"),
        ("--optimizer.lr=3", "optimizer.lr=3"),
        ("-m --sync.k 1,4", "sync.k=1,4"),
        ("--max-steps 5", "max_steps=5"),
        ("--compile device=cpu", "compile="),
        ("recipe=cola --recipe.max_length 64", "recipe.max_length=64"),
        ("--lr 1e-4", "optimizer.lr=1e-4"),
        ("--learning_rate 1e-4", "optimizer.lr=1e-4"),
        ("--batch-size 32", "batch.global_batch=32"),
        ("--multi device=cpu,cpu2", "--multirun"),
        ("--resume latest", "write resume=latest"),
        ("-m --resume-sweep=latest", "write resume_sweep=latest"),
        ("--xyzxyz", "runner --help"),
    ],
)
def test_a_setting_written_as_an_option(typed: str, meant: str) -> None:
    """The answer is one sentence with the override that was meant."""
    with pytest.raises(UserError, match=r"^[^\n]+$") as raised:
        HydraOptions(typed.split())
    assert meant in str(raised.value)


def test_hydras_options_stay() -> None:
    options = HydraOptions(["-m", "seed=0,1", "--config-dir", "/tmp", "epochs=3"])
    assert (options.overrides, options.multirun, options.config_dirs) == (["seed=0,1", "epochs=3"], True, ["/tmp"])
    assert HydraOptions(["--cfg=job", "--resolve"]).only_shows


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        HydraOptions(["--version"])
    assert capsys.readouterr().out.split() == ["runner", __version__]
    assert importlib.metadata.version("finetune-runner") == __version__
