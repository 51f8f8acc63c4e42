"""The setups `acc1` to `acc16` and `k1` to `k16` of the group `setup`, which differ in one number only."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

COUNTS = (1, 2, 4, 8, 16)


def store_setups(store: ConfigStore) -> None:
    """Register them with Hydra, as if they were files in `conf/setup`."""
    for n in COUNTS:
        accumulated = {
            "defaults": [{"override /accumulation": "fixed"}],
            "accumulation": {"steps": n},
            "sync": {"k": 1},
        }
        store.store(group="setup", name=f"acc{n}", node=accumulated, package="_global_")
        local_steps = {"defaults": [{"override /sync": "periodic"}], "sync": {"k": n}}
        store.store(group="setup", name=f"k{n}", node=local_steps, package="_global_")
