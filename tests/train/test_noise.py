"""The noise of the gradient, against a closed form and against the gradients of single samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes.synthetic.linear import _inputs
from runner.data.recipe import label_counts
from runner.errors import UserError
from tests.configured import prepared
from tests.pool import WorkerPool
from tests.replicas import make_loop, noise_of, train
from tests.runs import only_folder, read, run
from tests.token_recipe import TOKENS

#: The gradient of a row is the row, whatever the weights are.
LINEAR = ["recipe=linear", "epochs=50", "noise.every_steps=1", "optimizer.momentum=0", "precision=fp64"]


def closed_form() -> float:
    """tr(Σ) / |G|² of rows of which an epoch draws each once."""
    rows = _inputs().double()
    trace = float(rows.var(dim=0, correction=1).sum())
    return trace / (float(rows.mean(dim=0).square().sum()) - trace / len(rows))


@pytest.mark.parametrize(
    ("workers", "overrides", "within"),
    [
        (1, ["batch.micro_batch=2", "accumulation.steps=2", "epochs=300"], 0.1),  # of one part per step
        (2, ["batch.micro_batch=2", "epochs=150"], 0.05),
        (2, ["batch.micro_batch=1", "accumulation.steps=2", "epochs=100"], 0.1),
        (3, ["batch.micro_batch=1", "optimizer.clip_norm=0.1"], 0.1),  # before clipping; tails of two samples
        (2, ["batch.micro_batch=1", "sync.k=2"], 0.1),  # from what workers have learnt alone
        (2, ["batch.micro_batch=2", "noise.every_steps=3", "epochs=100"], 0.1),
    ],
)
def test_closed_form(pool: WorkerPool, workers: int, overrides: list[str], within: float) -> None:
    noise, _ = pool.run(workers, noise_of, [*LINEAR, *overrides])[0]
    assert noise.scale == pytest.approx(closed_form(), rel=within)
    assert abs(noise.scale - closed_form()) < 4 * noise.standard_error < 0.4 * closed_form()


@pytest.mark.parametrize(
    ("workers", "overrides"),
    [(3, ["batch.global_batch=24"]), (3, ["sync.compress=bf16", "precision=fp32"]), (1, ["accumulation.steps=3"])],
)
def test_measuring_changes_no_bit(pool: WorkerPool, workers: int, overrides: list[str]) -> None:
    overrides = [*overrides, "batch.length_sorted=false", "max_steps=6"]
    plain = pool.run(workers, train, overrides)[0]
    measured = pool.run(workers, train, [*overrides, "noise.every_steps=2"])[0]
    assert all(torch.equal(plain["weights"][name], measured["weights"][name]) for name in plain["weights"])
    logged = [metrics for _, metrics in measured["logged"]]
    assert any("noise/trace" in metrics for metrics in logged)
    assert not any("noise/trace" in metrics for _, metrics in plain["logged"])


def single_samples(backend: object, overrides: list[str]) -> tuple[float, float]:
    """tr(Σ) and |G|² of the model's first step, from the gradient of each sample: G is Σ gradients ÷ Σ terms."""
    loop = make_loop(backend, overrides)  # type: ignore[arg-type]
    recipe, prepared = loop.replica.recipe, loop.replica.prepared
    table = prepared.train
    gradients = []
    for row in range(len(table)):
        loop.model.zero_grad()
        recipe.loss(loop.model, recipe.collate(table[[row]], prepared))[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None]))
    each, terms = torch.stack(gradients), torch.tensor(label_counts(table)).double()
    mean = each.sum(0) / terms.sum()
    residuals = (each - terms[:, None] * mean) / terms.mean()
    trace = float(residuals.square().sum() / (len(table) - 1))
    return trace, float(mean.square().sum()) - trace / len(table)


@pytest.mark.parametrize("overrides", [[], TOKENS])
def test_against_the_gradients_of_single_samples(pool: WorkerPool, overrides: list[str]) -> None:
    """Also for a loss over tokens, of which some samples have ten and others none."""
    still = [*overrides, "optimizer.lr=1e-30", "scaling=none", "recipe.padding=longest", "batch.length_sorted=false"]
    ((trace, squared),) = pool.run(1, single_samples, still)
    many = ["epochs=60", "batch.global_batch=50", "noise.every_steps=1", "optimizer.weight_decay=0"]
    found = pool.run(5, train, [*still, *many])[0]["noise"]
    assert found.trace == pytest.approx(trace, rel=0.1)
    if overrides:  # otherwise a new model's |G|² is next to nothing
        assert found.squared_gradient == pytest.approx(squared, rel=0.15)


@pytest.mark.parametrize("overrides", [[], ["accumulation.steps=2", "batch.length_sorted=false"]])
def test_the_loss_scale_of_fp16_does_not_count(pool: WorkerPool, overrides: list[str]) -> None:
    still = [*overrides, "optimizer.lr=1e-30", "scaling=none", "noise.every_steps=1"]
    full, half = (pool.run(2, train, [*still, f"precision={name}"])[0]["noise"] for name in ("fp32", "fp16"))
    assert half.trace == pytest.approx(full.trace, rel=0.05)


def test_synchronous_steps_of_any_setup_are_compared(pool: WorkerPool) -> None:
    """One worker is synchronous whatever `sync.k` is; post-local workers are, at first."""
    alone = pool.run(1, train, ["sync.k=4", "accumulation.steps=2", "batch.length_sorted=false", "noise.every_steps=2"])
    assert alone[0]["noise"].measurements == 5
    both = pool.run(2, train, ["sync.k=2", "sync.schedule=post_local", "noise.every_steps=1"])[0]
    traces = [step for step, metrics in both["logged"] if "noise/trace" in metrics]
    assert traces
    assert (both["noise"].trace, both["noise"].measurements) == (
        None,
        3,
    )  # then in another unit, with a last phase of one


def test_a_continued_run_without_two_gradients_says_so() -> None:
    """For lack of memory, or on other workers, a run has micro-batches of sorted lengths: it goes on, and says so."""
    continued = prepared("noise.every_steps=1 device=cpu2").with_accumulation_steps(2)
    assert any("noise" in note for note in continued.notes)


def test_a_run_reports_its_noise_and_continues_it(here: Path) -> None:
    """In the summary and the log; a resumed run ends with the same figures."""
    measured = ["device=cpu2", "noise.every_steps=2", "checkpoint.every_steps=6"]
    assert run(*measured) == 0
    folder = only_folder(here)
    whole = read(folder, "summary.json")["noise"]
    assert whole["measurements"] == 5
    assert "noise/trace" in (folder / "metrics.jsonl").read_text()
    (folder / "summary.json").unlink()
    assert run(f"resume={folder}", base=[]) == 0
    again = read(folder, "summary.json")["noise"]
    assert (again["trace"], again["measurements"]) == (pytest.approx(whole["trace"], rel=1e-6), 5)  # other buckets


@pytest.mark.parametrize(
    "overrides",
    [
        "device=cpu",
        "device=cpu accumulation.steps=2",
        "device=cpu2 sharding=fsdp",
        "device=cpu2 equivalence=identical",
        "device=cpu2 sync=gradients sync.k=4",
        "device=cpu2 noise.every_steps=0",
    ],
)
def test_where_no_two_gradients_can_be_compared(overrides: str) -> None:
    with pytest.raises(UserError, match=r"^noise\.every_steps="):
        prepared(f"noise.every_steps=1 {overrides}")
