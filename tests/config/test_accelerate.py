"""Accelerate config files: what becomes of each key, what is refused, and what the command line overrides."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from runner.config.accelerate import NO_USE, apply, read
from runner.config.choices import DeviceKind, PrecisionName
from runner.config.compose import compose, settings
from runner.config.plain import from_plain, to_plain
from runner.config.schema import Config, Device, Precision
from runner.errors import UserError
from runner.plan.tables import accelerate_notes

#: As `accelerate config` (1.15) writes it for four GPUs of one machine.
MULTI_GPU = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
#: As `accelerate config default` writes it where there is no GPU: JSON, under the name of a YAML file.
DEFAULT = """\
{
  "compute_environment": "LOCAL_MACHINE",
  "debug": false,
  "distributed_type": "NO",
  "downcast_bf16": false,
  "enable_cpu_affinity": false,
  "machine_rank": 0,
  "main_training_function": "main",
  "mixed_precision": "no",
  "num_machines": 1,
  "num_processes": 1,
  "rdzv_backend": "static",
  "same_network": false,
  "tpu_use_cluster": false,
  "tpu_use_sudo": false,
  "use_cpu": true
}
"""
TWO_MACHINES: dict[str, Any] = {
    "num_machines": 2,
    "num_processes": 8,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29501,
}


@pytest.fixture(autouse=True)
def _in_a_folder_outside_any_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def write(text: str) -> str:
    Path("acc.yaml").write_text(text)
    return "acc.yaml"


def written(**keys: Any) -> str:
    """The path of the file for four GPUs with other values of some keys; `...` takes a key out."""
    values = {**yaml.safe_load(MULTI_GPU), **keys}
    return write(yaml.safe_dump({key: value for key, value in values.items() if value is not ...}))


@functools.cache
def defaults() -> Config:
    return settings(compose(["device=cpu"]))


def applied(path: str) -> Config:
    """The settings that come of `device=from_accelerate device.file=…`, without composing them each time."""
    device, precision = Device(DeviceKind.from_accelerate, file=path), Precision(PrecisionName.from_accelerate)
    return apply(dataclasses.replace(defaults(), device=device, precision=precision))


def from_file(path: str) -> list[str]:
    return ["device=from_accelerate", f"device.file={path}"]


def configured(path: str, *overrides: str) -> Config:
    return settings(compose([*from_file(path), *overrides]))


def came_to(config: Config) -> tuple[str, int | None, str]:
    return config.device.kind.name, config.device.workers, config.precision.name.name


def said(of: Callable[[], object]) -> str:
    """The one sentence with which settings are refused."""
    with pytest.raises(UserError) as caught:
        of()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is taken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"), [(MULTI_GPU, ("gpu", 4, "bf16")), (DEFAULT, ("cpu", 1, "fp32"))], ids=["config", "default"]
)
def test_files_that_accelerate_writes(text: str, expected: tuple[str, int, str]) -> None:
    """The files of its two commands are understood to the last key."""
    path = write(text)
    assert came_to(configured(path)) == expected
    reading = read(path)
    assert set(reading.taken) | set(reading.left) == set(yaml.safe_load(text))
    assert not set(reading.taken) & set(reading.left)
    assert not [why for why in reading.left.values() if "unknown" in why]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"distributed_type": "MULTI_CPU"}, ("cpu", 4, "bf16")),
        ({"distributed_type": "MULTI_CPU", "use_cpu": True}, ("cpu", 4, "bf16")),
        ({"distributed_type": "MULTI_GPU"}, ("gpu", 4, "bf16")),
        ({"distributed_type": "MULTI_GPU", "use_cpu": True}, ("cpu", 4, "bf16")),
        ({"distributed_type": "XLA", "num_processes": 8}, ("tpu", 8, "bf16")),
        ({"distributed_type": "TPU", "num_processes": 8}, ("tpu", 8, "bf16")),
        # one process, whatever the number: so does Accelerate
        ({"distributed_type": "NO", "num_processes": 1}, ("auto", 1, "bf16")),
        ({"distributed_type": "NO", "num_processes": 4}, ("auto", 1, "bf16")),
        ({"distributed_type": "NO", "num_processes": -1}, ("auto", 1, "bf16")),
        ({"distributed_type": "NO", "num_processes": ..., "use_cpu": True}, ("cpu", 1, "bf16")),
        ({"distributed_type": False}, ("auto", 1, "bf16")),  # NO without quotes
        # precision
        ({"mixed_precision": "no"}, ("gpu", 4, "fp32")),
        ({"mixed_precision": False}, ("gpu", 4, "fp32")),  # no without quotes
        ({"mixed_precision": "fp16"}, ("gpu", 4, "fp16")),
        ({"mixed_precision": "BF16"}, ("gpu", 4, "bf16")),
        ({"mixed_precision": ...}, ("gpu", 4, "fp32")),
        ({"mixed_precision": None}, ("gpu", 4, "fp32")),
        ({"mixed_precision": ..., "fp16": True}, ("gpu", 4, "fp16")),
        ({"mixed_precision": ..., "fp16": False}, ("gpu", 4, "fp32")),
        # what does not matter on one machine is not looked at
        ({"main_process_port": 0, "main_process_ip": None, "compute_environment": ...}, ("gpu", 4, "bf16")),
    ],
)
def test_what_a_file_comes_to(keys: dict[str, Any], expected: tuple[str, int, str]) -> None:
    """Device, workers and precision are the file's, and nothing of `from_accelerate` is left in the settings."""
    path = written(**keys)
    config = applied(path)
    assert came_to(config) == expected
    assert config.device.file == path
    assert from_plain(Config, to_plain(config)) == config


