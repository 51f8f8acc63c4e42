"""TensorBoard and W&B: what their own readers find in a run's folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams.api_pb2 import Status
from wandb.proto.wandb_internal_pb2 import Record

from runner import cli
from runner.config.schema import Tracking
from runner.folder.metrics_log import MetricsLog, MetricsReader, cut_metrics
from runner.track import store
from runner.track import tracker as module
from runner.track.card import TrackingRecord, continued
from runner.track.tracker import Tracker, build_tracker
from tests.runs import TRACKED, only_folder, read, run, stored_runs
from tests.runs import store as mlflow

BOTH = Tracking(tensorboard=True, wandb=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """And a home in which nothing may be written."""
    monkeypatch.setattr(module, "_SEND_EVERY_S", 0.02)
    home = here.parent / f"{here.name}-home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MPLCONFIGDIR", str(here.parent / f"{here.name}-fonts"))  # or a first import would write them


@pytest.fixture
def folder(here: Path) -> Path:
    (here / "run").mkdir()
    return here / "run"


def card(**changes: Any) -> TrackingRecord:
    params = {"seed": "0", "lr": "0.001", "device": "cpu"}
    tags = {"device": "cpu", "certificate": "equivalent", "mlflow.note.content": "- Plan", "mlflow.user": "me"}
    return dataclasses.replace(TrackingRecord("mine", "a run", params, tags, None), **changes)


def started(folder: Path, tracking: Tracking = BOTH, **changes: Any) -> Tracker:
    tracker = build_tracker(tracking, card(**changes), folder)
    tracker.start()
    return tracker


def log(folder: Path, *rows: tuple[int, dict[str, float]]) -> None:
    file = MetricsLog(folder)
    for step, metrics in rows:
        file.write(step, metrics)
    file.close()


def events(folder: Path) -> EventAccumulator:
    (file,) = folder.glob("tensorboard/*/*tfevents*")
    found = EventAccumulator(str(file), size_guidance={"scalars": 0})
    found.Reload()
    return found


def in_tensorboard(folder: Path) -> list[tuple[str, int, float, int]]:
    found = events(folder)
    return sorted(
        (tag, one.step, one.value, round(1000 * one.wall_time))
        for tag in found.Tags()["scalars"]
        for one in found.Scalars(tag)
    )


def wandb_records(folder: Path) -> Iterator[Record]:
    """The records of the only W&B run in a folder: LevelDB's log format, in which W&B writes offline runs."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 2**15 - position % 2**15) < 7:  # the end of a block
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(record)
            record = b""


def items(record: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record}


def in_wandb(folder: Path) -> list[tuple[str, int, float, int]]:
    rows = [items(record.history.item) for record in wandb_records(folder) if record.HasField("history")]
    return sorted(
        (name, row["optimizer_step"], float(value), round(1000 * row["_timestamp"]))
        for row in rows
        for name, value in row.items()
        if "/" in name
    )


def logged(folder: Path) -> list[tuple[str, int, float, int]]:
    return sorted((one.key, one.step, one.value, one.timestamp) for one in MetricsReader(folder).read())


def single(points: list[tuple[str, int, float, int]]) -> list[tuple[str, int, float, int]]:
    """TensorBoard's precision."""
    return [(name, step, struct.unpack("f", struct.pack("f", value))[0], time) for name, step, value, time in points]


def has_each_point_once(folder: Path) -> bool:
    return in_wandb(folder) == logged(folder) and in_tensorboard(folder) == single(logged(folder))


def test_metrics_settings_and_end_arrive(folder: Path) -> None:
    """A metric of an earlier step, and values that are not finite, too."""
    tracker = started(folder, tags={**card().tags, "sweep.id": "the-sweep"})
    log(folder, (1, {"train/loss": 0.5, "train/lr": 1e-3}), (3, {"train/loss": 0.25}), (2, {"sync/drift": 1.5}))
    log(folder, (4, {"train/loss": math.inf}))
    tracker.tag("diagnosis", "the data are slow")
    tracker.tag("certificate", "comparable")
    tracker.finish("FINISHED")
    assert in_tensorboard(folder) == single(logged(folder))
    assert in_wandb(folder) == logged(folder)
    assert not TrackingRecord.read(folder).undelivered
    lines = "\n".join(tracker.how_to_open())
    assert "tensorboard" in lines
    assert "wandb sync run/wandb/offline-run-" in lines

    found = events(folder)
    (text,) = (one.tensor_proto.string_val[0].decode() for one in found.Tensors("end"))
    assert "the data are slow" in text
    contents = found.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    session = hparams.parse_session_start_info_plugin_data(contents)
    assert session.hparams["lr"].number_value == 0.001
    assert session.hparams["device"].string_value == "cpu"
    contents = found.SummaryMetadata(hparams.SESSION_END_INFO_TAG).plugin_data.content
    assert hparams.parse_session_end_info_plugin_data(contents).status == Status.STATUS_SUCCESS
    assert [path.name for path in (folder / "tensorboard").iterdir()] == ["a run"]


def test_wandb_knows_the_run(folder: Path) -> None:
    tracker = started(folder, Tracking(wandb=True), tags={**card().tags, "sweep.id": "the-sweep"})
    log(folder, (1, {"train/loss": 0.5}))
    tracker.tag("certificate", "comparable")
    tracker.finish("FAILED")
    records = list(wandb_records(folder))
    runs = [record.run for record in records if record.HasField("run")]
    first, last = runs[0], runs[-1]
    assert (first.project, first.display_name, first.run_group) == ("mine", "a run", "the-sweep")
    assert (first.job_type, first.notes) == ("training", "- Plan")
    assert set(last.tags) == {"cpu", "comparable"}
    config: dict[str, Any] = {}
    for record in records:
        config |= items(record.config.update) | items(record.run.config.update)
    assert (config["lr"], config["device"], config["certificate"]) == (0.001, "cpu", "comparable")
    assert "mlflow.user" not in config
    (end,) = (record.exit for record in records if record.HasField("exit"))
    assert end.exit_code == 1


