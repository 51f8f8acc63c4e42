"""The comparison of two replays: what counts as rounding, what as a difference, and how it is said."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.config.choices import PrecisionName
from runner.verify.compare import NOISE, TOLERANCES, Comparison, Finding
from runner.verify.lockstep import judge
from runner.verify.snapshot import Snapshot

W = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


def snapshot(step: int = 1, **changes: Any) -> Snapshot:
    base = Snapshot(
        step=step,
        samples=np.arange(4),
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


@pytest.mark.parametrize(
    ("b", "what", "words"),
    [
        (snapshot(samples=np.array([0, 1, 2, 9])), "samples", "a trains on 4 samples and b on 4: 1 of them"),
        (snapshot(samples=np.array([0, 1, 2, 2, 3])), "samples", "0 of them are only in a, 1 only in b"),
        (snapshot(lr=0.2), "learning rate", "a has the learning rate 0.1 and b 0.2, 2 times as much"),
        (snapshot(lr=0.0), "learning rate", "a has the learning rate 0.1 and b 0"),
        (snapshot(loss=0.71), "loss", "a has the loss 0.7 and b 0.71: 0.014 of it"),
        (snapshot(loss=math.nan), "loss", "b nan"),
        (with_gradient("layer", 0.005 * W), "gradient", "the gradients of layer differ by 0.5 of their norm"),
        (with_gradient("bias", math.nan * W[0]), "gradient", "the gradients of bias differ by nan"),
        (with_weight("layer", W + 1e-3), "weight", "the weights of layer differ by"),
        (with_weight("bias", W[0, :2]), "weight", "the models differ: bias has the shape [4] in a and [2] in b"),
        (with_weight("other", W), "weight", "only one of them has a weight named other"),
        (
            snapshot(replicas="worker 1 has other bits in layer than worker 0"),
            "replicas",
            "the workers of b are not equal",
        ),
    ],
)
def test_a_difference_is_found(b: Snapshot, what: str, words: str) -> None:
    """Each kind of difference is named, from either side."""
    for pair in ((snapshot(), b), (b, snapshot())):
        finding = Comparison.of(PrecisionName.fp32).add(*pair)
        assert finding is not None
        assert (finding.step, finding.what) == (1, what)
    finding = Comparison.of(PrecisionName.fp32).add(snapshot(), b)
    assert finding is not None
    assert words in finding.sentence


@pytest.mark.parametrize("precision", list(TOLERANCES))
@pytest.mark.parametrize("what", ["loss", "gradient", "weight"])
def test_the_tolerance_is_a_bound(precision: PrecisionName, what: str) -> None:
    """Just below the tolerance nothing is found, just above it the difference is; both are kept as the largest."""
    tolerance = getattr(TOLERANCES[precision], what)
    for factor in (0.9, 1.2):
        shift = 1 / (1 - factor * tolerance)
        b = {
            "loss": lambda s=shift: snapshot(loss=0.7 * s),
            "gradient": lambda s=shift: with_gradient("layer", 0.01 * W * s),
            "weight": lambda s=shift: with_weight("layer", W * s),
        }[what]()
        comparison = Comparison.of(precision)
        finding = comparison.add(snapshot(), b)
        assert (finding is not None) is (factor > 1)
        assert comparison.largest[what].share == pytest.approx(factor * tolerance, rel=1e-3)


def test_the_coarser_precision_decides() -> None:
    assert Comparison.of(PrecisionName.fp32, PrecisionName.bf16).tolerance == TOLERANCES[PrecisionName.bf16]
    assert Comparison.of(PrecisionName.fp64, PrecisionName.fp32).tolerance == TOLERANCES[PrecisionName.fp32]
    assert TOLERANCES.keys() == NOISE.keys() >= set(PrecisionName) - {PrecisionName.from_accelerate}


def test_weights_without_a_gradient_are_set_apart() -> None:
    """A tensor, or a part of one, whose gradient is rounding wanders under AdamW: listed, not judged."""
    noise = 1e-12 * torch.ones(4, dtype=torch.float64)
    half = torch.tensor([0.01, 0.01, 1e-12, -1e-12], dtype=torch.float64)
    a = snapshot(gradients={"layer": 0.01 * W, "bias": noise, "fused": half}, weights={"bias": W[0], "fused": W[1]})
    moved = W[1] + torch.tensor([0, 0, 1e-3, -2e-3], dtype=torch.float64)
    b = snapshot(
        gradients={"layer": 0.01 * W, "bias": -noise, "fused": half * torch.tensor([1, 1, -1, -1])},
        weights={"bias": W[0] + 1e-3, "fused": moved},
    )
    comparison = Comparison.of(PrecisionName.fp32)
    assert comparison.add(a, b) is None
    assert comparison.set_aside == pytest.approx({"bias": 1e-3, "fused": 2e-3})
    # What has had a gradient once is judged from then on.
    later = dataclasses.replace(a, step=2, gradients={"layer": 0.01 * W, "bias": W[0], "fused": half})
    moved_later = dataclasses.replace(b, step=2, gradients=later.gradients)
    finding = comparison.add(later, moved_later)
    assert finding is not None
    assert finding.sentence.startswith("the weights of bias differ")


def test_weights_that_never_had_a_gradient_are_judged() -> None:
    """A gradient of exactly zero is no rounding: such a weight has no reason to move."""
    zero = torch.zeros(4, dtype=torch.float64)
    a = snapshot(gradients={"layer": 0.01 * W, "bias": zero})
    b = snapshot(gradients={"layer": 0.01 * W, "bias": zero}, weights={"layer": W, "bias": W[0] + 1e-3})
    finding = Comparison.of(PrecisionName.fp32).add(a, b)
    assert finding is not None
    assert "bias" in finding.sentence


def test_what_one_side_has_not_is_not_compared() -> None:
    """Workers that step alone have no common gradient, and no weights between synchronisations."""
    comparison = Comparison.of(PrecisionName.fp64)
    alone = snapshot(gradients_of="worker 0 of 2, k = 4", gradients={"layer": W, "bias": W[0]}, weights={})
    assert comparison.add(snapshot(), alone) is None
    assert comparison.largest.keys() == {"loss"}
    assert comparison.compared == {"loss": 1, "gradient": 0, "weight": 0}
    both_alone = dataclasses.replace(alone, gradients=snapshot().gradients)
    finding = Comparison.of(PrecisionName.fp64).add(alone, both_alone)
    assert finding is not None
    assert finding.what == "gradient"


def test_steps_that_the_scaler_skipped() -> None:
    """A step that only one side skipped is a difference; gradients that both threw away are none."""
    infinite = snapshot(skipped=True, gradients={"layer": math.inf * W, "bias": math.inf * W[0]})
    comparison = Comparison.of(PrecisionName.fp16)
    assert comparison.add(infinite, infinite) is None
    finding = comparison.add(snapshot(), infinite)
    assert finding is not None
    assert finding.sentence == "the loss scaler skipped the step in b only"


def test_what_has_shrunk_is_judged_by_what_it_was() -> None:
    """A loss or gradient that passes through zero keeps the rounding of the terms it is the sum of."""
    comparison = Comparison.of(PrecisionName.fp32)
    assert comparison.add(snapshot(), snapshot()) is None
    tiny = {"layer": 1e-9 * W, "bias": 1e-9 * W[0]}
    b = snapshot(step=2, loss=-1e-7, gradients={name: -tensor for name, tensor in tiny.items()})
    assert comparison.add(snapshot(step=2, loss=1e-7, gradients=tiny), b) is None


def test_what_is_not_a_number_in_both_is_found() -> None:
    """Two setups that both diverge are not the same to the last digit: nothing is known of them."""
    b = snapshot(loss=math.nan)
    finding = Comparison.of(PrecisionName.fp32).add(b, b)
    assert finding is not None
    assert finding.what == "loss"


def test_judge() -> None:
    """Both at their end: nothing. A ledger's finding of either side, or of both, is told."""
    comparison = Comparison.of(PrecisionName.fp64)
    of_b = Finding(3, "ledger", "the ledger of b: …")
    assert judge(None, None, comparison) is None
    assert judge(snapshot(), snapshot(), comparison) is None
    assert judge(snapshot(), of_b, comparison) == of_b
    assert judge(None, of_b, comparison) == of_b
    both = judge(Finding(3, "ledger", "the ledger of a: …"), of_b, comparison)
    assert both is not None
    assert both.sentence == "the ledger of a: …; the ledger of b: …"


def test_a_snapshot_survives_the_way_through_a_file(tmp_path: Path) -> None:
    """Names, order, values, bits: all as before."""
    weights = {"b": W.float(), "a": W[0].clone()}
    before = snapshot(step=3, loss=1 / 3, weights=weights, replicas="worker 1 …")
    before.save(tmp_path / "frame")
    after = Snapshot.load(tmp_path / "frame")
    assert (after.step, after.lr, after.loss, after.replicas) == (3, 0.1, 1 / 3, "worker 1 …")
    assert np.array_equal(after.samples, before.samples)
    assert list(after.weights) == ["b", "a"]
    assert list(after.gradients) == ["layer", "bias"]
    for name, tensor in weights.items():
        assert after.weights[name].dtype == tensor.dtype
        assert torch.equal(after.weights[name], tensor)


def test_the_report_is_json() -> None:
    comparison = Comparison.of(PrecisionName.fp64)
    comparison.add(snapshot(), with_weight("layer", W * (1 + 1e-13)))
    content = json.loads(json.dumps(comparison.as_json()))
    assert [one["what"] for one in content["largest"]] == ["loss", "gradient", "weight"]
    assert content["largest"][2]["tensor"] == "layer"
    assert content["steps"] == 1
