"""The comparison of two replays: what is rounding, what is a mismatch, and what is reported."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runner.config.choices import PrecisionName
from runner.tools.verify.lockstep import Link, compare_frames
from runner.tools.verify.mismatch import TOLERANCES, Mismatch, SnapshotComparison
from runner.tools.verify.snapshot import Snapshot

W = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


def snapshot(step: int = 1, **changes: Any) -> Snapshot:
    base = Snapshot(
        step=step,
        samples=[0, 1, 2, 3],
        lr=0.1,
        loss=0.7,
        skipped=False,
        gradients={"layer": 0.01 * W, "bias": 0.01 * W[0]},
        gradients_of="the global batch",
        weights={"layer": W, "bias": W[0]},
        replicas=None,
    )
    return dataclasses.replace(base, **changes)


def with_weight(name: str, tensor: torch.Tensor) -> Snapshot:
    return snapshot(weights={**snapshot().weights, name: tensor})


def with_gradient(name: str, tensor: torch.Tensor) -> Snapshot:
    return snapshot(gradients={**snapshot().gradients, name: tensor})


def fp32() -> SnapshotComparison:
    return SnapshotComparison.of(PrecisionName.fp32)


@pytest.mark.parametrize(
    ("b", "what", "words"),
    [
        (snapshot(samples=[0, 1, 2, 2, 3]), "samples", "0 of them are only in a, 1 only in b"),
        (snapshot(lr=0.2), "learning rate", "2 times as much"),
        (snapshot(lr=0.0), "learning rate", "a has the learning rate 0.1 and b 0"),
        (snapshot(skipped=True), "step", "in b only"),
        (snapshot(loss=0.71), "loss", "0.014"),
        (snapshot(loss=math.nan), "loss", "nan"),
        (with_gradient("layer", 0.005 * W), "gradient", "the gradients of layer differ by 0.5 of their norm"),
        (with_gradient("bias", math.nan * W[0]), "gradient", "nan"),
        (with_weight("layer", W + 1e-3), "weight", "the weights of layer differ by"),
        (with_weight("bias", W[0, :2]), "weight", "the models differ: the shape of bias is [4] in a, [2] in b"),
        (with_weight("other", W), "weight", "the shape of other is None in a"),
        (snapshot(replicas="worker 1 …"), "replicas", "the workers of b are not equal: worker 1 …"),
    ],
)
def test_a_mismatch_is_found_from_either_side(b: Snapshot, what: str, words: str) -> None:
    mismatches = fp32().add(snapshot(), b), fp32().add(b, snapshot())
    assert [one and (one.step, one.what) for one in mismatches] == [(1, what)] * 2
    assert mismatches[0] is not None
    assert words in mismatches[0].sentence


@pytest.mark.parametrize("precision", list(TOLERANCES))
@pytest.mark.parametrize("what", ["loss", "gradient", "weight"])
def test_the_tolerance_is_a_bound(precision: PrecisionName, what: str) -> None:
    """Just below it nothing is found, just above it a mismatch is; the difference is kept either way."""
    tolerance = getattr(TOLERANCES[precision], what)
    for factor in (0.9, 1.2):
        scale = 1 / (1 - factor * tolerance)
        b = {
            "loss": snapshot(loss=0.7 * scale),
            "gradient": with_gradient("layer", 0.01 * W * scale),
            "weight": with_weight("layer", W * scale),
        }[what]
        comparison = SnapshotComparison.of(PrecisionName.fp64, precision)  # the coarser one decides
        assert (comparison.add(snapshot(), b) is not None) is (factor > 1)
        assert comparison.largest[what].share == pytest.approx(factor * tolerance, rel=1e-3)


def test_bits_have_no_tolerance() -> None:
    """Not even the sign of a zero, or a gradient that is rounding only."""
    zero = torch.zeros(3)
    for a, b, words in (
        (with_weight("bias", zero), with_weight("bias", -zero), "the weights of bias have other bits"),
        (with_gradient("bias", 1e-20 * W[0]), with_gradient("bias", 2e-20 * W[0]), "the gradients of bias have other"),
        (snapshot(), snapshot(loss=math.nextafter(0.7, 1.0)), "other bits"),
    ):
        comparison = SnapshotComparison.of(PrecisionName.fp32, PrecisionName.fp32, bits=True)
        assert comparison.add(a, a) is None
        found = comparison.add(a, b)
        assert found is not None
        assert words in found.sentence


def test_weights_whose_gradient_is_rounding_are_set_aside() -> None:
    """Whole tensors or parts of them, until they have had a real gradient."""
    noise = 1e-12 * torch.ones(4, dtype=torch.float64)
    half = torch.tensor([0.01, 0.01, 1e-12, -1e-12], dtype=torch.float64)
    a = snapshot(gradients={"layer": 0.01 * W, "bias": noise, "fused": half}, weights={"bias": W[0], "fused": W[1]})
    moved = W[1] + torch.tensor([0, 0, 1e-3, -2e-3], dtype=torch.float64)
    b = snapshot(
        gradients={"layer": 0.01 * W, "bias": -noise, "fused": half * torch.tensor([1, 1, -1, -1])},
        weights={"bias": W[0] + 1e-3, "fused": moved},
    )
    comparison = fp32()
    assert comparison.add(a, b) is None
    assert comparison.set_aside == pytest.approx({"bias": 1e-3, "fused": 2e-3})
    later = dataclasses.replace(a, step=2, gradients={"layer": 0.01 * W, "bias": W[0], "fused": half})
    mismatch = comparison.add(later, dataclasses.replace(b, step=2, gradients=later.gradients))
    assert mismatch is not None
    assert "bias" in mismatch.sentence


def test_weights_with_a_gradient_of_zero_are_compared() -> None:
    """Zero is no rounding: such a weight has no reason to move."""
    gradients = {"layer": 0.01 * W, "bias": torch.zeros(4, dtype=torch.float64)}
    b = snapshot(gradients=gradients, weights={"layer": W, "bias": W[0] + 1e-3})
    mismatch = fp32().add(snapshot(gradients=gradients), b)
    assert mismatch is not None
    assert "bias" in mismatch.sentence


def test_only_the_same_things_are_compared() -> None:
    """Between synchronisations there are no common weights, and gradients are of different samples."""
    alone = snapshot(gradients_of="worker 0 of 2, k = 4", gradients={"layer": W, "bias": W[0]}, weights={})
    comparison = fp32()
    assert comparison.add(snapshot(), alone) is None
    assert comparison.compared == {"loss": 1, "gradient": 0, "weight": 0}
    mismatch = fp32().add(alone, dataclasses.replace(alone, gradients=snapshot().gradients))
    assert mismatch is not None
    assert mismatch.what == "gradient"


def test_gradients_of_skipped_steps_are_not_compared() -> None:
    infinite = snapshot(skipped=True, gradients={"layer": math.inf * W, "bias": math.inf * W[0]})
    assert fp32().add(infinite, infinite) is None


def test_small_values_are_compared_with_their_largest_size() -> None:
    """A loss or gradient that passes through zero keeps the rounding of the terms it is the sum of."""
    comparison = fp32()
    assert comparison.add(snapshot(), snapshot()) is None
    tiny = {"layer": 1e-9 * W, "bias": 1e-9 * W[0]}
    b = snapshot(step=2, loss=-1e-7, gradients={name: -tensor for name, tensor in tiny.items()})
    assert comparison.add(snapshot(step=2, loss=1e-7, gradients=tiny), b) is None


def test_nan_in_both_setups_is_a_mismatch() -> None:
    assert fp32().add(snapshot(loss=math.nan), snapshot(loss=math.nan)) is not None


def test_a_ledger_takes_precedence() -> None:
    of_a, of_b = Mismatch(3, "ledger", "the ledger of a"), Mismatch(3, "ledger", "the ledger of b")
    assert compare_frames(None, None, fp32()) is None
    assert compare_frames(snapshot(), snapshot(), fp32()) is None
    assert compare_frames(snapshot(), of_b, fp32()) == of_b
    assert compare_frames(None, of_b, fp32()) == of_b
    both = compare_frames(of_a, of_b, fp32())
    assert both is not None
    assert both.sentence == "the ledger of a; the ledger of b"


@pytest.mark.parametrize("frame", [None, Mismatch(2, "ledger", "the ledger of b")])
def test_frames_are_exchanged(tmp_path: Path, frame: Mismatch | None) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    link = Link(store, tmp_path)
    sent = snapshot(step=3, loss=1 / 3, weights={"b": W.float(), "a": W[0].clone()}, replicas="worker 1 …")
    for number, go_on in ((0, True), (1, False)):
        link.reply(number, go_on)
        assert link.send(number, sent if go_on else frame) is go_on
    received = link.receive(0)
    assert isinstance(received, Snapshot)
    assert (received.loss, received.samples, received.replicas) == (1 / 3, [0, 1, 2, 3], "worker 1 …")
    assert list(received.weights) == ["b", "a"]
    assert received.weights["b"].dtype == torch.float32
    assert all(torch.equal(received.weights[name], tensor) for name, tensor in sent.weights.items())
    assert link.receive(1) == frame


def test_the_report_is_json() -> None:
    comparison = SnapshotComparison.of(PrecisionName.fp64)
    comparison.add(snapshot(), with_weight("layer", W * (1 + 1e-13)))
    content = json.loads(json.dumps(comparison.as_json()))
    assert [one["what"] for one in content["largest"]] == ["loss", "gradient", "weight"]
    assert content["largest"][2]["tensor"] == "layer"
    assert content["steps"] == 1
