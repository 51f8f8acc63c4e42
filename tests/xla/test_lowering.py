"""The programs that a TPU would get: the shipped loop's step, lowered for eight workers and not executed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_xla
from torch_xla.debug import metrics

from runner.backends.xla import XlaBackend, compiled_all_reduce, host_all_reduce
from runner.config.choices import SyncPolicyName
from runner.config.schema import Sync
from runner.sync import StepFacts
from runner.sync.local_sgd import LocalSGD
from runner.sync.replica_vector import ReplicaVector
from runner.train.build import build_loop
from runner.train.loop import Loop
from tests.replicas import tiny_job

WORKERS = 8
EIGHT = "{{0,1,2,3,4,5,6,7}}"

#: Operations that transfer data to or from the host in the middle of a program.
HOST_TRAFFIC = re.compile(r"\b(outfeed|infeed|send|recv|copy-to-host|host-transfer|custom-call)\b")


class _Host:
    """Worker 0's connection to seven others that do not exist: enough to build a loop."""

    rank, world_size, local_rank = 0, WORKERS, 0

    def wait_for_all(self, value: Any) -> list[Any]:
        return [value] * WORKERS


class _Lowered(Exception):
    """Raised instead of executing a program with a collective, which needs eight devices."""


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")
    # Torch_xla omits collectives where its runtime has one device only.
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")
    yield
    torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))  # or another test would execute it


class _Worker(_Host):
    """Another one of the eight workers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank  # type: ignore[misc]


def lowered(overrides: list[str], all_reduce: Any, executed: int = 0, rank: int = 0) -> tuple[str, Loop]:
    """Train on a backend as on a TPU with eight workers: the program after the first `executed` ones, as HLO."""
    backend = XlaBackend(_Worker(rank), torch_xla.device(), all_reduce)  # type: ignore[arg-type]
    loop = build_loop(tiny_job(["precision=fp32", *overrides], WORKERS), backend)
    marks = 0
    hlo = ""

    def mark_step() -> None:
        nonlocal marks, hlo
        marks += 1
        if marks > executed:
            gradients = [p.grad for p in loop.model.parameters() if p.grad is not None]
            vector = [replica.vector] if (replica := getattr(loop.policy, "_replica", None)) else []
            hlo = torch_xla._XLAC._get_xla_tensors_hlo([*loop.model.parameters(), *gradients, *vector])
            raise _Lowered
        torch_xla.sync()

    backend.mark_step = mark_step  # type: ignore[method-assign]
    loop._after_step = lambda: None  # type: ignore[method-assign]  # it reduces metrics over workers that do not exist
    torch_xla.sync()
    metrics.clear_all()
    with pytest.raises(_Lowered):
        loop.train()
    return hlo, loop


def all_reduces(hlo: str) -> list[str]:
    return [line for line in hlo.splitlines() if " all-reduce(" in line]


OPTIMIZERS = [["optimizer=sgd"], ["optimizer=adamw"], ["optimizer=adamw", "precision=bf16"]]


@pytest.mark.parametrize("overrides", OPTIMIZERS)
def test_a_synchronous_step_has_one_all_reduce(overrides: list[str]) -> None:
    """Forward and backward are followed by one program with one all-reduce, of all gradients over eight workers, and
    the update; the host reads nothing in between."""
    hlo, loop = lowered(overrides, compiled_all_reduce(WORKERS), executed=1)
    (reduction,) = all_reduces(hlo)
    assert f"replica_groups={EIGHT}" in reduction
    gradients = sum(p.numel() for p in loop.model.parameters())
    assert f"f32[{gradients}]" in reduction
    assert " dot(" not in hlo
    assert not HOST_TRAFFIC.search(hlo)
    assert metrics.counter_value("aten::_local_scalar_dense") is None
    assert metrics.metric_data("TransferFromDeviceTime") is None
    executed, *_ = metrics.metric_data("ExecuteTime") or (0,)
    assert executed <= 1  # forward and backward, possibly not finished


@pytest.mark.parametrize("overrides", OPTIMIZERS)
def test_forward_and_backward_are_one_program_without_a_collective(overrides: list[str]) -> None:
    """The program whose shape depends on a worker's own rows has no collective."""
    hlo, _ = lowered(overrides, compiled_all_reduce(WORKERS))
    assert " dot(" in hlo
    assert not all_reduces(hlo)
    assert not HOST_TRAFFIC.search(hlo)


