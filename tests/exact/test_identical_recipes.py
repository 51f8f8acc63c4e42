"""`equivalence=identical` with every shipped recipe, on tiny models and files."""

from __future__ import annotations

import pytest

from runner.config.compose import conf_dir
from runner.train.identical import weights_digest
from tests.offline import offline_recipes
from tests.pool import WorkerPool
from tests.replicas import train_recipe

RECIPES = sorted(path.stem for path in (conf_dir() / "recipe").glob("*.yaml"))
SHORT = ["batch=fixed_global", "batch.global_batch=10", "scaling=none", "max_steps=3", "tracking=none", "device=cpu"]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return offline_recipes(tmp_path_factory.mktemp("offline"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_workers_have_the_bits_of_one(pool: WorkerPool, offline: dict[str, list[str]], recipe: str) -> None:
    overrides = [*SHORT, f"recipe={recipe}", "equivalence=identical", *offline.get(recipe, [])]
    (alone,) = pool.run(1, train_recipe, overrides)
    first, second = pool.run(2, train_recipe, overrides)
    assert len(alone["losses"]) >= 2
    for name in ("losses", "metrics", "ledger"):
        assert first[name] == alone[name], name
    digests = {weights_digest(result["weights"]) for result in (alone, first, second)}
    assert len(digests) == 1
