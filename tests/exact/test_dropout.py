"""Exact dropout: torch's dropout with given masks, and training that does not depend on the split although it is on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.acceptability import GrammarCorpus, SmallTransformer
from recipes.classification import SequenceClassification
from runner.data.cache import Cache
from runner.errors import UserError
from runner.exact import ExactDropout, exact_streams, standard_streams
from runner.exact.stream import keep_mask, sample_keys
from runner.recipe import Prepared
from tests.pool import WorkerPool
from tests.replicas import Weights, train, train_in_two_parts

CPU = torch.device("cpu")
KEYS = sample_keys(5, 3, np.arange(4))
#: Above 0, so that dropout is on, and too small to drop anything or to scale what is left.
HARDLY = 1e-16


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # Models this small gain nothing from more, and lose a lot where another process wants the same cores.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(shape: tuple[int, ...], p: float, site: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The mask of the samples above: 0, or 1 / (1 - p)."""
    return keep_mask(KEYS, site, shape, p).to(dtype) / (1 - p)


def noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# --- dropout of a tensor --------------------------------------------------------------------------------------

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


def test_filler_has_a_stream() -> None:
    """A micro-batch without samples runs one filler row, whose mask is that of no sample."""
    x = torch.ones(1, 200)
    with exact_streams(5)(3, np.zeros(0, dtype=np.int64), CPU):
        filler = functional.dropout(x, 0.5)
    assert 50 < filler.count_nonzero() < 150
    with exact_streams(5)(3, np.array([0]), CPU):
        assert not torch.equal(functional.dropout(x, 0.5), filler)


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


# --- attention ------------------------------------------------------------------------------------------------

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


# --- models ---------------------------------------------------------------------------------------------------


def recipe(shape: str, dropout: float = 0.2) -> SequenceClassification:
    sizes = {"hidden_size": 16, "feed_forward_size": 24, "layers": 2, "heads": 2, "initializer_range": 0.3}
    model = SmallTransformer(**sizes, dropout=dropout, attention_dropout=dropout, shape=shape)
    return SequenceClassification(GrammarCorpus(0, 60, 10), model, max_length=32)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder: Path = tmp_path_factory.mktemp("exact")
    return Prepared.load(recipe("bert").prepare(Cache(folder), recipe("bert").facts()))


class Replica:
    """A model in training, and what it makes of micro-batches."""

    def __init__(self, prepared: Prepared, shape: str, attention: str = "sdpa", dropout: float = 0.2) -> None:
        self._prepared, self._recipe = prepared, recipe(shape, dropout)
        torch.manual_seed(0)
        self._model = self._recipe.build_model(prepared).double().train()
        self._model.set_attn_implementation(attention)

    def run(self, micro_batches: list[list[int]], seed: int = 0, step: int = 0) -> tuple[dict[int, Tensor], Weights]:
        """Logits by sample, and the gradient of the loss summed over all micro-batches."""
        streams, logits = exact_streams(seed), {}
        self._model.zero_grad()
        for ids in micro_batches:
            batch = self._recipe.collate(self._prepared.train[ids], self._prepared)
            with streams(step, np.array(ids), CPU):
                output = self._recipe.predict(self._model, batch)
            functional.cross_entropy(output, batch["labels"], reduction="sum").backward()
            logits.update(zip(ids, output.detach(), strict=True))
        gradients = {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}
        return logits, gradients


