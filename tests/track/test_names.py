"""Names of runs: what was varied and typed is in them, short."""

from __future__ import annotations

import itertools
import shlex

import pytest

from runner.track.names import run_name, setting_labels, short_value


@pytest.mark.parametrize(
    ("typed", "labels"),
    [
        ("device=cpu2 sync.k=4 accumulation=auto precision=bf16 seed=1 setup=one hydra/launcher=joblib", ()),
        ("recipe=cola tracking=none cache_dir=/x log_every=3 device.workers=2 hydra.run.dir=/x", ()),
        ("optimizer.lr=5e-5 batch.global_batch=64", ("lr=5e-05", "b=64")),
        (
            "optimizer=sgd schedule=cosine batch=per_device scaling=none",
            ("sgd", "cosine", "per_device", "scaling=none"),
        ),
        ("optimizer=sgd +optimizer.momentum=0.90 epochs=3", ("sgd", "momentum=0.9", "epochs=3")),
        ("recipe.data.seed=1 epochs=1", ("epochs=1", "data.seed=1")),
        ("batch.micro_batch=8 evaluation.micro_batch=9", ("micro=8", "evaluation.micro_batch=9")),
        ("device.file=/home/me/acc.yaml \"recipe.text='a b'\"", ("file=acc.yaml", "text=a b")),
        ("recipe.data.api_key=abc", ()),
        ("batch=fixed_global optimizer=adamw equivalence=standard", ()),
    ],
)
def test_typed_settings(typed: str, labels: tuple[str, ...]) -> None:
    assert setting_labels(shlex.split(typed)) == ((), labels)


def test_all_that_a_sweep_varies_is_named() -> None:
    varied = {f"recipe.model.setting_number_{n}": str(n) for n in range(5)} | {"device": "cpu", "seed": "0"}
    in_sweep, typed = setting_labels([f"{key}={value}" for key, value in varied.items()] + ["epochs=3"], varied)
    assert in_sweep == tuple(f"setting_number_{n}={n}" for n in range(5))
    assert typed == ("epochs=3",)


def test_jobs_of_a_sweep_have_different_labels() -> None:
    grid = itertools.product(("1e-4", "5e-5"), ("32", "64"), ("adamw", "sgd"), ("0.1", "0.10000001"))
    keys = ("optimizer.lr", "batch.global_batch", "optimizer", "recipe.model.dropout")
    jobs = [[f"{key}={value}" for key, value in zip(keys, values, strict=True)] for values in grid]
    assert len({setting_labels(job, keys)[0] for job in jobs}) == len(jobs)


@pytest.mark.parametrize(
    ("value", "short"),
    [
        ("1e-3", "0.001"),
        ("64", "64"),
        ("true", "true"),
        ("/models/MiniLM/model", "MiniLM"),
        ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("./data/", "data"),
        ("[0.9,0.95]", "[0.9,0.95]"),
        ("model", "model"),
        ("x" * 30, "x" * 23 + "…"),
    ],
)
def test_values(value: str, short: str) -> None:
    assert short_value(value) == short


def test_model_and_data() -> None:
    """The evaluation data and a file called train are named only if the sweep varies them."""
    recipe = {"name": "cola", "model": {"name": "a/MiniLM"}, "data": {"train": "a/train.tsv", "eval": "a/dev.tsv"}}
    assert run_name("cpu · s0", recipe, (), ()) == "cpu · s0 · cola · MiniLM"
    both = ("recipe.data.train", "recipe.data.eval")
    assert run_name("cpu · s0", recipe, both, ()) == "cpu · s0 · cola · MiniLM · train.tsv · dev.tsv"
    mine = {**recipe, "data": {"train": "a/mine.tsv"}}
    assert run_name("cpu · s0", mine, (), ("lr=5e-05",)) == "cpu · s0 · cola · MiniLM · mine.tsv · lr=5e-05"
    assert run_name("cpu · s0", {"name": "linear"}, (), ()) == "cpu · s0 · linear"


@pytest.mark.parametrize(
    ("varied", "name"),
    [
        (("device", "seed"), "cpu2 · s0 · k=4 · bf16"),
        (("optimizer.lr", "seed"), "lr=5e-05 · s0 · cpu2 · k=4 · bf16"),
        (("sync.k",), "k=4 · bf16 · cpu2 · s0"),
        ((), "cpu2 · k=4 · bf16 · s0"),
    ],
)
def test_what_a_sweep_varies_comes_first(varied: tuple[str, ...], name: str) -> None:
    labels = ("lr=5e-05",) if "optimizer.lr" in varied else ()
    setup = " · ".join(["cpu2", "k=4", "bf16", *labels, "s0"])
    assert run_name(setup, {"name": "cola"}, varied, (), labels) == f"{name} · cola"


def test_a_long_name_is_cut() -> None:
    """What was typed, but neither the data nor what the sweep varies."""
    name = run_name("s" * 60, {"name": "cola", "data": {"train": "mine.tsv"}}, (), ("b=64", "epochs=3"))
    assert name == f"{'s' * 60} · cola · mine.tsv · …"
