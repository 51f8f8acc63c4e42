"""Exact dropout inside attention: the same formula as torch's, with given masks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runner.errors import UserError
from runner.exact import ExactDropout
from tests.exact.draws import HARDLY, KEYS, drawn, noise

BATCH, HEADS, QUERIES, POSITIONS, WIDTH = 4, 4, 5, 7, 8

#: (shape of query, of key and value); with `enable_gqa` pairs of query heads share a key.
SHAPES = {
    "4-D": ((BATCH, HEADS, QUERIES, WIDTH), (BATCH, HEADS, POSITIONS, WIDTH)),
    "grouped": ((BATCH, HEADS, QUERIES, WIDTH), (BATCH, HEADS // 2, POSITIONS, WIDTH)),
    "3-D": ((BATCH, QUERIES, WIDTH), (BATCH, POSITIONS, WIDTH)),
}


def attention_mask(kind: str, query_shape: tuple[int, ...]) -> Tensor | None:
    """For all heads alike, of every sample its own; some positions are closed to all, none to every query."""
    shape = (BATCH, *(1,) * (len(query_shape) - 3), QUERIES, POSITIONS)
    open_ = noise(*shape, seed=7) > -0.5
    open_[..., 0] = True
    return {
        "none": None,
        "bool": open_,
        "bool, one for all": open_.select(0, 1),
        "float": noise(*shape, seed=8),
        "float, -inf": noise(*shape, seed=8).masked_fill(~open_, -math.inf),
        "float, lowest": noise(*shape, seed=8).masked_fill(~open_, torch.finfo(torch.float64).min),
    }[kind]


def cases() -> list[Any]:
    found = []
    masks = ("none", "bool", "bool, one for all", "float", "float, -inf", "float, lowest")
    for shape, kind, causal, scale in itertools.product(SHAPES, masks, (False, True), (None, 0.7)):
        if not (causal and kind != "none"):  # torch takes one of the two only
            found.append(pytest.param(shape, kind, causal, scale, id=f"{shape}-{kind}-{causal}-{scale}"))
    return found


def inputs(shape: str, kind: str, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor | None]:
    query_shape, key_shape = SHAPES[shape]
    qkv = [noise(*query_shape, seed=1), noise(*key_shape, seed=2), noise(*key_shape, seed=3)]
    mask = attention_mask(kind, query_shape)
    if mask is not None and mask.is_floating_point():
        mask = mask.clamp_min(torch.finfo(dtype).min) if kind == "float, lowest" else mask
        mask = mask.to(dtype)
    return [x.to(dtype).requires_grad_() for x in qkv], mask


def outcome(qkv: list[Tensor], run: Callable[..., Tensor]) -> list[Tensor]:
    """Output and the three gradients of a weighted sum of it."""
    output = run(*qkv)
    weight = noise(*output.shape, seed=9).to(output.dtype)
    return [output, *torch.autograd.grad((output * weight).sum(), qkv)]


def written_out(
    mask: Tensor | None, p: float, causal: bool, scale: float | None, grouped: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention by its formula, position by position, with the masks of the first call site."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if grouped:
            key, value = (torch.stack([x[:, h // 2] for h in range(HEADS)], 1) for x in (key, value))
        scores = torch.einsum("...qe,...ke->...qk", query, key)
        scores = scores * (WIDTH**-0.5 if scale is None else scale)
        if causal:
            mask_ = torch.tensor([[k <= q for k in range(POSITIONS)] for q in range(QUERIES)])
            scores = torch.where(mask_, scores, -math.inf)
        elif mask is not None:
            scores = torch.where(mask, scores, -math.inf) if mask.dtype is torch.bool else scores + mask
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = powers / powers.sum(-1, keepdim=True)
        return torch.einsum("...qk,...ke->...qe", weights * drawn(tuple(weights.shape), p), value)

    return run


@pytest.mark.parametrize(("shape", "kind", "causal", "scale"), cases())
def test_attention_is_its_formula_with_the_mask(shape: str, kind: str, causal: bool, scale: float | None) -> None:
    """With dropout on the attention weights, output and gradients are those of the formula in fp64."""
    qkv, mask = inputs(shape, kind)
    grouped = shape == "grouped"

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with ExactDropout(KEYS):
            return functional.scaled_dot_product_attention(
                query, key, value, mask, 0.3, causal, scale=scale, enable_gqa=grouped
            )

    found, expected = outcome(qkv, exact), outcome(qkv, written_out(mask, 0.3, causal, scale, grouped))
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < 1e-12
    without = outcome(qkv, written_out(mask, HARDLY, causal, scale, grouped))
    assert (found[0] - without[0]).abs().max() > 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
@pytest.mark.parametrize(("shape", "kind", "causal", "scale"), cases())
def test_attention_that_drops_nothing_is_torchs_own(
    shape: str, kind: str, causal: bool, scale: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    """With a share too small to drop anything, output and gradients are those of torch's attention."""
    qkv, mask = inputs(shape, kind, dtype)

    def attention(p: float) -> Callable[..., Tensor]:
        return lambda query, key, value: functional.scaled_dot_product_attention(
            query, key, value, mask, p, causal, scale=scale, enable_gqa=shape == "grouped"
        )

    expected = outcome(qkv, attention(0.0))
    with ExactDropout(KEYS):
        found = outcome(qkv, attention(HARDLY))
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (a - b).abs().max() < tolerance


