"""README, docs/commands.md and docs/from-trainer.md: their commands are valid, and the last one's blocks run."""

from __future__ import annotations

import csv
import re
import shlex
import sys
from pathlib import Path

import pytest

from recipes.synthetic.grammar import generate
from runner.api import plan
from tests.configured import configured
from tests.processes import ROOT, TIMEOUT_S, output, start
from tests.runs import only_folder, read
from tests.tiny_models import save_bert

README, COMMANDS, FROM_TRAINER = (ROOT / name for name in ("README.md", "docs/commands.md", "docs/from-trainer.md"))
#: Rows of the CSV files: three optimizer steps an epoch at a batch of 32, the last of them smaller.
TRAIN_ROWS, DEV_ROWS = 80, 20


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Its commands that call the runner, as lists of arguments after `python -m`."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [command[2:] for command in found if command[:2] == ["python", "-m"] and command[2].startswith("runner")]


def composable(overrides: list[str]) -> list[str]:
    """Without flags and without what continues another run; of what a sweep varies, the first value."""
    settings = [one for one in overrides if "=" in one and not one.startswith(("-", "resume"))]
    return [one if "[" in one else one.partition(",")[0] for one in settings]


@pytest.mark.parametrize("page", [README, COMMANDS, FROM_TRAINER], ids=["readme", "commands", "from_trainer"])
def test_every_command_has_valid_settings(page: Path) -> None:
    trained = [arguments for tool, *arguments in commands(page) if tool in ("runner", "runner.plan")]
    assert trained
    for arguments in trained:
        configured(composable(arguments))


def test_the_readme_shows_what_a_run_prints() -> None:
    """The plan of the first run, line by line."""
    (shown,) = blocks(README, "text")
    found = plan("device=cpu").plan
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    steps = f"{found.optimizer_steps:,}"
    for line in (
        f"global batch {found.global_batch} micro-batch {found.micro_batch} × accumulation 1 × 1 worker(s)",
        f"learning rate {found.lr:g} base, for the reference batch of {found.global_batch}",
        f"optimizer steps {steps} 6 epochs × {found.steps_per_epoch} steps",
    ):
        assert line in lines
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", [README, FROM_TRAINER], ids=["readme", "from_trainer"])
def test_settings_in_tables_exist(page: Path) -> None:
    """The second column: each piece of code is a list of settings."""
    rows = [line.split(" | ") for line in page.read_text().splitlines() if re.match(r"\| .* \| `[a-z_.]+=", line)]
    assert len(rows) >= 4
    for row in rows:
        for settings in re.findall(r"`([^`]+=[^`]+)`", row[1]):
            configured(composable(["recipe=text_classification", *shlex.split(settings)]))


@pytest.fixture
def script_folder(here: Path) -> Path:
    """What a reader of the page has: two files, a model and the script."""
    for name, seed, count in (("train", 0, TRAIN_ROWS), ("dev", 1, DEV_ROWS)):
        with (here / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows([row.sentence, row.label] for row in generate(seed, count, 2)[0])
    save_bert(here / "my-model", [row.sentence for row in generate(0, TRAIN_ROWS, 2)[0]])
    return here


@pytest.mark.long
def test_from_trainer(script_folder: Path) -> None:
    """The script, followed by the audit, and the commands after it; both make the same number of steps."""

    # One thread: two wait for each other where other tests use the cores.
    environment = {"HF_DATASETS_CACHE": str(script_folder / "cache"), "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        process = start(script_folder, *command, **environment)
        assert process.wait(timeout=TIMEOUT_S) == 0, output(script_folder)
        return output(script_folder)

    script, use, audit = blocks(FROM_TRAINER, "python")
    train, predict, *plans, sweep = [["-m", *command] for command in commands(FROM_TRAINER)]
    (script_folder / "train.py").write_text(script.removesuffix("trainer.train()\n") + audit)
    assert "nothing wrong" in run(sys.executable, "train.py")
    steps = len((script_folder / "audit" / "steps.jsonl").read_text().splitlines())
    run(*train, "device=cpu", "tracking=none")
    folder = only_folder(script_folder, "text_classification")
    assert read(folder, "summary.json")["optimizer_steps"] == 9 == steps
    assert "label" in run("-c", use.replace("RUN", str(folder)))
    run(*[argument.replace("RUN", str(folder)) for argument in predict])
    assert len((script_folder / "predictions.csv").read_text().splitlines()) == DEV_ROWS + 1
    for command in plans:
        assert "global batch" in run(*command)
    assert "verdict" in run(*sweep, "epochs=1", "seed=0,1")
