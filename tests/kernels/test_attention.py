"""Attention of sequences without padding: torch's results on the padded batch, and dropout of every weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runner.kernels.attention import AttentionOptions, flash_attention, unpadded_attention
from runner.kernels.unpadded import TokenLayout

HEADS, SIZE = 4, 8
LENGTHS = [5, 11, 9, 0, 1, 8, 3]
#: Above 0 and too small to drop anything.
NOTHING = 1e-16


def tokens(heads: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(sum(LENGTHS), heads, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).requires_grad_()


def padded_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool) -> Tensor:
    """By torch, of a padded batch."""
    own = layout("cpu")
    assert own.lengths == LENGTHS
    parts = [own.padded(one).transpose(1, 2) for one in (query, key, value)]
    allowed = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None, None, None]
    allowed = allowed.expand(-1, 1, max(LENGTHS), -1)
    allowed = allowed.tril() if causal else allowed
    output = functional.scaled_dot_product_attention(*parts, allowed, scale=scale, enable_gqa=True)
    return own.unpadded(output.transpose(1, 2))


def layout(device: str) -> TokenLayout:
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return TokenLayout(mask.flatten().nonzero()[:, 0].to(device), *mask.shape)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("key_heads", "scale"), [(HEADS, None), (HEADS, 0.7), (2, None)])
def test_the_same_outputs_and_gradients(key_heads: int, scale: float | None, causal: bool) -> None:
    """With several sizes of sequences, an empty one among them, and with heads that share keys."""
    outcomes = []
    for function in (
        lambda *qkv: unpadded_attention(*qkv, LENGTHS, AttentionOptions(NOTHING, scale, causal)),
        lambda *qkv: padded_attention(*qkv, scale, causal),
    ):
        qkv = [tokens(heads, seed) for seed, heads in enumerate((HEADS, key_heads, key_heads))]
        output = function(*qkv)
        output.sin().sum().backward()
        outcomes.append([output.detach(), *(one.grad for one in qkv)])
    assert outcomes[0][0].shape == (sum(LENGTHS), HEADS, SIZE)
    for own, torchs in zip(*outcomes, strict=True):
        assert torch.allclose(own, torchs, rtol=1e-12, atol=1e-12)


def test_starts_of_sequences() -> None:
    assert layout("cpu").starts.tolist() == [0, 5, 16, 25, 25, 26, 34, 37]


def test_a_cpu_has_no_flash_attention() -> None:
    qkv = [tokens(HEADS, seed, torch.bfloat16).transpose(0, 1)[None] for seed in range(3)]
    assert flash_attention(*qkv, layout("cpu"), AttentionOptions()) is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_torch_has_the_operator(monkeypatch: pytest.MonkeyPatch, key_heads: int, causal: bool) -> None:
    """With these arguments and a gradient. No more than shapes: they have no data."""
    monkeypatch.setattr("runner.kernels.attention._HAVE_FLASH", ("meta",))
    monkeypatch.setattr("runner.kernels.attention.can_use_flash_attention", lambda _: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # does not know this device
    qkv = [
        tokens(heads, 0, torch.bfloat16).detach().to("meta").transpose(0, 1)[None].requires_grad_()
        for heads in (HEADS, key_heads, key_heads)
    ]
    output = flash_attention(*qkv, layout("meta"), AttentionOptions(0.1, causal=causal))
    assert output is not None
    output.sum().backward()
    assert output.shape == (1, sum(LENGTHS), HEADS, SIZE)
    assert [one.grad.shape for one in qkv if one.grad is not None] == [one.shape for one in qkv]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU with the kernel"
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_flash_attention_on_a_gpu(key_heads: int, causal: bool) -> None:
    outcomes = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        qkv = [
            tokens(heads, seed, torch.bfloat16).detach().to(device, dtype).requires_grad_()
            for seed, heads in enumerate((HEADS, key_heads, key_heads))
        ]
        if device == "cuda":
            heads_first = [one.transpose(0, 1)[None] for one in qkv]
            output = flash_attention(*heads_first, layout(device), AttentionOptions(causal=causal))
            assert output is not None
            output = output[0]
        else:
            output = padded_attention(*qkv, None, causal)
        output.sin().sum().backward()
        outcomes.append([output.detach(), *(one.grad for one in qkv)])
    for own, torchs in zip(*outcomes, strict=True):
        assert torch.allclose(own.cpu().double(), torchs, rtol=0.02, atol=0.02)


def test_products_are_in_fp32_under_autocast() -> None:
    """As precise as torch's, whose inputs and outputs alone are rounded: no score or weight is."""
    qkv = [tokens(HEADS, seed, torch.bfloat16) for seed in range(3)]
    exact = unpadded_attention(*(one.double() for one in qkv), LENGTHS, AttentionOptions(NOTHING))
    with torch.autocast("cpu", torch.bfloat16):
        output = unpadded_attention(*qkv, LENGTHS, AttentionOptions(NOTHING))
    assert output.dtype is torch.bfloat16
    different = (output != exact.float().bfloat16()).double().mean()
    assert different < 0.01  # by chance, a value lies between two numbers of bf16


def weights(p: float, length: int, seed: int = 0) -> Tensor:
    """What was drawn for one head and two sequences: factors [2, length, length], as all weights are 1 / length."""
    torch.manual_seed(seed)
    zeros, ones = torch.zeros(2 * length, 1, length), torch.eye(length).repeat(2, 1).unsqueeze(1)
    return unpadded_attention(zeros, zeros, ones, [length, length], AttentionOptions(p)).view(2, length, -1) * length


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_the_share_p_of_all_weights(p: float) -> None:
    """The rest is scaled by 1 / (1 - p). Every row, column and sequence has its own draws, from torch's generator."""
    length = 301  # odd: the last random number is used in part
    factors = weights(p, length)
    kept = factors > 0
    assert torch.allclose(factors[kept], torch.tensor(1 / (1 - p)), rtol=1e-5)
    deviation = (p * (1 - p)) ** 0.5
    for dimensions in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):
        share = (~kept).double().mean(dimensions)
        drawn = kept.numel() / share.numel()
        assert (share - p).abs().max() < 5 * deviation / drawn**0.5
    # Neighbours, and the same places in both sequences, are independent: correlations within 5 standard deviations.
    centred = kept.double() - (1 - p)
    for a, b in ((centred[0], centred[1]), (centred[..., 1:], centred[..., :-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs(float((a * b).mean())) < 5 * deviation**2 / a.numel() ** 0.5
    assert torch.equal(weights(p, length), factors)
    assert not torch.equal(weights(p, length, seed=1), factors)


@pytest.mark.parametrize("p", [0.999999, 1.0])
def test_almost_everything_can_be_dropped(p: float) -> None:
    assert int((weights(p, 100) > 0).sum()) <= 3
    assert torch.isfinite(weights(p, 100)).all()