def largest_difference(a: dict[Any, Tensor], b: dict[Any, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


IDS = [3, 14, 15, 9, 26, 53]
SPLITS = [[3, 3], [2, 2, 2], [1] * 6, [4, 2], [1, 5], [2, 1, 3]]
SHAPES_OF_MODELS = ["bert", "gpt2"]


def test_splits_differ_in_padding(prepared: Prepared) -> None:
    """The next test would prove little if all six sentences were of one length."""
    lengths = [int(prepared.train.column("length")[row]) for row in IDS]
    assert len(set(lengths)) >= 4


@pytest.mark.parametrize("shape", SHAPES_OF_MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("order", [IDS, IDS[::-1], [53, 3, 26, 14, 9, 15]], ids=["drawn", "reversed", "mixed"])
def test_logits_and_gradients_do_not_depend_on_the_split(
    prepared: Prepared, shape: str, attention: str, order: list[int]
) -> None:
    """A batch of six gives in fp64 what any cut of it into micro-batches gives, with dropout 0.2 everywhere."""
    replica = Replica(prepared, shape, attention)
    logits, gradients = replica.run([IDS])
    for sizes in ([6], *SPLITS):
        ends = list(itertools.accumulate(sizes))
        cut = [order[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        found = replica.run(cut)
        assert largest_difference(found[0], logits) < 1e-12
        assert largest_difference(found[1], gradients) < 1e-12


@pytest.mark.parametrize("shape", SHAPES_OF_MODELS)
def test_fused_and_written_out_attention_have_the_same_masks(prepared: Prepared, shape: str) -> None:
    """transformers' two ways to compute attention come to the same under exact dropout."""
    logits, gradients = Replica(prepared, shape, "eager").run([IDS])
    found = Replica(prepared, shape, "sdpa").run([IDS[:2], IDS[2:]])
    assert largest_difference(found[0], logits) < 1e-12
    assert largest_difference(found[1], gradients) < 1e-12


@pytest.mark.parametrize("shape", SHAPES_OF_MODELS)
@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}])
def test_another_seed_or_step_drops_others(prepared: Prepared, shape: str, other: dict[str, int]) -> None:
    """Each sample's logits are others with another seed, in another step, and without dropout."""
    replica = Replica(prepared, shape)
    logits, _ = replica.run([IDS])
    without, _ = Replica(prepared, shape, dropout=0.0).run([IDS])
    for found in (replica.run([IDS], **other)[0], without):
        assert all((found[row] - logits[row]).abs().max() > 1e-4 for row in IDS)


@pytest.mark.parametrize("shape", SHAPES_OF_MODELS)
def test_another_sample_drops_others(prepared: Prepared, shape: str) -> None:
    """The same sentence under another id is dropped otherwise."""
    replica = Replica(prepared, shape)
    of = replica._recipe.collate(prepared.train[IDS[:1]], prepared)
    found = []
    for row in (3, 4, 3):
        with torch.no_grad(), exact_streams(0)(0, np.array([row]), CPU):
            found.append(replica._recipe.predict(replica._model, of))
    assert torch.equal(found[0], found[2])
    assert (found[0] - found[1]).abs().max() > 1e-4


# --- the loop; that splits end alike is in tests/test_loop.py --------------------------------------------------

EXACT = [
    "equivalence=exact",
    "recipe.model.dropout=0.2",
    "recipe.model.attention_dropout=0.2",
    "optimizer=sgd",
    "optimizer.lr=0.05",
]


@pytest.fixture(scope="module")
def one_worker(pool: WorkerPool) -> Weights:
    weights: Weights = pool.run(1, train, EXACT)[0]["weights"]
    return weights


@pytest.mark.parametrize(
    ("workers", "other"),
    [
        (1, ["equivalence=standard"]),
        (2, ["equivalence=standard"]),
        (1, ["seed=1"]),
        (1, ["recipe.model.dropout=0", "recipe.model.attention_dropout=0"]),
        (1, ["recipe.model.attention_dropout=0"]),
    ],
    ids=str,
)
def test_other_dropout_ends_elsewhere(pool: WorkerPool, one_worker: Weights, workers: int, other: list[str]) -> None:
    """Splits that end alike would prove little if the dropout did: another kind, seed or share ends elsewhere."""
    found = pool.run(workers, train, [*EXACT, *other])[0]["weights"]
    assert largest_difference(found, one_worker) > 1e-4


@pytest.mark.parametrize("stop", [3, 5])
def test_a_resumed_run_goes_on_with_the_same_masks(pool: WorkerPool, one_worker: Weights, stop: int) -> None:
    """Stopping within an epoch or at its end, and starting anew, on two workers, ends with the weights of one."""
    for result in pool.run(2, train_in_two_parts, EXACT, stop):
        assert largest_difference(result["weights"], one_worker) < 1e-12
