"""Embeddings that keep the memory of their gradients: the same bits as torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runner.kernels.embedding import GradientKeepingEmbedding, keep_gradients

ROWS, WIDTH = 50, 24


def embedding(dtype: torch.dtype = torch.float32, padding_idx: int | None = None) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(ROWS, WIDTH, padding_idx=padding_idx, dtype=dtype)


def gradient(module: nn.Embedding, micro_batches: int) -> Tensor | None:
    """After the second of two steps on ids of which many occur several times."""
    random = torch.Generator().manual_seed(1)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            ids = torch.randint(ROWS, (40, 7), generator=random)
            hidden = module(ids)
            hidden.backward(torch.randn(hidden.shape, generator=random, dtype=torch.float64).to(hidden.dtype))
    return module.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_same_bits(dtype: torch.dtype, padding_idx: int | None, micro_batches: int) -> None:
    ours = embedding(dtype, padding_idx)
    keep_gradients(ours)
    expected = gradient(embedding(dtype, padding_idx), micro_batches)
    assert expected is not None
    assert expected.any()
    assert torch.equal(gradient(ours, micro_batches), expected)


def test_memory_is_kept_from_step_to_step() -> None:
    module = embedding()
    keep_gradients(module)
    places = set()
    for _ in range(3):
        module.zero_grad(set_to_none=True)
        module(torch.arange(4)).sum().backward()
        assert module.weight.grad is not None
        places.add(module.weight.grad.data_ptr())
        assert module.weight.grad.sum() == 4 * WIDTH
    assert len(places) == 1


def test_a_weight_that_does_not_reach_the_loss_has_no_gradient() -> None:
    module = embedding()
    keep_gradients(module)
    gradient(module, 1)
    module.zero_grad(set_to_none=True)
    module(torch.arange(4)).detach()
    assert module.weight.grad is None


def test_an_embedding_that_is_used_twice() -> None:
    """Also under autocast, in which the other layers compute in bf16."""
    found = []
    for keeps in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([embedding(), nn.Linear(WIDTH, 3)])
        if keeps:
            keep_gradients(model)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model[0](torch.tensor([[1, 2, 1]])) * model[0](torch.tensor([[2, 3, 3]]))
            model[1](hidden).sum().backward()
        found.append(model[0].weight.grad)
    assert found[0].any()
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_sparse_gradient_that_is_made_dense(micro_batches: int, penalty: float) -> None:
    """In two steps. A penalty uses the weight as a whole."""
    found = []
    for sparse in (False, True):
        module = embedding()
        if sparse:
            keep_gradients(module)
            module.sparse = True
        for step in range(2):
            module.zero_grad(set_to_none=True)
            for number in range(micro_batches):
                loss = module(torch.tensor([[1, 2, 1], [2, 7 + step, number]])).sin().sum()
                (loss + penalty * module.weight.square().sum() if penalty else loss).backward()
            if sparse:
                assert module.weight.grad is not None
                assert module.weight.grad.is_sparse == (penalty == 0)
                assert isinstance(module, GradientKeepingEmbedding)
                module.make_dense()
        found.append(module.weight.grad)
    assert found[0].any()
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


def test_a_gradient_that_a_hook_changes_is_torchs() -> None:
    module = embedding()
    module.weight.register_hook(lambda gradient: gradient.masked_fill(torch.arange(ROWS)[:, None] < 2, 0))
    keep_gradients(module)
    module(torch.arange(4)).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.sum(1).tolist()[:4] == [0, 0, WIDTH, WIDTH]


def test_a_weight_of_two_layers_has_torchs_gradient() -> None:
    head = nn.Linear(WIDTH, ROWS, bias=False)
    tied = nn.Sequential(embedding(), head)
    head.weight = tied[0].weight
    keep_gradients(tied)
    assert type(tied[0]) is nn.Embedding