def test_a_file_with_a_byte_order_mark() -> None:
    """As an editor on Windows leaves it."""
    Path("acc.yaml").write_text(MULTI_GPU, encoding="utf-8-sig")
    assert came_to(applied("acc.yaml")) == ("gpu", 4, "bf16")


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        (
            {},
            {
                "distributed_type": "device.kind=gpu",
                "num_processes": "device.workers=4",
                "mixed_precision": "precision=bf16",
            },
        ),
        ({"distributed_type": "MULTI_CPU"}, {"distributed_type": "device.kind=cpu"}),
        ({"use_cpu": True, "distributed_type": "XLA"}, {"use_cpu": "device.kind=cpu"}),
        (
            {"use_cpu": True, "distributed_type": "MULTI_CPU"},
            {"use_cpu": "device.kind=cpu", "distributed_type": "device.kind=cpu"},
        ),
        (
            {"distributed_type": "NO", "num_processes": 1},
            {"distributed_type": "device.kind=auto, device.workers=1", "num_processes": "device.workers=1"},
        ),
        (
            {"distributed_type": "NO", "use_cpu": True},
            {"distributed_type": "device.workers=1", "use_cpu": "device.kind=cpu"},
        ),
        ({"mixed_precision": ..., "fp16": True}, {"fp16": "precision=fp16"}),
        (
            TWO_MACHINES,
            dict.fromkeys([*TWO_MACHINES], "as torchrun was started") | {"num_processes": "device.workers=8"},
        ),
    ],
)
def test_what_is_said_of_keys_that_are_taken(keys: dict[str, Any], taken: dict[str, str]) -> None:
    """Each is named with the setting that it became."""
    reading = read(written(**keys))
    assert reading.taken.items() >= taken.items()
    assert not set(reading.taken) & set(reading.left)


