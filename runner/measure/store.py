"""Measurements on disk, by everything that the time of a step depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.backends.machine import available_cores, describe_machine, threads_per_worker
from runner.config.choices import SyncPolicyName
from runner.config.plain import from_plain, to_plain
from runner.config.schema import Sync
from runner.cost.identity import step_settings
from runner.cost.prediction import Measurement
from runner.folder.files import check_folder, digest_of, write_json
from runner.plan.experiment import Experiment

#: Raise it when a measurement means something else than before.
_VERSION = 3


def threads_of(experiment: Experiment, at_once: int = 1) -> int:
    """Threads of each worker. `at_once`: jobs that share this machine."""
    return threads_per_worker(experiment.placement.local_workers * at_once, experiment.config.equivalence.threads)


def measurement_path(experiment: Experiment, at_once: int = 1) -> Path:
    """Where the measurement is kept that tells how fast these workers are. `at_once`: jobs that share this machine.

    It depends on the machine, the model, the precision, what is computed in a step, workers and their threads, how they
    synchronise, and versions; not on the data, batch sizes, accumulation, k or the length of the run.
    """
    config, placement = experiment.config, experiment.placement
    content = step_settings(experiment.setup) | {
        "version": _VERSION,
        "machine": describe_machine(placement.device_type, available_cores()),
        "device": [placement.device_type, config.device.length_buckets],
        "workers": [experiment.plan.world_size, placement.local_workers, threads_of(experiment, at_once)],
        "sync": _synchronisation(config.sync, experiment.plan.world_size),
    }
    return Path(config.cache_dir).expanduser() / "measurements" / f"{digest_of(content)[:24]}.json"


def _synchronisation(sync: Sync, workers: int) -> Any:
    """What a synchronisation computes and sends, whenever it happens."""
    if workers == 1:
        return None
    if sync.always_synchronous:
        return ["gradients", sync.compress.name]
    outer = sync.policy is SyncPolicyName.outer
    return [sync.policy.name, sync.compress.name, sync.overlap, outer and sync.outer_momentum]


def load(experiment: Experiment, at_once: int = 1) -> Measurement | None:
    """None if nothing was measured yet, or the file cannot be read: it can be measured again."""
    try:
        return from_plain(Measurement, json.loads(measurement_path(experiment, at_once).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(experiment: Experiment, measurement: Measurement) -> None:
    path = measurement_path(experiment)
    check_folder("cache_dir", str(path.parent))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, to_plain(measurement))
