"""Exact dropout: torch's dropout of a tensor, with given masks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.data.loader import FILLER
from runner.errors import UserError
from runner.exact import ExactDropout, exact_streams, standard_streams
from runner.exact.stream import keep_mask
from tests.exact.draws import CPU, KEYS, drawn, noise

#: Every way to call torch's dropout: (input, p, whether it is on) -> output.
Call = Callable[[Tensor, float, bool], Tensor]
DROPOUTS: dict[str, Call] = {
    "nn.Dropout": lambda x, p, on: nn.Dropout(p).train(on)(x),
    "nn.Dropout in place": lambda x, p, on: nn.Dropout(p, inplace=True).train(on)(x),
    "functional": lambda x, p, on: functional.dropout(x, p, on),
    "functional by name": lambda x, p, on: functional.dropout(input=x, training=on, p=p),
    "functional in place": lambda x, p, on: functional.dropout(x, p, on, True),
    "torch.dropout": lambda x, p, on: torch.dropout(x, p, on),
    "torch.dropout by name": lambda x, p, on: torch.dropout(input=x, p=p, train=on),
    "torch.dropout_": lambda x, p, on: torch.dropout_(x, p, on),
}
IN_PLACE = {"nn.Dropout in place", "functional in place", "torch.dropout_"}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(4,), (4, 6), (4, 3, 5), (4, 2, 3, 5)])
@pytest.mark.parametrize("name", DROPOUTS)
def test_output_and_gradient_are_those_of_the_mask(name: str, shape: tuple[int, ...], p: float) -> None:
    """However it is called, the output is input × mask ÷ (1 - p) and the gradient mask ÷ (1 - p); 0 if p is 1."""
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


@pytest.mark.parametrize(("p", "on"), [(0.0, True), (0.5, False), (1.0, False), (0.0, False)])
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_that_is_off(name: str, p: float, on: bool) -> None:
    """In evaluation, and with p = 0, values pass, and the next call site is as if there had been no call."""
    x = noise(4, 6)
    with ExactDropout(KEYS):
        assert torch.equal(DROPOUTS[name](x.clone(), p, on), x)
        assert torch.equal(functional.dropout(x, 0.5), x * drawn((4, 6), 0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DROPOUTS)
def test_dtype_is_kept(name: str, dtype: torch.dtype) -> None:
    """The same elements survive in every precision, scaled as far as it can tell, and none becomes another type."""
    x = noise(4, 50).to(dtype)
    with ExactDropout(KEYS):
        y = DROPOUTS[name](x.clone(), 0.1, True)
    assert y.dtype is dtype
    kept = keep_mask(KEYS, 0, (4, 50), 0.1)
    assert torch.equal(y != 0, kept & (x != 0))
    expected = (x.double() / 0.9)[kept]
    # Two roundings, of 1 / (1 - p) and of the product.
    assert torch.allclose(y.double()[kept], expected, rtol=1.01 * torch.finfo(dtype).eps, atol=0)


def test_memory_layout_does_not_matter() -> None:
    """Transposed and expanded inputs have the masks of their copies."""
    for x in (noise(6, 4).T, noise(4, 5, 3).transpose(1, 2), noise(4, 1).expand(4, 7)):
        with ExactDropout(KEYS):
            assert torch.equal(functional.dropout(x, 0.5), x * drawn(tuple(x.shape), 0.5))


@pytest.mark.parametrize(
    ("shape", "said"), [((5, 3), "[5, 3]"), ((20, 4), "[20, 4]"), ((1, 4, 3), "[1, 4, 3]"), ((), "[]"), ((0, 4), "[0,")]
)
@pytest.mark.parametrize("name", DROPOUTS)
def test_first_dimension_has_to_be_the_sample(name: str, shape: tuple[int, ...], said: str) -> None:
    """A tensor with another first dimension than the micro-batch is refused in a sentence with both sizes."""
    with pytest.raises(UserError) as caught, ExactDropout(KEYS):
        DROPOUTS[name](noise(*shape), 0.1, True)
    message = str(caught.value)
    assert f"shape {said}" in message
    assert "micro-batch of 4, so its first dimension is not the sample" in message
    assert message.startswith("equivalence=exact does not hold for this model: ")
    assert message.endswith("use equivalence=standard")
    assert "\n" not in message


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan])
@pytest.mark.parametrize("name", DROPOUTS)
def test_a_share_outside_its_range_is_refused_as_by_torch(name: str, p: float) -> None:
    """A share of less than nothing or more than all is the same mistake as without exact dropout."""
    x = noise(4, 3)
    mistake = pytest.raises((ValueError, RuntimeError), match="has to be between 0 and 1")
    if not math.isnan(p):
        with mistake:
            DROPOUTS[name](x, p, True)
    with mistake, ExactDropout(KEYS):
        DROPOUTS[name](x, p, True)


def test_call_sites_are_counted_from_each_context_on() -> None:
    """Calls of one forward pass have masks of their own, by their number; the next context begins with the first."""
    x, q = torch.ones(4, 6, dtype=torch.float64), noise(4, 2, 3, 8)
    streams = exact_streams(5)
    for _ in range(2):
        with streams(3, np.arange(4), CPU):
            outputs = [functional.dropout(x, 0.5) for _ in range(5)]
            functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
            outputs.append(functional.dropout(x, 0.5))
        for site, y in zip((0, 1, 2, 3, 4, 6), outputs, strict=True):
            assert torch.equal(y, drawn((4, 6), 0.5, site))
        assert len({tuple(y.flatten().tolist()) for y in outputs}) == 6


def test_fillers_have_a_stream() -> None:
    """A filler row's mask is that of no sample, and the samples beside it have the masks that they have alone."""
    x = torch.ones(4, 200)
    with exact_streams(5)(3, np.array([2, FILLER, 0, FILLER]), CPU):
        beside = functional.dropout(x, 0.5)
    assert 50 < beside[1].count_nonzero() < 150
    assert torch.equal(beside[1], beside[3])
    for sample in range(8):
        with exact_streams(5)(3, np.array([sample]), CPU):
            alone = functional.dropout(x[:1], 0.5)[0]
        assert not torch.equal(alone, beside[1])
        if sample in (2, 0):
            assert torch.equal(alone, beside[2 - sample])


def test_other_functions_and_streams_are_left_alone() -> None:
    """Random numbers that are no dropout come from torch as ever, and so does dropout outside and under `standard`."""
    x = torch.ones(4, 50)

    def draws() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.rand(3), torch.randn_like(x), functional.alpha_dropout(x, 0.5, True)]

    expected = draws()
    with ExactDropout(KEYS):
        functional.dropout(x, 0.5)
        found = draws()
    assert all(map(torch.equal, found, expected))
    torch.manual_seed(0)
    outside = functional.dropout(x, 0.5)
    torch.manual_seed(0)
    with standard_streams(0, np.arange(4), CPU):
        assert torch.equal(functional.dropout(x, 0.5), outside)