@pytest.mark.parametrize(
    ("keys", "key", "why"),
    [
        ({"distributed_type": "XLA", "use_cpu": True}, "distributed_type", "use_cpu: true says the device"),
        ({"distributed_type": "NO"}, "num_processes", "distributed_type: NO is one process"),
        ({"dynamo_backend": "INDUCTOR"}, "dynamo_backend", "compile=true is the runner's way"),
        ({"dynamo_config": {"dynamo_backend": "EAGER"}}, "dynamo_config", "compile=true is the runner's way"),
        ({"dynamo_backend": "NO"}, "dynamo_backend", NO_USE),
        ({"dynamo_config": {}}, "dynamo_config", NO_USE),
        ({"gpu_ids": "2,3"}, "gpu_ids", "set CUDA_VISIBLE_DEVICES=2,3, which the runner keeps to"),
        ({"gpu_ids": [2, 3]}, "gpu_ids", "set CUDA_VISIBLE_DEVICES=2,3, which the runner keeps to"),
        ({"gpu_ids": 0, "distributed_type": "NO"}, "gpu_ids", "set CUDA_VISIBLE_DEVICES=0, which the runner keeps to"),
        ({"gpu_ids": "all"}, "gpu_ids", NO_USE),
        ({"gpu_ids": "2,3", "use_cpu": True}, "gpu_ids", NO_USE),
        ({"machine_rank": 0}, "machine_rank", "of use with several machines only"),
        ({"main_process_port": 29500}, "main_process_port", "of use with several machines only"),
        ({"fsdp_config": {"fsdp_version": 2}}, "fsdp_config", NO_USE),  # under MULTI_GPU Accelerate reads none of it
        ({"parallelism_config": {}}, "parallelism_config", NO_USE),
        *[
            ({key: value}, key, NO_USE)
            for key, value in {
                "debug": True,
                "same_network": False,
                "rdzv_backend": "c10d",
                "main_training_function": "train",
                "downcast_bf16": "yes",
                "enable_cpu_affinity": True,
                "tpu_name": "board",
                "tpu_zone": "here",
                "tpu_use_sudo": True,
                "commands": ["ls"],
                "ipex_config": {"ipex": False},
                "mpirun_config": {"mpirun_ccl": "1"},
            }.items()
        ],
        ({"mixed_precison": "fp16"}, "mixed_precison", "unknown; did you mean 'mixed_precision'?"),
        ({"zzz": 1}, "zzz", "unknown"),
        ({"a\nb": 1}, "'a\\nb'", "unknown"),
    ],
)
def test_what_is_said_of_keys_that_are_left(keys: dict[str, Any], key: str, why: str) -> None:
    """Each is named with the reason, and with what to do instead where there is something."""
    reading = read(written(**keys))
    assert reading.left[key] == why
    assert key not in reading.taken


