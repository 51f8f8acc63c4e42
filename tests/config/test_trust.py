"""What a file from `--config-dir` cannot set, since it runs code, unless the command line sets it as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.compose import compose, group_points, settings
from runner.errors import UserError

HEADER = "# @package _global_\n"
CODE = {
    "trusted_packages": "trusted_packages: [mine]",
    "hydra.callbacks.x._target_": "hydra: {callbacks: {x: {_target_: pathlib.Path.touch, self: canary}}}",
    "hydra.job_logging": "hydra: {job_logging: {version: 1, handlers: {x: {(): pathlib.Path, a: b}}}}",
    "hydra.hydra_logging": "hydra: {hydra_logging: {version: 1, handlers: {x: {class: mine.X}}}}",
    "hydra.job.env_set.LD_PRELOAD": "hydra: {job: {env_set: {LD_PRELOAD: x.so}}}",
    "hydra.launcher._target_": "hydra: {launcher: {_target_: mine.Launcher}}",
    "hydra.launcher.setup": "hydra: {launcher: {setup: [touch canary]}}",
    "hydra.sweeper.sampler._target_": "hydra: {sweeper: {sampler: {_target_: mine.Sampler}}}",
    "hydra.sweeper.params.seed._target_": "hydra: {sweeper: {params: {seed: {_target_: mine.f}}}}",
    "hydra.sweeper.params.seed": "hydra: {sweeper: {params: {seed: '${recipe.x}'}}}",
    "hydra.sweeper.params.trusted_packages": "hydra: {sweeper: {params: {trusted_packages: '[a],[b]'}}}",
    "hydra.sweeper.params.++hydra.callbacks": "hydra: {sweeper: {params: {++hydra.callbacks: '{x: 1}'}}}",
    "hydra.sweeper.params.recipe@hydra.callbacks.x": "hydra: {sweeper: {params: {recipe@hydra.callbacks.x: mine}}}",
}
HARMLESS = """hydra:
  run: {dir: 'mine/${now:%Y}'}
  sweep: {dir: mine, subdir: a}
  launcher: {n_jobs: 2}
  sweeper: {params: {optimizer.lr: '1e-3,1e-4', batch: per_device, device.length_buckets: [16, 32]}}
"""


def write(folder: Path, content: str, name: str = "experiment/mine.yaml") -> list[str]:
    """The folder as `config_dirs`, with this file."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)
    return [str(folder)]


@pytest.mark.parametrize("name", CODE)
def test_what_runs_code_is_refused(tmp_path: Path, name: str) -> None:
    """The message names the setting and the file."""
    config_dirs = write(tmp_path, HEADER + CODE[name])
    with pytest.raises(UserError) as caught:
        compose(["experiment=mine"], config_dirs)
    assert str(caught.value).startswith(name)
    assert str(tmp_path / "experiment" / "mine.yaml") in str(caught.value)
    compose([], config_dirs)  # the file is not chosen


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("hydra/callbacks/x.yaml", "hydra/callbacks=x"),
        ("evil/x.yaml", "+evil@hydra.callbacks.x=x"),
        ("hydra/launcher/x.yaml", "hydra/launcher=x"),
    ],
)
def test_wherever_the_file_is_put(tmp_path: Path, name: str, choice: str) -> None:
    """Its place among the groups, or the package that the command or another file gives it, decide what it sets."""
    config_dirs = write(tmp_path, "_target_: mine.X\n", name)
    with pytest.raises(UserError, match=r"_target_=mine\.X"):
        compose([choice], config_dirs)
    group, _, option = choice.lstrip("+").partition("=")
    override = "override " * (choice[0] != "+")
    write(tmp_path, f"{HEADER}defaults: [{{{override}/{group}: {option}}}]\n")
    with pytest.raises(UserError, match=r"_target_=mine\.X"):
        compose(["experiment=mine"], config_dirs)


def test_the_same_from_the_search_path(tmp_path: Path) -> None:
    (folder,) = write(tmp_path, HEADER + CODE["trusted_packages"])
    with pytest.raises(UserError, match=r"^trusted_packages"):
        compose(["experiment=mine", f"hydra.searchpath=[{folder}]"])


def test_the_command_line_can_give_consent(tmp_path: Path) -> None:
    """By the value itself: part of what the file sets is not enough, and nothing of the file remains."""
    config_dirs = write(tmp_path, f"{HEADER}{CODE['trusted_packages']}\n{CODE['hydra.callbacks.x._target_']}")
    trust = "trusted_packages=[other]"
    for typed in ([], [trust], [trust, "++hydra.callbacks.x._target_=mine.A"], [trust, "++hydra.callbacks.x={}"]):
        with pytest.raises(UserError):
            compose(["experiment=mine", *typed], config_dirs)
    cfg = compose(["experiment=mine", trust, "++hydra.callbacks.x={_target_: mine.A, self: b}"], config_dirs)
    assert settings(cfg).trusted_packages == ["other"]
    assert cfg.hydra.callbacks == {"x": {"_target_": "mine.A", "self": "b"}}


def test_what_runs_no_code_is_taken(tmp_path: Path) -> None:
    launcher = "defaults: [{override /hydra/launcher: joblib}]\n"
    cfg = compose(["experiment=mine"], write(tmp_path, HEADER + launcher + HARMLESS))
    assert (cfg.hydra.launcher.n_jobs, cfg.hydra.sweep.subdir) == (2, "a")
    assert "joblib" in cfg.hydra.launcher._target_


def test_every_combination_of_files_is_a_point() -> None:
    """With one value of every other setting: an optimizing sweeper may choose any combination."""
    swept = ["optimizer=adam,sgd", "seed=0,1", "optimizer.lr=interval(1,2)", "sync=outer,gradients", "epochs=2"]
    points = list(group_points(swept))
    assert len({tuple(point) for point in points}) == len(points) == 4
    for point in points:
        assert [override.partition("=")[0] for override in point] == [
            "epochs",
            *(one.split("=")[0] for one in swept[:4]),
        ]
