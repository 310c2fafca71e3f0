"""Runs as event files of TensorBoard: one directory for each job."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .base import FINISHED, Opened, Point, Run, needs

DIRECTORY = "TENSORBOARD_LOGGING_DIR"
"""The variable with the directory of all runs; without it ``runs``, as of ``SummaryWriter``."""


class TensorboardTracker:
    """Written with TensorBoard's own records: torch is not imported."""

    def __init__(self) -> None:
        self._directory = Path()
        self._file: Any = None
        self._records: Any = None
        self._tags: dict[str, str] = {}

    def check(self, environ: Mapping[str, str]) -> None:
        needs("tensorboard", "tensorboard")

    def open(self, run: Run, place: str) -> Opened:
        from tensorboard.plugins.hparams import summary_v2 as hparams
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = re.sub(r"[^\w.-]+", "_", run.name)
        named = run.job if run.name == run.job else f"{name}-{run.job}"
        self._directory = Path(place or Path(os.environ.get(DIRECTORY) or "runs").expanduser().absolute() / named)
        fresh = not self._directory.is_dir()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = path.open("xb")
        self._records = RecordWriter(self._file)
        self._write([{"wall_time": run.started, "file_version": "brain.Event:2"}])
        self._tags = dict(run.tags)
        self._write([{"wall_time": run.started, "summary": hparams.hparams_pb(run.params, run.job, run.started)}])
        self._text("tags", self._tags)
        return Opened(str(self._directory), str(self._directory), fresh)

    def log(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(
            [
                {
                    "wall_time": one.t,
                    "step": one.step,
                    "summary": Summary(value=[Summary.Value(tag=one.name, simple_value=one.value)]),
                }
                for one in points
            ]
        )

    def tag(self, tags: Mapping[str, str]) -> None:
        self._tags |= tags
        self._text("tags", self._tags)

    def file(self, path: Path, name: str) -> None:
        target = self._directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)

    def close(self, state: str, ended: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.STATUS_SUCCESS if state == FINISHED else api_pb2.STATUS_FAILURE
        end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ended)
        about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
        value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR)
        self._write([{"wall_time": ended, "summary": Summary(value=[value])}])
        self._file.close()

    def _text(self, tag: str, table: Mapping[str, str]) -> None:
        """A table under the tab *Text*."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.plugins.text import metadata

        rows = "".join(f"|{name}|{value}|\n" for name, value in sorted(table.items()))
        tensor = TensorProto(dtype="DT_STRING", tensor_shape=TensorShapeProto())
        tensor.string_val.append(f"|name|value|\n|-|-|\n{rows}".encode())
        about = metadata.create_summary_metadata(tag, "")
        value = Summary.Value(tag=tag, metadata=about, tensor=tensor)
        self._write([{"wall_time": time.time(), "summary": Summary(value=[value])}])

    def _write(self, events: list[dict[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        for event in events:
            self._records.write(Event(**event).SerializeToString())
        self._file.flush()
