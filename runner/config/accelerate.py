"""Read device, workers and precision from a Hugging Face Accelerate config file, and refuse what asks for more."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from runner.config.choices import DeviceKind, PrecisionName
from runner.config.environment import is_external
from runner.config.schema import Config
from runner.errors import UserError, require

#: Accelerate's `distributed_type`. NO is one process on any device; older versions write TPU for XLA.
_KINDS = {
    "NO": DeviceKind.auto,
    "MULTI_CPU": DeviceKind.cpu,
    "MULTI_GPU": DeviceKind.gpu,
    "XLA": DeviceKind.tpu,
    "TPU": DeviceKind.tpu,
}
_PRECISIONS = {"no": PrecisionName.fp32, "fp16": PrecisionName.fp16, "bf16": PrecisionName.bf16}
#: Keys that the runner does not follow: the values that ask for nothing, and what to do about others.
_NOT_FOLLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "parallelism_config": (({},), "only sharding=fsdp splits models; remove it from the file"),
    "compute_environment": (("LOCAL_MACHINE",), "the runner runs on this machine; use a file for LOCAL_MACHINE"),
    "dynamo_config": (({},), "remove it from the file, and add compile=true to the command"),
    "dynamo_backend": (("NO", False), "remove it from the file, and add compile=true to the command"),
    "gpu_ids": (("all",), "remove it from the file, and set the variable CUDA_VISIBLE_DEVICES"),
}


def apply(config: Config) -> Config:
    """Replace `from_accelerate` in a configuration by the values of its file. Raises UserError.

    A configuration without `from_accelerate` is returned unchanged. Workers and precision that are given take
    precedence over the file.
    """
    device, precision = config.device, config.precision.name
    if device.kind is not DeviceKind.from_accelerate:
        rule = "choose device=from_accelerate, or remove it"
        require(
            device.file is None, "device.file", device.file, f"device.kind={device.kind.name} reads no file: {rule}"
        )
        rule = "it is for device=from_accelerate device.file=…; choose another precision"
        require(precision is not PrecisionName.from_accelerate, "precision", precision, rule)
        return config
    rule = "name a file that `accelerate config` wrote, such as device.file=default_config.yaml"
    require(device.file is not None, "device.file", None, rule)
    file = _File(str(device.file))
    kind, workers = file.kind(), device.workers or file.workers()
    precision = file.precision() if precision is PrecisionName.from_accelerate else precision
    file.refuse_what_is_not_followed(workers)
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
        self._values = {key: value for key, value in content.items() if value is not None}

    def _invalid(self, key: str, rule: str) -> UserError:
        value = json.dumps(self._values.get(key), default=str)
        return UserError(f"device.file={self._path} has {key}: {value}: {rule}")

    def _word(self, key: str) -> str:
        value = self._values.get(key)
        return "no" if value is False else str(value)  # YAML reads an unquoted no as false

    def kind(self) -> DeviceKind:
        kind = _KINDS.get(self._word("distributed_type").upper())
        if kind is None:
            rule = "use MULTI_CPU, MULTI_GPU or XLA, or a device such as device=gpu4 without a file"
            raise self._invalid("distributed_type", f"{rule}; for FSDP add sharding=fsdp to the command")
        return DeviceKind.cpu if self._values.get("use_cpu") else kind

    def workers(self) -> int:
        """Model replicas over all machines. Accelerate starts one process under NO, whatever `num_processes` says."""
        one = self._word("distributed_type").upper() == "NO"
        return 1 if one else self._count("num_processes", "add it to the file, or set device.workers=…")

    def precision(self) -> PrecisionName:
        if "mixed_precision" not in self._values:
            return PrecisionName.fp32
        if (found := _PRECISIONS.get(self._word("mixed_precision").lower())) is None:
            raise self._invalid("mixed_precision", "use no, fp16 or bf16, or set precision=bf16")
        return found

    def refuse_what_is_not_followed(self, workers: int) -> None:
        for key, (neutral, rule) in _NOT_FOLLOWED.items():
            if self._values.get(key, neutral[0]) not in neutral:
                raise self._invalid(key, rule)
        machines = self._count("num_machines", "correct it") if "num_machines" in self._values else 1
        if machines > 1 and not is_external():
            get = self._values.get
            options = f"--nnodes {machines} --nproc-per-node {workers // machines} --node-rank {get('machine_rank', 0)}"
            place = f"--master-addr {get('main_process_ip', '…')} --master-port {get('main_process_port', 29500)}"
            command = f"torchrun {options} {place} -m runner …"
            raise self._invalid("num_machines", f"start the runner with torchrun on every machine; here: {command}")

    def _count(self, key: str, fix: str) -> int:
        value = self._values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._invalid(key, f"use a whole number of at least 1: {fix}")
        return value
