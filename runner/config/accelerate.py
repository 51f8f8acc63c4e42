"""Read device, workers and precision from a Hugging Face Accelerate config file."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
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
_SHARDING = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "TP")
_PRECISIONS = {"no": PrecisionName.fp32, "fp16": PrecisionName.fp16, "bf16": PrecisionName.bf16}
_MACHINE_KEYS = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
NOT_USED = "not used"


@dataclass(frozen=True)
class AccelerateSettings:
    """What a file says. `workers`: over all machines. `taken`: key to the setting it sets; `left`: key to the reason.

    `rendezvous`: torchrun's arguments for a file of several machines, else None.
    """

    kind: DeviceKind
    workers: int
    precision: PrecisionName
    machines: int
    rendezvous: tuple[str, ...] | None
    taken: dict[str, str]
    left: dict[str, str]


def apply(config: Config) -> Config:
    """Replace `from_accelerate` in a configuration by the values of its file. Raises UserError.

    A configuration without `from_accelerate` is returned unchanged.
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
    found = read(device.file, device.workers, None if precision is PrecisionName.from_accelerate else precision)
    if found.rendezvous is not None and not is_external():
        torchrun = [
            "torchrun",
            *found.rendezvous,
            "-m",
            "runner",
            "device=from_accelerate",
            f"device.file={device.file}",
        ]
        raise UserError(
            f"device.file={device.file} has num_machines: {found.machines}, but this command starts workers on one "
            f"machine: use torchrun on every machine, followed by your other settings; here: {shlex.join(torchrun)}"
        )
    return dataclasses.replace(
        config,
        device=dataclasses.replace(device, kind=found.kind, workers=found.workers),
        precision=dataclasses.replace(config.precision, name=found.precision),
    )


def read(path: str, workers: int | None = None, precision: PrecisionName | None = None) -> AccelerateSettings:
    """Read the file. `workers` and `precision`, if given, take precedence over it. Raises UserError."""
    file = _File(path)
    distributed_type = file.distributed_type()
    one_process = distributed_type == "NO"
    on_cpu = file.get("use_cpu", False)
    kind = DeviceKind.cpu if on_cpu else _KINDS[distributed_type]
    # Accelerate starts one process under NO, whatever num_processes says.
    workers = workers or (1 if one_process else file.num_processes())
    in_file = file.precision()
    if precision is None and in_file is None:
        raise file.invalid("mixed_precision", "use no, fp16 or bf16, or set precision=bf16")
    precision = precision or in_file
    assert precision is not None
    machines, rendezvous = file.rendezvous(workers)

    # For the notes above the plan: each key with what became of it.
    taken: dict[str, str] = {}
    left: dict[str, str] = {}
    if on_cpu:
        taken["use_cpu"] = "device.kind=cpu"
        left["distributed_type"] = "use_cpu: true selects the device"
    else:
        taken["distributed_type"] = f"device.kind={kind.name}"
    if file.get("num_processes") == workers:
        taken["num_processes"] = f"device.workers={workers}"
    else:
        default = one_process and workers == 1
        left["num_processes"] = (
            "distributed_type: NO is one process" if default else f"device.workers={workers} was given"
        )
    if in_file is precision:
        taken["mixed_precision"] = f"precision={precision.name}"
    else:
        left["mixed_precision"] = f"precision={precision.name} was given"
    several = "an argument of torchrun"
    for key in _MACHINE_KEYS:
        (taken if rendezvous else left)[key] = several if rendezvous else "only used with several machines"
    if file.get("dynamo_config", {}) or file.get("dynamo_backend", "NO") != "NO":
        left |= dict.fromkeys(("dynamo_backend", "dynamo_config"), "set compile=true instead")
    ids = file.get("gpu_ids", "all")
    if ids != "all" and kind in (DeviceKind.gpu, DeviceKind.auto):
        left["gpu_ids"] = f"set CUDA_VISIBLE_DEVICES={ids if isinstance(ids, str) else str(ids).strip('[]')} instead"
    present = [key for key, value in file.values.items() if value is not None]
    return AccelerateSettings(
        kind,
        workers,
        precision,
        machines,
        rendezvous,
        {key: taken[key] for key in present if key in taken},
        {key: left.get(key, NOT_USED) for key in file.values if key not in taken},
    )


class _File:
    def __init__(self, path: str) -> None:
        """Load the file. Raises UserError if it is missing or not a YAML mapping."""
        self.path = path
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
        except FileNotFoundError as error:
            raise UserError(f"device.file={path} does not exist: check the path") from error
        except IsADirectoryError as error:
            raise UserError(f"device.file={path} is a folder: use the file in it") from error
        except OSError as error:
            raise UserError(f"device.file={path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"device.file={path} is not UTF-8 text: use an Accelerate config file") from error
        except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
            raise UserError(f"device.file={path} is not valid YAML: use an Accelerate config file") from error
        if not isinstance(content, dict):
            raise UserError(f"device.file={path} has no `key: value` lines: use an Accelerate config file")
        self.values: dict[str, Any] = {str(key): value for key, value in content.items()}

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def invalid(self, key: str, rule: str) -> UserError:
        return UserError(f"device.file={self.path} has {key}: {json.dumps(self.get(key), default=str)}: {rule}")

    def distributed_type(self) -> str:
        name = self.get("distributed_type")
        if name is None:
            raise UserError(
                f"device.file={self.path} has no distributed_type: use a file that `accelerate config` wrote"
            )
        name = "NO" if name is False else str(name)  # YAML reads an unquoted NO as false
        instead = "use MULTI_CPU, MULTI_GPU or XLA, or a device such as device=gpu4 without a file"
        if name in _SHARDING:
            sharded = "sharding=fsdp is a setting of the runner: add it to the command, and "
            raise self.invalid("distributed_type", (sharded if name == "FSDP" else "") + instead)
        if name not in _KINDS:
            raise self.invalid("distributed_type", instead)
        if self.get("parallelism_config"):
            raise self.invalid("parallelism_config", "only sharding=fsdp splits models; remove it from the file")
        if self.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
            raise self.invalid("compute_environment", "the runner runs on this machine; use a file for LOCAL_MACHINE")
        return name

    def num_processes(self) -> int:
        """Model replicas over all machines."""
        if self.get("num_processes", -1) == -1:  # -1: left to `accelerate launch`
            raise UserError(
                f"device.file={self.path} has no num_processes: set device.workers=…, or add it to the file"
            )
        return self.count("num_processes", 1)

    def precision(self) -> PrecisionName | None:
        """None for a precision that the runner does not have."""
        name = self.get("mixed_precision", "no")
        return _PRECISIONS.get("no" if name is False else str(name).lower())  # YAML reads an unquoted no as false

    def rendezvous(self, workers: int) -> tuple[int, tuple[str, ...] | None]:
        """The number of machines and, if there are several, the arguments with which torchrun joins them."""
        machines = self.count("num_machines", 1)
        if machines == 1:
            return 1, None
        if workers % machines:
            raise self.invalid("num_machines", f"must divide the {workers} worker(s) of all machines")
        ip = self.get("main_process_ip")
        if ip is None and not is_external():
            raise UserError(f"device.file={self.path} has num_machines: {machines} and no main_process_ip: add it")
        options = {
            "--nnodes": machines,
            "--node-rank": self.get("machine_rank", 0),
            "--master-addr": ip,
            "--master-port": self.get("main_process_port", 29500),
            "--nproc-per-node": workers // machines,
        }
        return machines, tuple(str(part) for option in options.items() for part in option)

    def count(self, key: str, default: int) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.invalid(key, "use a whole number of at least 1")
        return value