# --- what the command line overrides ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected", "left"),
    [
        ([], ("gpu", 4, "bf16"), {}),
        (["device.workers=3"], ("gpu", 3, "bf16"), {"num_processes": "device.workers=3 was given"}),
        (["precision=fp64"], ("gpu", 4, "fp64"), {"mixed_precision": "precision=fp64 was given"}),
        (["precision.name=tf32"], ("gpu", 4, "tf32"), {"mixed_precision": "precision=tf32 was given"}),
        (["device.workers=4", "precision=bf16"], ("gpu", 4, "bf16"), {}),
        # bundles
        (["setup=k4"], ("gpu", 4, "bf16"), {}),
        (["setup=one"], ("gpu", 1, "bf16"), {"num_processes": "device.workers=1 was given"}),
        (["experiment=local_sgd"], ("gpu", 4, "bf16"), {}),
        (
            ["experiment=local_sgd", "precision=fp16"],
            ("gpu", 4, "fp16"),
            {"mixed_precision": "precision=fp16 was given"},
        ),
    ],
)
def test_the_command_line_wins(
    overrides: list[str], expected: tuple[str, int, str], left: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a choice or a value stands on the command line, the file gives way, and the key is said to be left."""
    path = written()
    for config in (configured(path, *overrides), settings(compose([*overrides, *from_file(path)]))):
        assert came_to(config) == expected
        reading = read(path, config.device.workers, config.precision.name)
        about = {key: why for key, why in reading.left.items() if key in ("num_processes", "mixed_precision")}
        assert about == left
        assert config.sync.k == (4 if {"setup=k4", "experiment=local_sgd"} & set(overrides) else 1)


@pytest.mark.parametrize(
    ("keys", "overrides", "expected"),
    [
        ({"num_processes": -1}, ["device.workers=2"], ("gpu", 2, "bf16")),
        ({"num_processes": ...}, ["device.workers=2"], ("gpu", 2, "bf16")),
        ({"mixed_precision": "fp8"}, ["precision=fp32"], ("gpu", 4, "fp32")),
        ({"distributed_type": "NO"}, ["device.workers=3"], ("auto", 3, "bf16")),
        ({"distributed_type": "NO", "use_cpu": True}, ["device.workers=3"], ("cpu", 3, "bf16")),
    ],
)
def test_the_mends_that_are_proposed_do_mend(
    keys: dict[str, Any], overrides: list[str], expected: tuple[str, int, str]
) -> None:
    """What is given is not looked for in the file, and no key is called taken that was not."""
    path = written(**keys)
    config = configured(path, *overrides)
    assert came_to(config) == expected
    reading = read(path, config.device.workers, config.precision.name)
    assert not set(overrides) & set(reading.taken.values())
    if keys.get("distributed_type") == "NO":
        why = {**reading.left, **reading.taken}["distributed_type"]
        assert why == ("device.workers=3 was given" if keys.get("use_cpu") else "device.kind=auto")


@pytest.mark.parametrize("keys", [{}, {"distributed_type": "NO"}, {"mixed_precision": False}, {"use_cpu": True}])
def test_reading_again_says_the_same(keys: dict[str, Any]) -> None:
    """The notes are read off the resolved settings, which must not look like overrides of themselves."""
    path = written(**keys)
    config = applied(path)
    assert read(path, config.device.workers, config.precision.name) == read(path)


def test_a_choice_that_brings_the_file(tmp_path: Path) -> None:
    """An experiment of one's own can name the file, and choose another precision beside it."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /device: from_accelerate\n  - override /precision: fp16\n"
        f"device:\n  file: {written()}\n"
    )
    assert came_to(settings(compose(["experiment=mine"], [str(tmp_path)]))) == ("gpu", 4, "fp16")
    assert came_to(settings(compose(["experiment=mine", "precision=fp64"], [str(tmp_path)]))) == ("gpu", 4, "fp64")


# --- several machines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "command"),
    [
        ({}, "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501 --nproc-per-node 4"),
        (
            {"machine_rank": ..., "main_process_port": None, "num_processes": 2},
            "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 1",
        ),
        (
            {"num_machines": 4, "machine_rank": 3, "main_process_ip": "node0"},
            "--nnodes 4 --node-rank 3 --master-addr node0 --master-port 29501 --nproc-per-node 2",
        ),
    ],
)
def test_several_machines_get_their_torchrun_command(keys: dict[str, Any], command: str) -> None:
    """The runner starts workers on one machine, so the sentence ends with the whole command for this one."""
    path = written(**TWO_MACHINES | keys)
    end = f": torchrun {command} -m runner device=from_accelerate device.file={path}"
    assert said(lambda: applied(path)).endswith(end)


def test_torchrun_command_with_given_workers_and_an_awkward_address() -> None:
    """The workers that were given are dealt to the machines, and what a shell would read otherwise is quoted."""
    path = written(**TWO_MACHINES | {"main_process_ip": "a; rm -rf b"})
    words = shlex.split(said(lambda: configured(path, "device.workers=6")).partition(": torchrun ")[2])
    assert words[words.index("--nproc-per-node") + 1] == "3"
    assert words[words.index("--master-addr") + 1] == "a; rm -rf b"


