"""Read device, workers and precision from a Hugging Face Accelerate config file, and refuse what asks for more."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import yaml

from runner.config.choices import DeviceKind, PrecisionName
from runner.config.environment import is_external
from runner.config.schema import Config
from runner.errors import UserError

#: Accelerate's `distributed_type`. NO is one process on any device; older versions write TPU for XLA.
_KINDS = {
    "NO": DeviceKind.auto,
    "MULTI_CPU": DeviceKind.cpu,
    "MULTI_GPU": DeviceKind.gpu,
    "XLA": DeviceKind.tpu,
    "TPU": DeviceKind.tpu,
}
_PRECISIONS = {"no": PrecisionName.fp32, "fp16": PrecisionName.fp16, "bf16": PrecisionName.bf16}


def apply(config: Config) -> Config:
    """Replace `from_accelerate` in a configuration by the values of its file. Raises UserError.

    A configuration without `from_accelerate` is returned unchanged. Workers and precision that are given take
    precedence over the file.
    """
    device, precision = config.device, config.precision.name
    if device.kind is not DeviceKind.from_accelerate:
        if device.file is not None:
            raise UserError(
                f"device.file={device.file} is not read with device.kind={device.kind.name}: "
                "choose device=from_accelerate, or remove device.file"
            )
        if precision is PrecisionName.from_accelerate:
            raise UserError(
                f"precision=from_accelerate has no file to read with device.kind={device.kind.name}: "
                "choose device=from_accelerate device.file=…, or another precision"
            )
        return config
    if device.file is None:
        raise UserError(
            "device.file has no value: device=from_accelerate needs a file that `accelerate config` wrote, such as "
            "device.file=default_config.yaml"
        )
    file = _File(device.file)
    kind = file.kind()
    workers = device.workers or file.workers()
    precision = file.precision() if precision is PrecisionName.from_accelerate else precision
    file.refuse_what_is_set_elsewhere(kind, workers, config.compile)
    return dataclasses.replace(
        config,
        device=dataclasses.replace(device, kind=kind, workers=workers),
        precision=dataclasses.replace(config.precision, name=precision),
    )


class _File:
    def __init__(self, path: str) -> None:
        """Load the file. Raises UserError if it is missing or not a YAML mapping."""
        self._path = path
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise UserError(f"device.file={path} cannot be read ({error.strerror}): check the path") from error
        except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or an impossible date
            raise UserError(f"device.file={path} is not valid YAML: use an Accelerate config file") from error
        if not isinstance(content, dict):
            raise UserError(f"device.file={path} has no `key: value` lines: use an Accelerate config file")
        self._values: dict[str, Any] = content

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def _invalid(self, key: str, rule: str) -> UserError:
        return UserError(f"device.file={self._path} has {key}: {json.dumps(self._get(key), default=str)}: {rule}")

    def kind(self) -> DeviceKind:
        name = self._type()
        instead = "use MULTI_CPU, MULTI_GPU or XLA, or a device such as device=gpu4 without a file"
        if name == "FSDP":
            instead = f"sharding=fsdp is a setting of the runner: add it to the command, and {instead}"
        if name not in _KINDS:
            raise self._invalid("distributed_type", instead)
        return DeviceKind.cpu if self._get("use_cpu", False) else _KINDS[name]

    def _type(self) -> str:
        name = self._get("distributed_type")
        return "NO" if name is False else str(name)  # YAML reads an unquoted NO as false

    def workers(self) -> int:
        """Model replicas over all machines. Accelerate starts one process under NO, whatever `num_processes` says."""
        return (
            1 if self._type() == "NO" else self._count("num_processes", "add it to the file, or set device.workers=…")
        )

    def precision(self) -> PrecisionName:
        name = self._get("mixed_precision", "no")
        found = _PRECISIONS.get("no" if name is False else str(name).lower())  # YAML reads an unquoted no as false
        if found is None:
            raise self._invalid("mixed_precision", "use no, fp16 or bf16, or set precision=bf16")
        return found

    def refuse_what_is_set_elsewhere(self, kind: DeviceKind, workers: int, compiles: bool) -> None:
        """Refuse what the runner cannot follow, or takes from another place than this file. Raises UserError."""
        if self._get("parallelism_config"):
            raise self._invalid("parallelism_config", "only sharding=fsdp splits models; remove it from the file")
        if self._get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
            raise self._invalid("compute_environment", "the runner runs on this machine; use a file for LOCAL_MACHINE")
        for key in ("dynamo_config", "dynamo_backend"):
            if self._get(key, "NO") not in ("NO", False, {}) and not compiles:
                raise self._invalid(key, "add compile=true to the command, or remove it from the file")
        ids = self._get("gpu_ids", "all")
        if ids != "all" and kind in (DeviceKind.gpu, DeviceKind.auto) and "CUDA_VISIBLE_DEVICES" not in os.environ:
            given = ids if isinstance(ids, str) else str(ids).strip("[]")
            raise self._invalid("gpu_ids", f"set the variable CUDA_VISIBLE_DEVICES={given}")
        machines = 1 if self._get("num_machines") is None else self._count("num_machines")
        if machines > 1 and not is_external():
            options = f"--nnodes {machines} --nproc-per-node {workers // machines}"
            place = f"--node-rank {self._get('machine_rank', 0)} --master-addr {self._get('main_process_ip', '…')}"
            command = f"torchrun {options} {place} --master-port {self._get('main_process_port', 29500)} -m runner …"
            raise self._invalid("num_machines", f"start the runner with torchrun on every machine; here: {command}")

    def _count(self, key: str, fix: str = "correct it") -> int:
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._invalid(key, f"use a whole number of at least 1: {fix}")
        return value
