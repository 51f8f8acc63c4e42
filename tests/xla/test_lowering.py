"""What a TPU would be given: the shipped loop's own step, lowered for eight workers and not executed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_xla
from torch_xla.debug import metrics

from runner.backends.xla import XlaBackend, compiled_all_reduce, host_all_reduce
from runner.loop import Loop
from runner.worker import build_loop
from tests.replicas import tiny_job

WORKERS = 8
EIGHT = "{{0,1,2,3,4,5,6,7}}"

#: What leaves the device, or waits for the host, in the middle of a program.
HOST_TRAFFIC = re.compile(r"\b(outfeed|infeed|send|recv|copy-to-host|host-transfer|custom-call)\b")


class _Host:
    """Worker 0's link to seven others that do not exist: enough to build a loop with."""

    rank, world_size, local_rank = 0, WORKERS, 0

    def share(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        pass


class _Lowered(Exception):
    """In place of executing a program with a collective, which one device cannot."""


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")
    # Torch_xla leaves a collective out where its own runtime knows of one device only.
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")
    yield
    torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))  # what was not executed must not be, in another test


def lowered(overrides: list[str], all_reduce: Any, executed: int = 0) -> tuple[str, Loop]:
    """Train on a backend as on a TPU with eight workers: the program after the first `executed` ones, as HLO."""
    backend = XlaBackend(_Host(), torch_xla.device(), all_reduce)  # type: ignore[arg-type]
    loop = build_loop(tiny_job(["precision=fp32", *overrides], WORKERS), backend, lambda step, metrics: None)
    marks = 0
    hlo = ""

    def mark_step() -> None:
        nonlocal marks, hlo
        marks += 1
        if marks > executed:
            hlo = torch_xla._XLAC._get_xla_tensors_hlo([*loop.model.parameters()])
            raise _Lowered
        torch_xla.sync()

    backend.mark_step = mark_step  # type: ignore[method-assign]
    loop._after_step = lambda: None  # type: ignore[method-assign]  # what it reduces, it would with workers not there
    torch_xla.sync()
    metrics.clear_all()
    with pytest.raises(_Lowered):
        loop.train()
    return hlo, loop


def all_reduces(hlo: str) -> list[str]:
    return [line for line in hlo.splitlines() if " all-reduce(" in line]


@pytest.mark.parametrize("overrides", [["optimizer=sgd"], ["optimizer=adamw"], ["optimizer=adamw", "precision=bf16"]])
def test_a_synchronous_step_is_one_program_with_one_all_reduce(overrides: list[str]) -> None:
    """Forward, backward, one all-reduce of all gradients over all eight workers, and the update; no host in between."""
    hlo, loop = lowered(overrides, compiled_all_reduce(WORKERS))
    (reduction,) = all_reduces(hlo)
    assert f"replica_groups={EIGHT}" in reduction
    gradients = sum(p.numel() for p in loop.model.parameters())
    assert f"f32[{gradients}]" in reduction
    assert not HOST_TRAFFIC.search(hlo)
    assert metrics.counter_value("aten::_local_scalar_dense") is None
    assert metrics.metric_data("TransferFromDeviceTime") is None
    assert metrics.metric_data("ExecuteTime") is None  # the whole step was recorded before anything ran


def test_a_local_step_has_no_collective() -> None:
    """With k = 4 the step itself speaks to nobody."""
    hlo, _ = lowered(["optimizer=sgd", "sync.k=4"], compiled_all_reduce(WORKERS))
    assert " dot(" in hlo
    assert not all_reduces(hlo)
    assert not HOST_TRAFFIC.search(hlo)


def test_an_average_is_one_program_with_one_all_reduce() -> None:
    """The fourth step is followed by a program of its own: one all-reduce of all weights over all eight workers."""
    hlo, loop = lowered(["optimizer=sgd", "sync.k=4"], compiled_all_reduce(WORKERS), executed=4)
    (reduction,) = all_reduces(hlo)
    assert f"replica_groups={EIGHT}" in reduction
    assert f"f32[{sum(p.numel() for p in loop.model.parameters())}]" in reduction
    assert " dot(" not in hlo
    assert not HOST_TRAFFIC.search(hlo)


def test_the_collective_off_a_tpu_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test sees that the gloo collective takes gradients to the host before the step ends."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    hlo, _ = lowered(["optimizer=sgd"], host_all_reduce)
    assert not all_reduces(hlo)
    assert metrics.metric_data("TransferFromDeviceTime") is not None


def test_fp32_is_multiplied_as_fp32() -> None:
    """A TPU multiplies fp32 matrices as bf16 unless the program asks for more; the shipped backend asks."""
    from runner.backends.xla import _full_matmul_precision

    _full_matmul_precision()
    hlo, _ = lowered(["optimizer=sgd"], compiled_all_reduce(WORKERS))
    products = [line for line in hlo.splitlines() if " dot(" in line]
    assert products
    assert all("operand_precision={highest,highest}" in line for line in products)
    assert torch.get_float32_matmul_precision() == "highest"
