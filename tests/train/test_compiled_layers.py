"""`compile=true`: one program for all layers of a kind and all shapes of batches, and the same training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.models.unpadded import unpad_layers
from runner.backends import Backend
from runner.kernels.unpadded import without_padding
from runner.train.compilation import compile_model, compiled_by_torch
from tests.pool import WorkerPool
from tests.recipes.models.test_unpadded import small
from tests.replicas import make_loop, outcome
from tests.sync.reference import largest_difference

THREE_LAYERS = ["recipe.model.layers=3", "evaluation.every_steps=100"]
FSDP, CHECKPOINTING = ["sharding=fsdp"], ["gradient_checkpointing=true"]
ADAPTER = ["adapter=qlora", "adapter.rank=2", "adapter.merge=true"]
PADDED = ["recipe.padding=longest"]


def train(backend: Backend, overrides: list[str]) -> dict[str, Any]:
    """Train, and count what was compiled before the evaluation at the end, and in the whole run."""
    torch.compiler.reset()  # the workers of tests stay
    loop = make_loop(backend, overrides)
    loop.train()
    trained = loop.compilations.total()
    loop.finish()
    assert loop.log.first_step is not None
    compiled = {"trained": trained, "all": loop.compilations.total(), "first_step_s": loop.log.first_step.compile_s}
    return {**outcome(loop), **compiled}


@pytest.mark.parametrize(
    ("workers", "overrides", "programs"),
    [
        pytest.param(1, [], 1, id="no padding"),
        pytest.param(1, [*PADDED, *CHECKPOINTING], 1, id="padding, checkpointing", marks=pytest.mark.long),
        # A single row in the last batch of an epoch needs another program.
        pytest.param(2, [*CHECKPOINTING, "accumulation.steps=2"], 2, id="accumulation", marks=pytest.mark.long),
        pytest.param(2, [*FSDP, *CHECKPOINTING], 1, id="sharded, checkpointing", marks=pytest.mark.long),
        pytest.param(2, ["sync.k=2"], 1, id="local", marks=pytest.mark.long),
        # So does the first layer, whose input has no gradient if the embeddings are frozen.
        pytest.param(2, ADAPTER, 2, id="adapter, 4 bits", marks=pytest.mark.long),
    ],
)
def test_it_trains_the_same(pool: WorkerPool, workers: int, overrides: list[str], programs: int) -> None:
    """`programs`: for training; there is one more for evaluation. The shapes of batches differ."""
    expected = pool.run(workers, train, [*THREE_LAYERS, *overrides])[0]
    assert (expected["all"], expected["first_step_s"]) == (None, None)
    for found in pool.run(workers, train, [*THREE_LAYERS, *overrides, "compile=true"]):
        assert found["weights"].keys() == expected["weights"].keys()
        assert largest_difference(found["weights"], expected["weights"]) < 1e-9
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        assert (found["trained"].count, found["all"].count) == (programs, programs + 1)
        assert 0 < found["first_step_s"] <= found["trained"].seconds < found["all"].seconds


def batch(lengths: list[int]) -> dict[str, Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, 97, mask.shape, generator=torch.Generator().manual_seed(len(lengths)))
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


PADDED_BATCHES = [batch(lengths) for lengths in ([4, 9, 3], [7, 2, 9, 9], [5, 12], [3, 16, 8, 8, 2, 3], [11, 11, 4])]
OTHER_BATCHES = [batch(lengths) for lengths in ([8, 8, 8], [5, 5], [6], [12])]


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """In a forward pass that is followed by a backward pass."""
    with without_padding():
        output: Tensor = model(**inputs).logits
    output.sin().sum().backward()
    return output.detach()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "layers"), [("gpt2", 1), ("modernbert", 2)])
def test_programs_for_each_kind_of_layer(kind: str, layers: int) -> None:
    """`layers`: that the model has, by kind: those of ModernBERT attend to all tokens or to a window."""
    torch.compiler.reset()
    plain, model = small(kind), small(kind)
    for one in (plain, model):
        unpad_layers(one)
        one.config.use_cache = False
    compile_model(model)
    total = compiled_by_torch()
    for inputs in PADDED_BATCHES:
        assert torch.allclose(logits(model, inputs), logits(plain, inputs), atol=1e-6)
    assert total().count == layers
    # Batches without padding and single rows have others, in training and in evaluation: more than torch allows by
    # default, after which it would compute layers uncompiled.
    counts = []
    for _ in range(2):
        for inputs in (*PADDED_BATCHES, *OTHER_BATCHES):
            logits(model, inputs)
            with torch.no_grad(), without_padding():
                model(**inputs)
        counts.append(total().count)
    assert counts[0] == counts[1] < 10 * layers
    assert layers == 1 or counts[0] > 8


class Doubling(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 2 * values


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(3, 3), Doubling())], ids=["no list"])
def test_a_model_without_repeated_layers_is_compiled_as_a_whole(model: nn.Module) -> None:
    torch.compiler.reset()
    values = [torch.rand(rows, 3) for rows in (2, 3, 5)]
    expected = [model(one) for one in values]
    names = list(model.state_dict())
    compile_model(model)
    total = compiled_by_torch()
    for one, output in zip(values, expected, strict=True):
        assert torch.allclose(model(one), output)
    assert total().count == 1
    assert list(model.state_dict()) == names
