"""A Hugging Face Accelerate config file as device, workers and precision: what is taken from it, and what is left."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runner.config.choices import DeviceKind, PrecisionName
from runner.config.environment import is_external
from runner.config.schema import Config
from runner.errors import UserError, did_you_mean

#: Accelerate's devices that the runner has as well; its older versions write TPU for XLA.
_KINDS = {
    "MULTI_CPU": DeviceKind.cpu,
    "MULTI_GPU": DeviceKind.gpu,
    "XLA": DeviceKind.tpu,
    "TPU": DeviceKind.tpu,
}
_ONE_PROCESS = "NO"
_SPLITTING = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "TP")
_OTHER_DEVICES = tuple(f"MULTI_{name}" for name in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON"))
_PRECISIONS = {"no": PrecisionName.fp32, "fp16": PrecisionName.fp16, "bf16": PrecisionName.bf16}

NO_USE = "nothing the runner has a use for"
_SEVERAL_MACHINES = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
_DYNAMO = ("dynamo_backend", "dynamo_config")
#: The other keys that some version of Accelerate writes or reads.
_OTHER_KEYS = (
    *("compute_environment", "distributed_type", "use_cpu", "num_processes", "mixed_precision", "fp16", "gpu_ids"),
    *("debug", "same_network", "rdzv_backend", "main_training_function", "enable_cpu_affinity", "downcast_bf16"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file", "commands"),
    *("deepspeed_config", "fsdp_config", "megatron_lm_config", "parallelism_config", "fp8_config"),
    *("ipex_config", "mpirun_config"),
)
_KEYS = (*_OTHER_KEYS, *_SEVERAL_MACHINES, *_DYNAMO)


@dataclass(frozen=True)
class Reading:
    """What a file comes to. `workers`: over all machines. `taken`: key to what it became; `left`: key to why."""

    kind: DeviceKind
    workers: int
    precision: PrecisionName
    machines: int
    machine_rank: int
    main_ip: str | None
    main_port: int | None
    taken: dict[str, str]
    left: dict[str, str]


def apply(config: Config) -> Config:
    """`config` with what its Accelerate file says in place of `from_accelerate`; unchanged without such a file.

    Raises UserError for a file that is missing, wrong or not for the runner, and for one that nothing reads.
    """
    device, precision = config.device, config.precision.name
    if device.kind is not DeviceKind.from_accelerate:
        if device.file is not None:
            raise UserError(
                f"device.file={device.file} is read by device=from_accelerate only, and here "
                f"device.kind={device.kind.name}: choose device=from_accelerate and no other, or leave the file out"
            )
        if precision is PrecisionName.from_accelerate:
            raise UserError(
                "precision=from_accelerate takes the precision from the file of device=from_accelerate, and here "
                f"device.kind={device.kind.name}: choose that device and device.file=…, or another precision"
            )
        return config
    if device.file is None:
        raise UserError(
            "device.file has no value: device=from_accelerate needs the path of a file that `accelerate config` wrote, "
            "as in device.file=default_config.yaml"
        )
    reading = read(device.file, device.workers, None if precision is PrecisionName.from_accelerate else precision)
    if reading.machines > 1 and not is_external():
        raise UserError(
            f"device.file={device.file} has num_machines: {reading.machines}, and this command starts workers on one: "
            "run on this machine as follows, your other settings after it, and the like on the others: "
            f"{_torchrun(device.file, reading)}"
        )
    return dataclasses.replace(
        config,
        device=dataclasses.replace(device, kind=reading.kind, workers=reading.workers),
        precision=dataclasses.replace(config.precision, name=reading.precision),
    )


def _torchrun(path: str, reading: Reading) -> str:
    """The command that joins this machine's workers to those of the others."""
    if reading.main_ip is None:
        raise UserError(
            f"device.file={path} has num_machines: {reading.machines} and no main_process_ip, where the machines "
            "would meet: add it to the file"
        )
    where = ["--nnodes", reading.machines, "--node-rank", reading.machine_rank]
    meeting = ["--master-addr", reading.main_ip, "--master-port", reading.main_port]
    what = ["--nproc-per-node", reading.workers // reading.machines, "-m", "runner"]
    settings = ["device=from_accelerate", f"device.file={path}"]
    return shlex.join(map(str, ["torchrun", *where, *meeting, *what, *settings]))


def read(path: str, workers: int | None = None, precision: PrecisionName | None = None) -> Reading:
    """Read the file. `workers`, `precision`: given on the command line, and so not taken from the file.

    Given what an earlier reading came to, it says the same of each key as that reading. Raises UserError.
    """
    file = _File(path, _values(path))
    kind = file.kind()
    count = file.workers(workers)
    name = file.precision(precision)
    machines, rank, main_ip, main_port = file.machines(count)
    file.leave_the_rest(kind)
    return Reading(kind, count, name, machines, rank, main_ip, main_port, file.taken, file.left)


def _values(path: str) -> dict[str, Any]:
    setting = f"device.file={path}"
    try:
        place = Path(path).expanduser()
        content = yaml.safe_load(place.read_text(encoding="utf-8"))
    except IsADirectoryError as error:
        raise UserError(f"{setting} is a folder: give the file itself") from error
    except FileNotFoundError as error:
        raise UserError(f"{setting} does not exist (looked in {place.absolute().parent}): check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{setting} is not UTF-8 text (byte {error.start}): give an Accelerate config file") from error
    except OSError as error:
        raise UserError(f"{setting} cannot be read: {error.strerror}") from error
    # PyYAML lets a ValueError out for an impossible date, and a RecursionError for a thousand brackets.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None else ""
        raise UserError(f"{setting} is no YAML{line}: give an Accelerate config file") from error
    except RuntimeError as error:  # ~nobody
        raise UserError(f"{setting} names a home folder that cannot be found: check the path") from error
    if not isinstance(content, dict):
        raise UserError(f"{setting} holds no `key: value` lines: give an Accelerate config file")
    keys = map(str, content)
    # A key is shown in the notes, where a line end or a terminal's control character has no business.
    return dict(zip((key if key.isprintable() else ascii(key) for key in keys), content.values(), strict=True))


@dataclass
class _File:
    """The keys of a file, and what became of them so far."""

    path: str
    values: dict[str, Any]
    taken: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def kind(self) -> DeviceKind:
        """The kind of device; auto for one process on whatever there is."""
        if self.values.get("compute_environment") not in (None, "LOCAL_MACHINE"):
            raise self._wrong(
                "compute_environment", "and the runner runs where it is started: give a file for LOCAL_MACHINE"
            )
        on_cpu = self.values.get("use_cpu") or False
        if not isinstance(on_cpu, bool):
            raise self._wrong("use_cpu", "which must be true or false: correct the file")
        kind = _KINDS.get(self._distributed_type(), DeviceKind.auto)
        if on_cpu:
            self.taken["use_cpu"] = "device.kind=cpu"
        if on_cpu and kind in (DeviceKind.gpu, DeviceKind.tpu):
            self.left["distributed_type"] = "use_cpu: true says the device"
        elif not on_cpu or kind is DeviceKind.cpu:
            self.taken["distributed_type"] = f"device.kind={kind.name}"
        return DeviceKind.cpu if on_cpu else kind

    def _distributed_type(self) -> str:
        said = self.values.get("distributed_type")
        if said is None:
            raise UserError(
                f"device.file={self.path} has no distributed_type: give a file that `accelerate config` wrote"
            )
        name = _ONE_PROCESS if said is False else str(said)  # NO without quotes is false in YAML
        instead = "give a file for MULTI_CPU, MULTI_GPU or XLA, or leave it out and choose a device such as device=gpu4"
        whole = "and here every worker holds the whole model and optimizer"
        if name in _SPLITTING:
            raise self._wrong("distributed_type", f"{whole}: {instead}")
        if name in _OTHER_DEVICES:
            raise self._wrong("distributed_type", f"a device that the runner cannot use: {instead}")
        if name not in (_ONE_PROCESS, *_KINDS):
            near = did_you_mean(name, (_ONE_PROCESS, *_KINDS))
            raise self._wrong("distributed_type", f"which is no type of Accelerate that the runner knows{near}")
        if self.values.get("parallelism_config"):
            raise self._wrong("parallelism_config", f"{whole}: take it out of the file, or leave the file out")
        return name

    def _is_one_process(self) -> bool:
        return self.values["distributed_type"] in (_ONE_PROCESS, False)

    def workers(self, given: int | None) -> int:
        """Model replicas over all machines, which is what Accelerate counts as well."""
        workers = given or self._num_processes()
        why_left = f"device.workers={workers} was given"
        if self._is_one_process():
            also = self.taken.get("distributed_type")
            if workers == 1:
                self.taken["distributed_type"] = f"{also}, device.workers=1" if also else "device.workers=1"
                why_left = "distributed_type: NO is one process"
            elif not also:
                self.left["distributed_type"] = why_left
        said = self.values.get("num_processes")
        if said == workers:
            self.taken["num_processes"] = f"device.workers={workers}"
        elif said is not None:
            self.left["num_processes"] = why_left
        return workers

    def _num_processes(self) -> int:
        said = self.values.get("num_processes")
        left_open = said in (None, -1)  # -1: it is told to `accelerate launch` instead
        number = 1 if left_open else self._whole("num_processes", 1)
        if self._is_one_process():
            return 1  # Accelerate starts one process, whatever the number
        if left_open:
            what = "has no num_processes" if said is None else "leaves num_processes open (-1)"
            raise UserError(f"device.file={self.path} {what}: set device.workers=N, or write the number into the file")
        return number

    def precision(self, given: PrecisionName | None) -> PrecisionName:
        """The precision; where the file says nothing, Accelerate's own default."""
        key, said = "mixed_precision", self.values.get("mixed_precision")
        if said is None and self.values.get("fp16"):  # the key of its first versions
            key, said = "fp16", "fp16"
        said = "no" if said is None or said is False else said  # no without quotes is false in YAML
        name = _PRECISIONS.get(said.lower()) if isinstance(said, str) else None
        result = given or name
        if result is None:
            what = "which the runner does not have" if said == "fp8" else "which must be no, fp16 or bf16"
            raise self._wrong(key, f"{what}: correct the file, or set precision=bf16")
        if self.values.get(key) is not None:
            if name is result:
                self.taken[key] = f"precision={result.name}"
            else:
                self.left[key] = f"precision={result.name} was given"
        return result

    def machines(self, workers: int) -> tuple[int, int, str | None, int | None]:
        """How many machines, which one this is, and where they meet."""
        machines = self._whole("num_machines", 1) if self.values.get("num_machines") is not None else 1
        present = [key for key in _SEVERAL_MACHINES if self.values.get(key) is not None]
        if machines == 1:
            self.left.update(dict.fromkeys(present, "of use with several machines only"))
            return 1, 0, None, None
        if self._is_one_process():
            raise self._wrong("num_machines", "and distributed_type: NO is one process: correct one of the two")
        if workers % machines:
            raise self._wrong(
                "num_machines", f"which must divide the {workers} worker(s) of all machines: correct one of the two"
            )
        rank = self._whole("machine_rank", 0, machines - 1) if "machine_rank" in present else 0
        main_ip = self.values.get("main_process_ip")
        if main_ip is not None and not (isinstance(main_ip, str) and main_ip):
            raise self._wrong("main_process_ip", "which must be an address or a name: correct the file")
        main_port = self._whole("main_process_port", 1, 65535) if "main_process_port" in present else 29500
        self.taken.update(dict.fromkeys(present, "as torchrun was started"))
        return machines, rank, main_ip, main_port

    def leave_the_rest(self, kind: DeviceKind) -> None:
        """Say of each key that is not accounted for yet why it is left."""
        for key, value in self.values.items():
            if key in self.taken or key in self.left:
                continue
            if key not in _KEYS:
                self.left[key] = f"unknown{did_you_mean(key, _KEYS)}"
            elif key in _DYNAMO and value not in (None, False, {}, "NO", "no"):
                self.left[key] = "compile=true is the runner's way"
            elif key == "gpu_ids" and value not in (None, "all") and kind in (DeviceKind.gpu, DeviceKind.auto):
                ids = ",".join(map(str, value)) if isinstance(value, list) else value
                self.left[key] = f"set CUDA_VISIBLE_DEVICES={ids}, which the runner keeps to"
            else:
                self.left[key] = NO_USE

    def _whole(self, key: str, lowest: int, highest: int | None = None) -> int:
        value = self.values[key]
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= lowest
        if not fits or (highest is not None and value > highest):
            limits = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
            raise self._wrong(key, f"which must be a whole number {limits}: correct the file")
        number: int = value
        return number

    def _wrong(self, key: str, what: str) -> UserError:
        value = self.values.get(key)
        shown = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, (list, dict)) else "[…]"
        return UserError(f"device.file={self.path} has {key}: {shown if len(shown) < 50 else '…'}, {what}")