def test_all_workers_run_the_same_collective_program() -> None:
    """The rows of the first and of the last worker are in different length buckets; the program with the all-reduce is
    identical."""
    overrides = ["optimizer=sgd", "device.length_buckets=[8,9,10,11,12,13]"]
    own, common = (
        [lowered(overrides, compiled_all_reduce(WORKERS), executed, rank)[0] for rank in (0, 7)] for executed in (0, 1)
    )
    assert _unnumbered(own[0]) != _unnumbered(own[1])
    assert _unnumbered(common[0]) == _unnumbered(common[1])
    assert all_reduces(common[0])


def _unnumbered(hlo: str) -> str:
    return re.sub(r"\.\d+", "", hlo)


def test_a_local_step_has_no_collective() -> None:
    """With k = 4 the step does not communicate."""
    hlo, _ = lowered(["optimizer=sgd", "sync.k=4"], compiled_all_reduce(WORKERS))
    assert " dot(" in hlo
    assert not all_reduces(hlo)
    assert not HOST_TRAFFIC.search(hlo)


def test_an_average_is_one_program_with_one_all_reduce() -> None:
    """After the fourth step: a program that flattens the weights, and one with one all-reduce of all of them."""
    hlo, loop = lowered(["optimizer=sgd", "sync.k=4"], compiled_all_reduce(WORKERS), executed=5)
    (reduction,) = all_reduces(hlo)
    assert f"replica_groups={EIGHT}" in reduction
    assert f"f32[{len(loop.policy._replica.vector)}]" in reduction
    assert " dot(" not in hlo
    assert not HOST_TRAFFIC.search(hlo)


@pytest.mark.parametrize("tensors", [1, 2])
def test_an_average_is_the_same_program_for_any_number_of_samples(tensors: int) -> None:
    """With some, none or all of the samples on this worker: one program, with one all-reduce."""
    programs = set()
    for own_count in (0, 6, 7, 48):
        backend = XlaBackend(_Host(), torch_xla.device(), compiled_all_reduce(WORKERS))  # type: ignore[arg-type]
        model = torch.nn.Linear(3, 2, bias=tensors == 2).to(backend.device)
        policy = LocalSGD(ReplicaVector(model, [], backend), backend, Sync(SyncPolicyName.periodic, 4), [3])
        torch_xla.sync()
        backend.mark_step = lambda: None  # type: ignore[method-assign]  # it would be executed
        policy.after_step(StepFacts(3, 48, 1, own_count, 48, 0.1))
        programs.add(_unnumbered(torch_xla._XLAC._get_xla_tensors_hlo([*model.parameters()])))
        torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))
    (program,) = programs
    assert len(all_reduces(program)) == 1


def test_a_host_collective_would_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the gloo collective transfers gradients to the host before the step ends."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    hlo, _ = lowered(["optimizer=sgd"], host_all_reduce, executed=1)
    assert not all_reduces(hlo)
    assert metrics.metric_data("TransferFromDeviceTime") is not None


def test_fp32_is_multiplied_as_fp32() -> None:
    """A TPU multiplies fp32 matrices in bf16 unless the program requests full precision, as the backend does."""
    from runner.backends.xla import _full_matmul_precision

    _full_matmul_precision()
    hlo, _ = lowered(["optimizer=sgd"], compiled_all_reduce(WORKERS))
    products = [line for line in hlo.splitlines() if " dot(" in line]
    assert products
    assert all("operand_precision={highest,highest}" in line for line in products)
    assert torch.get_float32_matmul_precision() == "highest"
