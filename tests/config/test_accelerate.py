"""Accelerate config files: the three values that are taken, and what is refused."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.config.accelerate import apply
from runner.config.choices import DeviceKind, PrecisionName
from runner.config.compose import compose, settings
from runner.config.schema import Config, Device, Precision
from runner.errors import UserError
from runner.plan.experiment import prepare
from tests.configured import configured
from tests.replicas import TINY

pytestmark = pytest.mark.usefixtures("here")

#: As `accelerate config` (1.15) writes it for four GPUs of one machine.
MULTI_GPU: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 4,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
TWO_MACHINES: dict[str, Any] = {
    "num_machines": 2,
    "num_processes": 8,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29501,
}


def write(**keys: Any) -> str:
    """The path of the file for four GPUs with other values of some keys; `...` removes a key."""
    values = {key: value for key, value in {**MULTI_GPU, **keys}.items() if value is not ...}
    Path("acc.yaml").write_text(yaml.safe_dump(values))
    return "acc.yaml"


def applied(path: str | None, workers: int | None = None, precision: str = "from_accelerate") -> Config:
    """The settings of `device=from_accelerate device.file=PATH`."""
    device = Device(DeviceKind.from_accelerate, workers, file=path)
    return apply(dataclasses.replace(configured(), device=device, precision=Precision(PrecisionName[precision])))


def summary(config: Config) -> tuple[str, int | None, str]:
    return config.device.kind.name, config.device.workers, config.precision.name.name


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("gpu", 4, "bf16")),
        ({"distributed_type": "MULTI_CPU"}, ("cpu", 4, "bf16")),
        ({"use_cpu": True}, ("cpu", 4, "bf16")),
        ({"distributed_type": "XLA", "num_processes": 8}, ("tpu", 8, "bf16")),
        # Accelerate starts one process under NO, whatever the number.
        ({"distributed_type": "NO"}, ("auto", 1, "bf16")),
        ({"distributed_type": False, "use_cpu": True}, ("cpu", 1, "bf16")),  # NO without quotes
        ({"mixed_precision": "no"}, ("gpu", 4, "fp32")),
        ({"mixed_precision": False}, ("gpu", 4, "fp32")),  # no without quotes
        ({"mixed_precision": ...}, ("gpu", 4, "fp32")),
        ({"mixed_precision": "fp16"}, ("gpu", 4, "fp16")),
    ],
)
def test_what_a_file_sets(keys: dict[str, Any], expected: tuple[str, int, str]) -> None:
    assert summary(applied(write(**keys))) == expected


@pytest.mark.parametrize(
    ("keys", "workers", "precision", "expected"),
    [
        ({}, 3, "fp64", ("gpu", 3, "fp64")),
        ({"num_processes": -1}, 2, "from_accelerate", ("gpu", 2, "bf16")),
        ({"mixed_precision": "fp8"}, None, "fp32", ("gpu", 4, "fp32")),
        ({"distributed_type": "NO"}, 3, "from_accelerate", ("auto", 3, "bf16")),
    ],
)
def test_the_command_line_takes_precedence(
    keys: dict[str, Any], workers: int | None, precision: str, expected: tuple[str, int, str]
) -> None:
    assert summary(applied(write(**keys), workers, precision)) == expected


def test_composed_with_choices_and_bundles() -> None:
    """A choice of precision and a bundle that sets the workers take precedence too, in any order."""
    chosen = ["device=from_accelerate", f"device.file={write()}"]
    assert summary(settings(compose([*chosen, "setup=k4"]))) == ("gpu", 4, "bf16")
    assert summary(settings(compose(["precision=fp16", "setup=one", *chosen]))) == ("gpu", 1, "fp16")


def test_the_place_of_the_file_does_not_make_another_setup(tmp_path: Path) -> None:
    """A resumed run has none, and must be the same setup as the others."""
    paths = (write(), str(shutil.copy(write(), tmp_path / "elsewhere.yaml")))
    of_file = [["device=from_accelerate", f"device.file={path}"] for path in paths]
    first, second = (prepare(configured([*TINY, *overrides])).setup_digest for overrides in of_file)
    assert first == second


def test_several_machines_get_their_torchrun_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner starts workers on one machine; under torchrun the file describes the world."""
    path = write(**TWO_MACHINES)
    place = "--node-rank 1 --master-addr 10.0.0.1 --master-port 29501 -m runner"
    with pytest.raises(UserError, match=f"torchrun --nnodes 2 --nproc-per-node 4 {place}"):
        applied(path)
    with pytest.raises(UserError, match="--nproc-per-node 3 "):
        applied(path, workers=6)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert summary(applied(path)) == ("gpu", 8, "bf16")


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"distributed_type": "FSDP"}, "distributed_type"),
        ({"distributed_type": "MULTI_NPU"}, "distributed_type"),
        ({"distributed_type": ...}, "distributed_type"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment"),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "parallelism_config"),
        ({"mixed_precision": "fp8"}, "mixed_precision"),
        ({"mixed_precision": 16}, "mixed_precision"),
        ({"num_processes": ...}, "num_processes"),
        ({"num_processes": -1}, "num_processes"),
        ({"num_processes": 0}, "num_processes"),
        ({"num_processes": "two"}, "num_processes"),
        ({"num_machines": 0}, "num_machines"),
        ({"dynamo_backend": "INDUCTOR"}, r"dynamo_backend.*compile=true"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, r"dynamo_config.*compile=true"),
        ({"gpu_ids": "2,3"}, "gpu_ids.*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_refused_values(keys: dict[str, Any], key: str) -> None:
    """One sentence names the file and the key."""
    with pytest.raises(UserError, match=rf"^device\.file=acc\.yaml has .*{key}") as caught:
        applied(write(**keys))
    assert "\n" not in str(caught.value)