def test_in_a_world_that_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the machines have met already: the file's keys about it are the world's, and no address is needed."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert came_to(applied(written(**TWO_MACHINES))) == ("gpu", 8, "bf16")
    assert came_to(applied(written(num_machines=2, num_processes=8))) == ("gpu", 8, "bf16")


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        *[
            ({"distributed_type": name}, [f'distributed_type: "{name}"', "whole model", "device=gpu4"])
            for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "TP")
        ],
        *[
            ({"distributed_type": f"MULTI_{name}"}, [f'"MULTI_{name}"', "cannot use", "MULTI_GPU", "device=gpu4"])
            for name in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
        ],
        ({"distributed_type": "FSDP", "use_cpu": True}, ['distributed_type: "FSDP"']),
        ({"distributed_type": "multi_gpu"}, ['"multi_gpu"', "did you mean 'MULTI_GPU'"]),
        ({"distributed_type": "RING"}, ['"RING"', "there are: MULTI_CPU, MULTI_GPU, NO, TPU, XLA"]),
        ({"distributed_type": ["NO"]}, ["distributed_type: […]", "no type"]),
        ({"distributed_type": 0}, ["distributed_type: 0", "no type"]),
        ({"distributed_type": ...}, ["has no distributed_type", "accelerate config"]),
        ({"distributed_type": "x" * 99}, ["distributed_type: …,"]),
        (
            {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL"},
            ['"AMAZON_SAGEMAKER"', "LOCAL_MACHINE"],
        ),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, ["parallelism_config: […]", "take it out"]),
        ({"use_cpu": "yes"}, ['use_cpu: "yes"', "true or false"]),
        ({"mixed_precision": "fp8"}, ['mixed_precision: "fp8"', "does not have", "precision=bf16"]),
        ({"mixed_precision": "half"}, ['mixed_precision: "half"', "no, fp16 or bf16"]),
        ({"mixed_precision": 16}, ["mixed_precision: 16", "no, fp16 or bf16"]),
        ({"mixed_precision": True}, ["mixed_precision: true", "no, fp16 or bf16"]),
        ({"num_processes": ...}, ["has no num_processes", "device.workers=N"]),
        ({"num_processes": None}, ["has no num_processes", "device.workers=N"]),
        ({"num_processes": -1}, ["num_processes open (-1)", "device.workers=N"]),
        *[
            ({"num_processes": value}, [f"num_processes: {shown},", "whole number of at least 1"])
            for value, shown in [(0, "0"), (-2, "-2"), ("two", '"two"'), ("4", '"4"'), (4.0, "4.0"), (True, "true")]
        ],
        ({"num_processes": 0, "distributed_type": "NO"}, ["num_processes: 0,", "whole number of at least 1"]),
        ({"num_processes": [4]}, ["num_processes: […],", "whole number"]),
        ({"num_machines": 0}, ["num_machines: 0,", "whole number of at least 1"]),
        ({"num_machines": "two"}, ['num_machines: "two",', "whole number of at least 1"]),
        ({"num_machines": 3}, ["num_machines: 3,", "divide the 4 worker(s)"]),
        ({"num_machines": 2, "distributed_type": "NO"}, ["num_machines: 2,", "distributed_type: NO"]),
        ({"num_machines": 2}, ["num_machines: 2 and no main_process_ip", "add it"]),
        (TWO_MACHINES | {"main_process_ip": 10.1}, ["main_process_ip: 10.1,", "address"]),
        (TWO_MACHINES | {"main_process_ip": ""}, ['main_process_ip: "",', "address"]),
        (TWO_MACHINES | {"main_process_port": 0}, ["main_process_port: 0,", "from 1 to 65535"]),
        (TWO_MACHINES | {"main_process_port": 65536}, ["main_process_port: 65536,", "from 1 to 65535"]),
        (TWO_MACHINES | {"machine_rank": 2}, ["machine_rank: 2,", "from 0 to 1"]),
        (TWO_MACHINES | {"machine_rank": -1}, ["machine_rank: -1,", "from 0 to 1"]),
    ],
)
def test_refused_values(keys: dict[str, Any], words: list[str]) -> None:
    """One sentence names the file, the key, its value and the mend."""
    path = written(**keys)
    message = said(lambda: applied(path))
    assert message.startswith(f"device.file={path} ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [1, 2\nb: }", ["no YAML (line 2)"]),
        (b"!!python/object/apply:os.system ['touch pwned']", ["no YAML (line 1)"]),
        (b"a: 2023-13-45", ["no YAML"]),
        (b"[" * 100_000, ["no YAML"]),
        (b"\xff\xfe\x00\x01", ["not UTF-8", "byte 0"]),
        (b"", ["no `key: value` lines"]),
        (b"- 1\n- 2\n", ["no `key: value` lines"]),
        (b"Hello", ["no `key: value` lines"]),
        (b"seed: 3\n", ["has no distributed_type"]),
    ],
    ids=["bracket", "tag", "date", "deep", "binary", "empty", "list", "text", "other"],
)
def test_refused_files(content: bytes, words: list[str]) -> None:
    """What is no Accelerate file is refused, and nothing in it is run."""
    Path("acc.yaml").write_bytes(content)
    message = said(lambda: applied("acc.yaml"))
    assert message.startswith("device.file=acc.yaml ")
    assert "give a" in message
    for word in words:
        assert word in message
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["device=from_accelerate"], ["device.file has no value", "device.file=default_config.yaml"]),
        (from_file("missing.yaml"), ["device.file=missing.yaml does not exist", "check the path"]),
        (from_file("."), ["device.file=. is a folder"]),
        (from_file("acc.yaml/x"), ["device.file=acc.yaml/x cannot be read: Not a directory"]),
        (from_file("'~nobody-here/x'"), ["device.file=~nobody-here/x", "home folder", "check the path"]),
        (from_file("x" * 300), ["cannot be read: File name too long"]),
        (["device=cpu", "device.file=acc.yaml"], ["device.file=acc.yaml", "device.kind=cpu", "device=from_accelerate"]),
        (["device.file=acc.yaml"], ["device.file=acc.yaml", "device.kind=auto", "device=from_accelerate"]),
        ([*from_file("acc.yaml"), "device.kind=cpu"], ["device.kind=cpu", "and no other"]),
        (["experiment=local_sgd", "device.file=acc.yaml"], ["device.kind=tpu"]),
        (["precision=from_accelerate"], ["precision=from_accelerate", "device.kind=auto", "another precision"]),
        (["device=gpu2", "precision=from_accelerate"], ["precision=from_accelerate", "device.kind=gpu"]),
    ],
)
def test_refused_settings(overrides: list[str], words: list[str]) -> None:
    """A file without its choice, a choice without its file, and a precision that nothing brings are told so."""
    written()
    message = said(lambda: settings(compose(overrides)))
    for word in words:
        assert word in message


