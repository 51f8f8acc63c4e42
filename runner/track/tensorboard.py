"""Writes a run as a file of TensorBoard's events, below `tensorboard/` in the run's folder."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from runner.folder.metrics_log import MetricsReader
from runner.track.card import TrackingRecord
from runner.track.description import NOTE_TAG
from runner.track.store import python_command


class TensorBoard:
    """One file of events. When a run is resumed, or goes back to a checkpoint, it is written anew from `metrics.jsonl`.

    So each point is there once. After a failure, such as a full disk, it is written anew, too.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Path | None = None
        self._reader = MetricsReader(folder)
        self._last_step = 0

    def begin(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder / "tensorboard")
        card, self._reader, self._last_step = TrackingRecord.read(self._folder), MetricsReader(self._folder), 0
        # TensorBoard shows folders as the names of runs, and reads the files in one in the order of their names.
        folder = self._folder / "tensorboard" / card.run_name.replace("/", "-")[:72]
        folder.mkdir(parents=True)
        self._file = folder / f"events.out.tfevents.{time.time_ns()}"
        started = card.started / 1000
        params = hparams_pb(card.typed_params(), trial_id=f"{card.run_name} · {card.key[:4]}", start_time_secs=started)
        text = f"# {card.run_name}\n\n{_text(card.tags)}"
        self._append(
            [
                Event(wall_time=started, file_version="brain.Event:2"),
                Event(wall_time=started, summary=params),
                Event(wall_time=started, summary=_text_summary("run", text)),
            ]
        )

    def send_metrics(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        new = self._reader.read()
        if self._file is None or self._reader.cut:
            self.begin()
            new = self._reader.read()
        self._append(
            Event(
                wall_time=metric.timestamp / 1000,
                step=metric.step,
                summary=Summary(value=[Summary.Value(tag=metric.key, simple_value=metric.value)]),
            )
            for metric in new
        )
        self._last_step = max([self._last_step, *(metric.step for metric in new)])

    def close(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.api_pb2 import Status
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        card = TrackingRecord.read(self._folder)
        ended = (card.ended or card.started) / 1000
        status = Status.STATUS_SUCCESS if card.status == "FINISHED" else Status.STATUS_FAILURE
        end = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=ended))
        value = Summary.Value(
            tag=metadata.SESSION_END_INFO_TAG,
            metadata=metadata.create_summary_metadata(end),
            tensor=metadata.NULL_TENSOR,
        )
        self._append(
            [
                Event(wall_time=ended, summary=Summary(value=[value])),
                Event(wall_time=ended, step=self._last_step, summary=_text_summary("end", _text(card.last_tags))),
            ]
        )

    def _append(self, events: Iterable[Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._file is not None
        buffer = io.BytesIO()
        records = RecordWriter(buffer)
        for event in events:
            records.write(event.SerializeToString())
        try:
            with self._file.open("ab", buffering=0) as file:
                file.write(buffer.getbuffer())
        except OSError:
            self._file = None
            raise

    def how_to_open(self) -> Sequence[str]:
        folder = shlex.quote(os.path.relpath(self._folder.parent))
        return [f"  TensorBoard: {python_command()} -m tensorboard.main --logdir {folder}"]


def _text(tags: Any) -> str:
    """The description among the tags, and a table of the others, in Markdown."""
    rows = [f"| {name} | {value} |" for name, value in tags.items() if not name.startswith("mlflow.")]
    return "\n".join([tags.get(NOTE_TAG, ""), "", "| tag | value |", "| --- | --- |", *rows])


def _text_summary(tag: str, markdown: str) -> Any:
    from tensorboard.plugins.text.summary_v2 import text_pb

    return text_pb(tag, markdown)
