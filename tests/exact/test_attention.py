"""Exact dropout inside attention: torch's formula, with given masks."""

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
from tests.exact.draws import DROPS_NOTHING, KEYS, drawn, noise

BATCH, HEADS, QUERIES, POSITIONS, WIDTH = 4, 4, 5, 7, 8

#: Shapes of query, and of key and value. With `enable_gqa` pairs of query heads share a key.
SHAPES = {
    "4-D": ((BATCH, HEADS, QUERIES, WIDTH), (BATCH, HEADS, POSITIONS, WIDTH)),
    "grouped": ((BATCH, HEADS, QUERIES, WIDTH), (BATCH, HEADS // 2, POSITIONS, WIDTH)),
    "3-D": ((BATCH, QUERIES, WIDTH), (BATCH, POSITIONS, WIDTH)),
}


def attention_mask(kind: str, query_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """The same for all heads; every query may attend to the first position, and not to some others."""
    shape = (BATCH, *(1,) * (len(query_shape) - 3), QUERIES, POSITIONS)
    allowed = noise(*shape, seed=7) > -0.5
    allowed[..., 0] = True
    return {
        "none": None,
        "bool": allowed,
        "float": noise(*shape, seed=8).to(dtype),
        "-inf": noise(*shape, seed=8).masked_fill(~allowed, -math.inf).to(dtype),
        "lowest": noise(*shape, seed=8).to(dtype).masked_fill(~allowed, torch.finfo(dtype).min),
    }[kind]


#: (shape, mask, causal, scale); torch takes a mask or `is_causal`, not both.
CASES = [
    (shape, kind, causal, 0.7 if causal else None)
    for shape, kind, causal in itertools.product(SHAPES, ("none", "bool", "float", "-inf", "lowest"), (False, True))
    if not (causal and kind != "none")
]
each_case = pytest.mark.parametrize(("shape", "kind", "causal", "scale"), CASES)


class Case:
    """Inputs of one case, and attention over them."""

    def __init__(self, shape: str, kind: str, causal: bool, scale: float | None, dtype: torch.dtype) -> None:
        query_shape, key_shape = SHAPES[shape]
        shapes = (query_shape, key_shape, key_shape)
        self.qkv = [noise(*one, seed=n).to(dtype).requires_grad_() for n, one in enumerate(shapes, 1)]
        self.mask = attention_mask(kind, query_shape, dtype)
        self.causal, self.scale, self.grouped = causal, scale, shape == "grouped"

    def torchs(self, p: float) -> list[Tensor]:
        options: dict[str, Any] = {"is_causal": self.causal, "scale": self.scale, "enable_gqa": self.grouped}
        return self.outcome(lambda *qkv: functional.scaled_dot_product_attention(*qkv, self.mask, p, **options))

    def exact(self, p: float) -> list[Tensor]:
        with ExactDropout(KEYS):
            return self.torchs(p)

    def by_formula(self, p: float) -> list[Tensor]:
        """Position by position, with the mask of the first call site."""

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if self.grouped:
                key, value = (torch.stack([x[:, h // 2] for h in range(HEADS)], 1) for x in (key, value))
            scores = torch.einsum("...qe,...ke->...qk", query, key)
            scores = scores * (WIDTH**-0.5 if self.scale is None else self.scale)
            if self.causal:
                before = torch.tensor([[k <= q for k in range(POSITIONS)] for q in range(QUERIES)])
                scores = torch.where(before, scores, -math.inf)
            elif self.mask is not None:
                boolean = self.mask.dtype is torch.bool
                scores = torch.where(self.mask, scores, -math.inf) if boolean else scores + self.mask
            powers = (scores - scores.amax(-1, keepdim=True)).exp()
            weights = powers / powers.sum(-1, keepdim=True)
            return torch.einsum("...qk,...ke->...qe", weights * drawn(tuple(weights.shape), p), value)

        return self.outcome(run)

    def outcome(self, run: Callable[..., Tensor]) -> list[Tensor]:
        """Output and the gradients of a weighted sum of it."""
        output = run(*self.qkv)
        weight = noise(*output.shape, seed=9).to(output.dtype)
        return [output, *torch.autograd.grad((output * weight).sum(), self.qkv)]


@each_case
def test_output_and_gradients_follow_the_formula(shape: str, kind: str, causal: bool, scale: float | None) -> None:
    case = Case(shape, kind, causal, scale, torch.float64)
    found = case.exact(0.3)
    for a, b in zip(found, case.by_formula(0.3), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < 1e-12
    assert (found[0] - case.by_formula(DROPS_NOTHING)[0]).abs().max() > 1e-2


@each_case
def test_without_drops_it_is_torchs_attention(shape: str, kind: str, causal: bool, scale: float | None) -> None:
    """In fp32, and under bf16 autocast up to its rounding; the dtypes are the same."""
    case = Case(shape, kind, causal, scale, torch.float32)
    for autocast, tolerance in ((False, 2e-5), (True, 0.03)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found, expected = case.exact(DROPS_NOTHING), case.torchs(0.0)
        for a, b in zip(found, expected, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert (a - b).abs().max() < tolerance * b.detach().abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_that_attends_to_nothing_gives_zero(kind: str, dtype: torch.dtype) -> None:
    """As in torch's attention, with finite gradients."""
    case = Case("4-D", "none", False, None, dtype)
    allowed = torch.ones(BATCH, 1, QUERIES, POSITIONS, dtype=torch.bool)
    allowed[1, :, 2] = allowed[3] = False
    case.mask = allowed if kind == "bool" else torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -math.inf)
    found, expected = case.exact(DROPS_NOTHING), case.torchs(0.0)
    assert (found[0][1, :, 2] == 0).all()
    assert (found[0][3] == 0).all()
    for a, b in zip(found, expected, strict=True):
        assert b.isfinite().all()
        assert (a - b).abs().max() <= 32 * torch.finfo(dtype).eps * b.abs().max()


def test_a_row_of_lowest_values_is_not_hidden() -> None:
    """A float mask of the lowest number, not minus infinity, over a whole row leaves all positions alike."""
    case = Case("4-D", "none", False, None, torch.float32)
    case.mask = torch.zeros(BATCH, 1, QUERIES, POSITIONS)
    case.mask[1, :, 2] = torch.finfo(torch.float32).min
    expected = case.torchs(0.0)[0]
    assert (expected[1, :, 2] != 0).all()
    assert (case.exact(DROPS_NOTHING)[0] - expected).abs().max() < 1e-5


def test_an_fp32_mask_keeps_bf16() -> None:
    case = Case("4-D", "none", False, None, torch.bfloat16)
    case.mask = attention_mask("float", SHAPES["4-D"][0], torch.float32)
    found, expected = case.exact(DROPS_NOTHING)[0], case.torchs(0.0)[0]
    assert found.dtype is expected.dtype is torch.bfloat16
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


def test_without_dropout_it_is_left_to_torch() -> None:
    """To the last bit, without a call site, and whatever the first dimension is."""
    case = Case("grouped", "bool", False, 0.7, torch.float32)
    expected = case.torchs(0.0)[0]
    with ExactDropout(KEYS[:3]):
        assert torch.equal(case.torchs(0.0)[0], expected)
    with ExactDropout(KEYS):
        case.torchs(0.0)
        assert torch.equal(functional.dropout(torch.ones(4, 9).double(), 0.5), drawn((4, 9), 0.5))


def test_wrong_arguments() -> None:
    """torch rejects a mask together with `is_causal`; heads in the first dimension hide which sample a mask is for."""
    q = noise(BATCH * HEADS, QUERIES, WIDTH)
    mask = torch.ones(QUERIES, QUERIES, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="is_causal"), ExactDropout(KEYS):
        functional.scaled_dot_product_attention(q[:4], q[:4], q[:4], mask, 0.1, is_causal=True)
    with pytest.raises(UserError, match=r"shape \[16, 5, 5\] in a micro-batch of 4"), ExactDropout(KEYS):
        functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
