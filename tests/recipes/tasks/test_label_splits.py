"""Each kind of label: every split of the batches trains the same model, with exact dropout and with an adapter."""

from __future__ import annotations

import pytest

from tests.pool import WorkerPool
from tests.recipes import labelled
from tests.replicas import train_recipe
from tests.sync.reference import largest_difference

#: 37 samples in batches of 12: the last one has a single sample, so that the second worker has a filler row.
SETTINGS = [
    *("batch.global_batch=12", "epochs=2", "precision=fp64", "equivalence=exact", "optimizer=sgd", "optimizer.lr=0.05"),
    *(
        "optimizer.clip_norm=null",
        "schedule=constant",
        "schedule.warmup_share=0",
        "scaling=none",
        "tracking=none",
        "device=cpu",
    ),
]
LORA = ["adapter=lora", "adapter.rank=2"]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return labelled.write(tmp_path_factory.mktemp("labelled"), train=37, dropout=0.1)


@pytest.mark.parametrize("more", [[], LORA], ids=["all weights", "lora"])
@pytest.mark.parametrize("recipe", ["multi_label", "text_regression", "token_classification"])
def test_every_split_ends_alike(pool: WorkerPool, recipes: dict[str, list[str]], recipe: str, more: list[str]) -> None:
    overrides = [*recipes[recipe], *SETTINGS, *more]
    (one,) = pool.run(1, train_recipe, overrides)
    for result in pool.run(2, train_recipe, [*overrides, "accumulation.steps=3"]):
        assert largest_difference(one["weights"], result["weights"]) < 1e-12
        assert result["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
    assert len(one["losses"]) == 8


def test_dropout_is_on(pool: WorkerPool, recipes: dict[str, list[str]]) -> None:
    """Or the test above would say nothing of it: other masks end elsewhere."""
    overrides = [*recipes["token_classification"], *SETTINGS, "max_steps=1"]
    exact, standard = (
        pool.run(1, train_recipe, [*overrides, f"equivalence={mode}"])[0] for mode in ("exact", "standard")
    )
    assert largest_difference(exact["weights"], standard["weights"]) > 1e-6