@pytest.mark.parametrize(("shape", "kind", "causal", "scale"), cases())
def test_attention_under_autocast(shape: str, kind: str, causal: bool, scale: float | None) -> None:
    """Under bf16 autocast it differs from torch's by bf16's rounding, and the type is the same."""
    qkv, mask = inputs(shape, kind, torch.float32)

    def attention(p: float) -> Callable[..., Tensor]:
        return lambda query, key, value: functional.scaled_dot_product_attention(
            query, key, value, mask, p, causal, scale=scale, enable_gqa=shape == "grouped"
        )

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = outcome(qkv, attention(0.0))
        with ExactDropout(KEYS):
            found = outcome(qkv, attention(HARDLY))
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (a - b).abs().max() < 0.03 * b.abs().max()


#: A mask's way of closing a row.
CLOSED = {"bool": lambda open_: open_, "float": lambda open_: torch.zeros(open_.shape).masked_fill(~open_, -math.inf)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_that_attends_to_nothing(kind: str, dtype: torch.dtype) -> None:
    """Its output is 0 and its gradient finite, as in torch's attention, and the other rows are as ever."""
    open_ = torch.ones(BATCH, 1, QUERIES, POSITIONS, dtype=torch.bool)
    open_[1, :, 2] = open_[3] = False
    qkv, _ = inputs("4-D", "none", dtype)
    mask = CLOSED[kind](open_)
    mask = mask.to(dtype) if kind == "float" else mask

    def attention(p: float) -> Callable[..., Tensor]:
        return lambda *qkv: functional.scaled_dot_product_attention(*qkv, mask, p)

    expected = outcome(qkv, attention(0.0))
    with ExactDropout(KEYS):
        found = outcome(qkv, attention(HARDLY))
    assert (found[0][1, :, 2] == 0).all()
    assert (found[0][3] == 0).all()
    for a, b in zip(found, expected, strict=True):
        assert b.isfinite().all()
        assert (a - b).abs().max() <= 32 * torch.finfo(dtype).eps * b.abs().max()


def test_a_row_that_is_lowered_throughout_is_not_hidden() -> None:
    """A float mask of the lowest number, not minus infinity, over a whole row leaves all positions alike."""
    qkv, _ = inputs("4-D", "none", torch.float32)
    mask = torch.zeros(BATCH, 1, QUERIES, POSITIONS)
    mask[1, :, 2] = torch.finfo(torch.float32).min
    expected = functional.scaled_dot_product_attention(*qkv, mask)
    with ExactDropout(KEYS):
        found = functional.scaled_dot_product_attention(*qkv, mask, HARDLY)
    assert (expected[1, :, 2] != 0).all()
    assert (found - expected).abs().max() < 1e-5


def test_a_float_mask_does_not_change_the_type() -> None:
    """bf16 states with an fp32 mask come out as bf16, as from torch's attention."""
    qkv, _ = inputs("4-D", "none", torch.bfloat16)
    mask = attention_mask("float", SHAPES["4-D"][0]).float()
    expected = functional.scaled_dot_product_attention(*qkv, mask)
    with ExactDropout(KEYS):
        found = functional.scaled_dot_product_attention(*qkv, mask, HARDLY)
    assert found.dtype is expected.dtype is torch.bfloat16
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


def test_a_mask_beside_is_causal_is_refused_as_by_torch() -> None:
    """With dropout torch does not take both, and neither is passed over here."""
    qkv, mask = inputs("4-D", "bool")
    refused = pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True")
    with refused:
        functional.scaled_dot_product_attention(*qkv, mask, 0.1, is_causal=True)
    with refused, ExactDropout(KEYS):
        functional.scaled_dot_product_attention(*qkv, mask, 0.1, is_causal=True)


@pytest.mark.parametrize(("shape", "kind", "causal", "scale"), cases())
def test_attention_without_dropout_is_left_to_torch(shape: str, kind: str, causal: bool, scale: float | None) -> None:
    """With p = 0 it is torch's own to the last bit, and no call site; whatever the first dimension is."""
    (query, key, value), mask = inputs(shape, kind, torch.float32)
    options: dict[str, Any] = {"is_causal": causal, "scale": scale, "enable_gqa": shape == "grouped"}
    expected = functional.scaled_dot_product_attention(query, key, value, mask, 0.0, **options)
    with ExactDropout(KEYS[:3]):
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    assert torch.equal(found, expected)
    with ExactDropout(KEYS):
        functional.scaled_dot_product_attention(query, key, value, mask, 0.0, **options)
        assert torch.equal(functional.dropout(torch.ones(4, 9).double(), 0.5), drawn((4, 9), 0.5))


def test_attention_with_samples_and_heads_in_one_dimension_is_refused() -> None:
    """Heads folded into the first dimension leave it unknown which sample a mask is for."""
    q = noise(BATCH * HEADS, QUERIES, WIDTH)
    with pytest.raises(UserError, match=r"shape \[16, 5, 5\] in a micro-batch of 4"), ExactDropout(KEYS):
        functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