# --- what is shown ------------------------------------------------------------------------------------------


def shown(config: Config) -> list[str]:
    notes = accelerate_notes(config)
    assert notes is not None
    console = Console(width=110)
    with console.capture() as capture:
        console.print(notes)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_notes() -> None:
    """The file, what was taken, and what was left: keys of one outcome together, those of no use at the end."""
    path = written(gpu_ids="2,3", zzz=1, use_cpu=False)
    lines = shown(configured(path, "device.workers=2"))
    assert lines[:6] == [
        "From acc.yaml",
        "taken  distributed_type → device.kind=gpu; mixed_precision → precision=bf16",
        "left   num_processes: device.workers=2 was given",
        "       num_machines, machine_rank: of use with several machines only",
        "       gpu_ids: set CUDA_VISIBLE_DEVICES=2,3, which the runner keeps to",
        "       zzz: unknown",
    ]
    assert lines[6].startswith("       compute_environment, debug, downcast_bf16, enable_cpu_affinity,")
    assert lines[-2].endswith("use_cpu: nothing the runner has a use for")
    assert lines[-1] == ""
    assert "[red]: unknown" in "\n".join(shown(applied(written(**{"[red]": 1}))))  # no markup of rich's


def test_no_notes_without_a_file() -> None:
    """The other devices have nothing to say."""
    assert accelerate_notes(settings(compose(["device=cpu2"]))) is None
