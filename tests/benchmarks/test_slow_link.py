"""The slow link's arithmetic: variants, windows, speeds, rows, tables, and the link's rate."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.slow_link import computed, network, records, speed
from benchmarks.slow_link.plot import draw
from benchmarks.slow_link.records import Row
from benchmarks.slow_link.speed import Moment
from benchmarks.slow_link.table import markdown, ratios
from benchmarks.slow_link.variants import DEFAULT, KS, LONGEST_WINDOW, Steps, parse, steps_of
from benchmarks.slow_link.worlds import world


def _row(variant: str, repetition: int, samples_per_s: float, **more: object) -> Row:
    row = Row("1gbit", repetition, variant, samples_per_s, 16 / samples_per_s, 96, None, None, 0.0)
    return dataclasses.replace(row, **more)


def test_names_of_variants() -> None:
    variant = parse("runner_k16_overlap_bf16_delay3")
    assert (variant.program, variant.workers, variant.k, variant.overlap) == ("runner", 2, 16, True)
    assert (variant.compress, variant.delay, variant.step_samples) == ("bf16", 3, 32)
    streaming = parse("runner_k16_streaming_int8")
    assert (streaming.streaming, streaming.overlap, streaming.compress) == (True, True, "int8")
    assert streaming.steps_in_flight == 1
    assert parse("apart").copies == 2
    assert (parse("accelerate_local_sgd_k4").local_sgd, parse("accelerate_local_sgd_k4").k) == (True, 4)
    assert (parse("accelerate_ddp_fp16").local_sgd, parse("accelerate_ddp_fp16").compress) == (False, "fp16")


@pytest.mark.parametrize("name", ["runner_k3", "runner_k64", "two", "runner_k4_int4"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        parse(name)


def test_default_has_every_k_with_and_without_overlap_and_accelerate() -> None:
    variants = [parse(name) for name in DEFAULT]
    assert variants[0].name == "one"
    for k in KS:
        ours = [v for v in variants if v.program == "runner" and v.workers == 2 and v.k == k]
        assert {(v.overlap, v.compress) for v in ours if not v.streaming} == {(False, "none"), (k > 1, "bf16")}
        assert {v.compress for v in ours if v.streaming} == ({"bf16", "int8"} if k > 2 else set())
        assert [v for v in variants if v.program == "accelerate" and v.workers == 2 and v.k == k]


def test_measured_steps_are_whole_windows_after_a_warm_up() -> None:
    for variant in map(parse, DEFAULT):
        steps = steps_of(variant, LONGEST_WINDOW)
        assert steps.first >= variant.k
        assert steps.first % variant.k == steps.measured % variant.k == steps.total % variant.k == 0
        assert steps.total >= steps.first + steps.measured + (variant.k if variant.overlap else 0)


def test_one_worker_trains_on_the_samples_of_two() -> None:
    alone, both = (steps_of(parse(name), 96) for name in ("one", "runner_k16"))
    assert (alone.first, alone.measured, alone.total) == (2 * both.first, 2 * both.measured, 2 * both.total)


def test_speed_is_measured_over_whole_windows_after_the_warm_up() -> None:
    moments = [Moment(1, 0.0), Moment(4, 9.0), Moment(8, 11.0), Moment(12, 14.0), Moment(16, 18.0)]
    found = speed.steady(moments, parse("runner_k4"), Steps(8, 8, 16))
    assert (found.steps, found.seconds, found.closing_s) == (8, 7.0, 0.0)


def test_overlap_is_measured_between_finished_averages() -> None:
    # k = 4, delay 2: averages finish after steps 6, 10 and 14; the run ends after 16 with a last one of 1.5 s.
    moments = [Moment(1, 0.0), Moment(6, 10.0), Moment(10, 14.0), Moment(14, 18.0), Moment(16, 21.5)]
    found = speed.steady(moments, parse("runner_k4_overlap_bf16"), Steps(4, 8, 16))
    assert (found.steps, found.seconds, found.closing_s) == (8, 8.0, 1.5)


def test_a_run_without_a_whole_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="no whole window of 8 steps"):
        speed.steady([Moment(8, 1.0), Moment(12, 2.0)], parse("runner_k8"), Steps(8, 8, 16))
    with pytest.raises(ValueError, match="never synchronised"):
        speed.steady([Moment(1, 1.0), Moment(6, 2.0)], parse("runner_k8"), Steps(8, 8, 16))


def _log(path: Path, rows: list[tuple[str, int, int]]) -> Path:
    lines = [{"key": key, "value": 1.0, "step": step, "timestamp": stamp} for key, step, stamp in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_moments_are_reductions_of_losses(tmp_path: Path) -> None:
    path = _log(tmp_path / "metrics.jsonl", [("train/loss", 1, 999), ("comm/bytes", 4, 1500), ("sync/bytes", 4, 1499)])
    assert speed.runner_moments(path, parse("runner_k4")) == [Moment(4, 1.5)]


def test_moments_of_overlap_are_finished_averages(tmp_path: Path) -> None:
    # Averages start after steps 4, 8, 12, 16 and finish two steps later; the second is logged with the third.
    syncs = [(4, 10_000), (8, 18_000), (12, 18_002), (16, 21_500)]
    rows = [("sync/bytes", step, stamp) for step, stamp in syncs]
    path = _log(tmp_path / "metrics.jsonl", [*rows, ("comm/bytes", 12, 21_501)])
    found = speed.runner_moments(path, parse("runner_k4_overlap_bf16"))
    assert found == [Moment(6, 10.0), Moment(14, 18.002), Moment(16, 21.5)]


def test_stalls_are_those_of_the_measured_steps(tmp_path: Path) -> None:
    # k = 4, delay 2, from step 6 to step 14: of the averages that started after steps 8 and 12.
    moments = [Moment(1, 0.0), Moment(6, 10.0), Moment(10, 14.0), Moment(14, 18.0), Moment(16, 21.5)]
    overlap = parse("runner_k4_overlap_bf16")
    found = speed.steady(moments, overlap, Steps(4, 8, 16))
    rows = [("sync/stall_seconds", step, 0) for step in (4, 8, 12, 16)]  # the last one closes the run
    path = _log(tmp_path / "metrics.jsonl", rows)
    assert speed.stalled_s(path, overlap, found) == 2 * 1.0 / 8
    blocking = parse("runner_k4")
    found = speed.steady([Moment(4, 0.0), Moment(8, 1.0), Moment(16, 3.0)], blocking, Steps(8, 8, 16))
    assert speed.stalled_s(path, blocking, found) == 2 * 1.0 / 8
    assert speed.stalled_s(_log(path, []), blocking, found) is None


def test_measurements_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "measurements.csv"
    rows = [_row("one", 0, 48.5), _row("runner_k4", 0, 64.25, sync_bytes=90_855_944, stall_s=0.25, closing_s=1.5)]
    assert records.read(path, "1gbit") == []
    for row in rows:
        records.append(path, dataclasses.replace(row, step_s=0.5))
    records.append(path, dataclasses.replace(rows[0], rate="100mbit"))
    assert records.read(path, "1gbit") == [dataclasses.replace(row, step_s=0.5) for row in rows]


def test_ratios_use_the_one_worker_of_the_same_repetition() -> None:
    rows = [_row("one", 0, 40), _row("one", 1, 50), *(_row("runner_k4", n, s) for n, s in ((0, 60), (1, 80), (2, 99)))]
    assert ratios(rows, "runner_k4") == [1.5, 1.6]


def test_more_hosts_and_other_links_are_computed() -> None:
    """What is sent grows by 2 (n - 1) / n; the link counts where it needs longer than the steps in flight."""
    streaming, blocking = parse("runner_k4_streaming_bf16"), parse("runner_k4")
    measured = Row("1gbit", 0, streaming.name, 0.0, 0.25, 32, 9_500_000, 0.0, 0.0)
    assert computed.step_s(0.2, measured, streaming, 2, "1gbit") == pytest.approx(0.25)
    assert computed.step_s(0.2, measured, streaming, 4, "1gbit") == pytest.approx(0.275)
    assert computed.step_s(0.2, measured, streaming, 2, "100mbit") == pytest.approx(0.8)
    waiting = dataclasses.replace(measured, stall_s=0.02)
    assert computed.step_s(0.2, waiting, blocking, 2, "1gbit") == pytest.approx(0.23 + 0.08 / 4)


def test_table_has_medians_ranges_and_empty_cells() -> None:
    rows = [_row("runner_k4", n, s, step_s=0.5, stall_s=0.1) for n, s in ((0, 60.0), (1, 80.0))]
    rows += [_row("one", n, 40.0, step_s=0.4) for n in (0, 1)]
    heading, rule, one, other = markdown(rows, DEFAULT).splitlines()
    assert heading.count("|") == rule.count("|") == one.count("|") == other.count("|")
    assert one == "| `one` | 40.0 (40.0 to 40.0) | 1 | | | | | 2 |"
    assert other == "| `runner_k4` | 70.0 (60.0 to 80.0) | 1.75 (1.50 to 2.00) | | 100 | 100 | | 2 |"


def test_plot_of_some_variants(tmp_path: Path) -> None:
    draw([_row("one", 0, 40), _row("runner_k4", 0, 60), _row("accelerate_ddp", 0, 30)], "1gbit", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_rates() -> None:
    rates = {"1gbit": 1e9, "200Mbit": 2e8, "2.5gbit": 2.5e9, "64kbit": 64e3}
    assert {rate: network.bits_per_second(rate) for rate in rates} == rates
    for wrong in ("1", "0mbit", "1gbps"):
        with pytest.raises(ValueError, match="invalid"):
            network.bits_per_second(wrong)


def test_bucket_holds_the_largest_packets() -> None:
    assert network.burst_bytes("10mbit") == 256 * 1024
    assert network.burst_bytes("10gbit") == 2_500_000


def test_unsuitable_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(network.NoNetwork, match="root"):
        network.check_machine()
    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda name: None)
    with pytest.raises(network.NoNetwork, match="iproute2"):
        network.check_machine()
    monkeypatch.setattr(network.shutil, "which", lambda name: name)
    monkeypatch.setattr(network.os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(network.NoNetwork, match="core each"):
        network.check_machine()


def test_environment_of_one_and_of_two_workers() -> None:
    assert [(process.host, process.variables) for process in world(["train"], 1, host=1)] == [(1, {})]
    first, second = world(["train"], 2)
    assert (first.host, first.variables["RANK"], second.host, second.variables["RANK"]) == (0, "0", 1, "1")
    assert first.variables["MASTER_ADDR"] == second.variables["MASTER_ADDR"] == network.ADDRESSES[0]