def test_a_resumed_run_has_each_point_once(folder: Path) -> None:
    """After the process was killed, and after a worker was lost."""
    tracker = started(folder)
    log(folder, *((step, {"train/loss": 1 / step}) for step in range(1, 9)))
    tracker.finish("KILLED")
    assert has_each_point_once(folder)
    (events_before,) = folder.glob("tensorboard/*/*tfevents*")
    with events_before.open("ab") as file:
        file.write(b"half of an event")
    cut_metrics(folder, 4)
    tracker = build_tracker(BOTH, continued(card(), folder), folder, resumed=True)
    tracker.start()
    log(folder, *((step, {"train/loss": 2 / step}) for step in range(5, 9)))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # until it is read
        if (
            all(sender.opened.is_set() for sender in tracker._senders)
            and in_tensorboard(folder)[-1:] == single(logged(folder))[-1:]
        ):
            break
        time.sleep(0.05)
    cut_metrics(folder, 6)
    log(folder, *((step, {"train/loss": 3 / step}) for step in range(7, 11)))
    tracker.finish("FINISHED")
    assert [step for name, step, *_ in logged(folder) if name == "train/loss"] == list(range(1, 11))
    assert has_each_point_once(folder)


def test_a_failure_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other tracker gets everything, and `runner.track sync` completes the first."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_FINISH_TIMEOUT_S", 5.0)  # W&B, which does not fail, may need it on a busy machine
        write = Path.open

        def full(self: Path, mode: str = "r", *rest: Any, **others: Any) -> Any:
            if "tfevents" in self.name and "a" in mode:
                raise OSError(28, "No space left on device")
            return write(self, mode, *rest, **others)

        patch.setattr(Path, "open", full)
        tracker = started(folder)
        log(folder, (1, {"train/loss": 0.5}))
        tracker.finish("FINISHED")
    shown = capsys.readouterr().err
    assert f"runner.track sync {folder}" in shown
    assert "W&B" not in shown
    assert TrackingRecord.read(folder).undelivered == ["tensorboard"]
    assert in_wandb(folder) == logged(folder)
    assert cli.run_tool("track", ["sync", str(folder)]) == 0
    assert has_each_point_once(folder)
    assert not TrackingRecord.read(folder).undelivered
    assert cli.run_tool("track", ["sync", str(folder)]) == 2  # nothing is missing, and it was not logged to MLflow


def test_sync_of_a_run_that_was_killed(folder: Path) -> None:
    card(undelivered=["tensorboard", "wandb"]).write(folder)
    log(folder, (1, {"train/loss": 0.5}))
    assert cli.run_tool("track", ["sync", str(folder)]) == 0
    assert not list(folder.glob("tensorboard/*/*tfevents*"))
    assert cli.run_tool("track", ["sync", str(folder), "--killed"]) == 0
    assert has_each_point_once(folder)
    assert TrackingRecord.read(folder).status == "KILLED"


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    """A folder of its name, as W&B makes one, is no package."""
    (here / package).mkdir()
    monkeypatch.setattr(sys, "path", [str(here)])
    monkeypatch.delitem(sys.modules, package)
    assert not store._is_installed(package)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(store, "_is_installed", lambda name: name != package)
    assert run(f"tracking={package}", base=TRACKED) == 2
    shown = capsys.readouterr().err
    assert f"tracking={package}" in shown
    assert f"pip install -e '.[{package}]'" in shown
    assert not (here / "outputs").exists()


def test_a_run_with_all_trackers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They agree. Nothing is left behind in the process, nor written outside the run's folder, nor a secret inside."""
    monkeypatch.setenv("WANDB_API_KEY", "hunter2" * 6)
    monkeypatch.setattr(sys, "argv", ["runner", "password=hunter2"])
    hooks, streams = (sys.excepthook, sys.exit), (sys.stdout, sys.stderr)
    assert run("tracking=[mlflow,tensorboard,wandb]", base=TRACKED) == 0
    for number in (signal.SIGINT, signal.SIGTERM):
        assert getattr(signal.getsignal(number), "__module__", "") == "runner.launch.signals"
    assert ((sys.excepthook, sys.exit), (sys.stdout, sys.stderr)) == (hooks, streams)
    assert "WANDB_SERVICE" not in os.environ
    assert not [child for child in psutil.Process().children() if "wandb" in child.name()]
    folder = only_folder(here)
    assert has_each_point_once(folder)
    (stored,) = stored_runs(here)
    for name, value in read(folder, "summary.json")["eval"].items():
        assert stored.data.metrics[f"eval/{name}"] == value
        assert [point for point in logged(folder) if point[0] == f"eval/{name}"][-1][2] == value
    artifacts = [one.path for one in mlflow(here).list_artifacts(stored.info.run_id)]
    assert not [path for path in artifacts if "tfevents" in path or "wandb" in path]
    assert {path.name for path in here.iterdir()} == {"outputs"}
    assert not [path for path in Path(os.environ["HOME"]).rglob("*") if path.is_file()]
    for path in folder.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path
    assert run(f"resume={folder}", base=[]) == 2  # it has finished
