"""A cache entry that was damaged after an earlier run does not change the next one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import read, run

TRAIN = "train/input_ids.npy"


def zero(path: Path) -> None:
    """All but the header."""
    path.write_bytes(path.read_bytes()[:200] + bytes(path.stat().st_size - 200))


HARM: dict[str, tuple[str, Callable[[Path], None]]] = {
    "zeroed": (TRAIN, zero),
    "truncated": (TRAIN, lambda path: os.truncate(path, 300)),
    "missing file": ("eval/length.npy", Path.unlink),
    "missing tokenizer": ("tokenizer", shutil.rmtree),
}


def train(name: str) -> bytes:
    """The weights of two steps on two workers with the cache in the current folder."""
    folder = Path("outputs") / name
    assert run(f"hydra.run.dir=outputs/{name}", "cache_dir=cache", "device=cpu2", "max_steps=2") == 0
    assert read(folder, "ledger.json")["sound"]
    assert (folder / "model" / "tokenizer.json").is_file()
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_the_weights_are_those_of_a_fresh_cache(here: Path) -> None:
    fresh = train("fresh")
    (entry,) = (path for path in (here / "cache").iterdir() if path.is_dir())
    for number, (name, (file, harm)) in enumerate(HARM.items(), start=1):
        harm(entry / file)
        assert train(name.replace(" ", "-")) == fresh, name
        assert len(list((here / "cache").glob(".damaged-*"))) == number
