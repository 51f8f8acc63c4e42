"""Exact dropout: torch's dropout of a tensor, with given masks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.data.loader import FILLER
from runner.errors import UserError
from runner.exact import ExactDropout, exact_streams, rows_per_sample, standard_streams
from runner.exact.stream import keep_mask, sample_keys
from tests.exact.draws import CPU, KEYS, drawn, noise

#: Every way to call torch's dropout: (input, p, whether it is on) -> output.
Call = Callable[[Tensor, float, bool], Tensor]
DROPOUTS: dict[str, Call] = {
    "nn.Dropout": lambda x, p, on: nn.Dropout(p).train(on)(x),
    "nn.Dropout in place": lambda x, p, on: nn.Dropout(p, inplace=True).train(on)(x),
    "functional": lambda x, p, on: functional.dropout(x, p, on),
    "functional by name": lambda x, p, on: functional.dropout(input=x, training=on, p=p),
    "torch.dropout": lambda x, p, on: torch.dropout(x, p, on),
    "torch.dropout by name": lambda x, p, on: torch.dropout(input=x, p=p, train=on),
    "torch.dropout_": lambda x, p, on: torch.dropout_(x, p, on),
}
IN_PLACE = {"nn.Dropout in place", "torch.dropout_"}


@pytest.mark.parametrize("p", [0.1, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(4,), (4, 6), (4, 2, 3, 5)])
@pytest.mark.parametrize("name", DROPOUTS)
def test_output_and_gradient(name: str, shape: tuple[int, ...], p: float) -> None:
    """The output is input × mask ÷ (1 - p) and the gradient mask ÷ (1 - p); 0 if p is 1."""
    x, weight = noise(*shape).requires_grad_(), noise(*shape, seed=1)
    given = x.clone()
    with ExactDropout(KEYS):
        y = DROPOUTS[name](given, p, True)
    mask = drawn(shape, p) if p < 1 else torch.zeros(shape, dtype=torch.float64)
    assert torch.allclose(y, x * mask, rtol=1e-14, atol=0)
    (y * weight).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, weight * mask, rtol=1e-14, atol=0)
    assert (y is given) is (name in IN_PLACE)
    assert name in IN_PLACE or torch.equal(given, x)


@pytest.mark.parametrize(("p", "on"), [(0.0, True), (0.5, False)])
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_that_is_off_is_no_call_site(name: str, p: float, on: bool) -> None:
    x = noise(4, 6)
    with ExactDropout(KEYS):
        assert torch.equal(DROPOUTS[name](x.clone(), p, on), x)
        assert torch.equal(functional.dropout(x, 0.5), x * drawn((4, 6), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DROPOUTS)
def test_dtype_is_kept(name: str, dtype: torch.dtype) -> None:
    """The same elements survive in every precision, scaled up to its rounding."""
    x = noise(4, 50).to(dtype)
    with ExactDropout(KEYS):
        y = DROPOUTS[name](x.clone(), 0.1, True)
    assert y.dtype is dtype
    kept = keep_mask(KEYS, 0, (4, 50), 0.1)
    assert torch.equal(y != 0, kept & (x != 0))
    # Two roundings, of 1 / (1 - p) and of the product.
    assert torch.allclose(y.double()[kept], (x.double() / 0.9)[kept], rtol=1.01 * torch.finfo(dtype).eps, atol=0)


def test_memory_layout_does_not_matter() -> None:
    for x in (noise(6, 4).T, noise(4, 5, 3).transpose(1, 2), noise(4, 1).expand(4, 7)):
        with ExactDropout(KEYS):
            assert torch.equal(functional.dropout(x, 0.5), x * drawn(tuple(x.shape), 0.5))


@pytest.mark.parametrize("shape", [(5, 3), (20, 4), (1, 4, 3), (), (0, 4)])
def test_first_dimension_must_be_the_sample(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError) as caught, ExactDropout(KEYS):
        functional.dropout(noise(*shape), 0.1)
    assert f"shape {list(shape)} in a micro-batch of 4" in str(caught.value)
    assert "equivalence=standard" in str(caught.value)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("name", DROPOUTS)
def test_p_must_be_a_probability(name: str, p: float) -> None:
    with pytest.raises((ValueError, RuntimeError), match="has to be between 0 and 1"), ExactDropout(KEYS):
        DROPOUTS[name](noise(4, 3), p, True)


def test_call_sites_are_counted_within_a_context() -> None:
    """Every call of a forward pass has its own mask, attention included; the next context starts again."""
    x, q = torch.ones(4, 6, dtype=torch.float64), noise(4, 2, 3, 8)
    for _ in range(2):
        with exact_streams(5)(3, np.arange(4), CPU):
            outputs = [functional.dropout(x, 0.5) for _ in range(3)]
            functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
            outputs.append(functional.dropout(x, 0.5))
        for site, y in zip((0, 1, 2, 4), outputs, strict=True):
            assert torch.equal(y, drawn((4, 6), 0.5, site))
        assert len({tuple(y.flatten().tolist()) for y in outputs}) == 4


def test_fillers_have_a_separate_mask() -> None:
    """That of no sample; the samples next to them have the masks that they have alone."""
    x = torch.ones(4, 200)
    with exact_streams(5)(3, np.array([2, FILLER, 0, FILLER]), CPU):
        together = functional.dropout(x, 0.5)
    assert 50 < together[1].count_nonzero() < 150
    assert torch.equal(together[1], together[3])
    for sample in range(4):
        with exact_streams(5)(3, np.array([sample]), CPU):
            alone = functional.dropout(x[:1], 0.5)[0]
        assert not torch.equal(alone, together[1])
        if sample in (2, 0):
            assert torch.equal(alone, together[2 - sample])


def test_other_random_functions_are_unchanged() -> None:
    """And dropout outside of the context, and under `standard`."""
    x = torch.ones(4, 50)

    def draws() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.rand(3), torch.randn_like(x), functional.alpha_dropout(x, 0.5, True)]

    expected = draws()
    with ExactDropout(KEYS):
        functional.dropout(x, 0.5)
        assert all(map(torch.equal, draws(), expected))
    torch.manual_seed(0)
    outside = functional.dropout(x, 0.5)
    torch.manual_seed(0)
    with standard_streams(0, np.arange(4), CPU):
        assert torch.equal(functional.dropout(x, 0.5), outside)


def test_rows_of_a_sample_have_masks_of_their_own() -> None:
    """Different ones, which depend on the sample and not on the batch."""
    keys = sample_keys(0, 0, np.arange(3))
    with ExactDropout(keys), rows_per_sample(2):
        pairs = functional.dropout(torch.ones(6, 200), 0.5).view(3, 2, 200)
    with ExactDropout(keys[1:2]), rows_per_sample(2):
        alone = functional.dropout(torch.ones(2, 200), 0.5)
    assert torch.equal(pairs[1], alone)
    assert len({tuple(row.tolist()) for row in pairs.flatten(0, 1)}) == 6
    with ExactDropout(keys), pytest.raises(UserError, match="first dimension is not the sample"):
        functional.dropout(torch.ones(6, 200), 0.5)
