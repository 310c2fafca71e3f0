"""Shares of a step, rows of the timeline, requests that a rank refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jupyter_torchdist.protocol.events import Profiled, ProfileRequest
from jupyter_torchdist.protocol.paths import NodePaths
from jupyter_torchdist.ranks.eventfile import EventFile
from jupyter_torchdist.ranks.profiling import profiler, timeline
from jupyter_torchdist.ranks.profiling.shares import shares, union, without
from jupyter_torchdist.ranks.streams.metrics import Recorder
from jupyter_torchdist.views.profile_text import milliseconds


def event(name: str, category: str, begin: float, end: float, tid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "pid": 1, "tid": tid}


def test_spans() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert without([(0, 10), (20, 30)], [(2, 3), (8, 22), (29, 40)]) == [(0, 2), (3, 8), (22, 29)]
    assert without([], [(0, 1)]) == [] and without([(0, 1)], []) == [(0, 1)]


def test_a_step_on_the_processor() -> None:
    events = [
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", 0, 10),
        event("aten::select", "cpu_op", 2, 4),  # of the loader
        event("aten::mm", "cpu_op", 10, 40),
        event("c10d::allreduce_", "cpu_op", 38, 40),
        event("gloo:all_reduce", "user_annotation", 35, 70, tid=8),
        event("aten::mm", "cpu_op", 60, 65),
        event("aten::mm", "cpu_op", 95, 300),
        {"ph": "M", "name": "thread_name", "ts": 0},
    ]
    found = shares(events, (0, 100), 7)
    assert found == {"compute": 38, "communication": 35, "overlap": 8, "loading": 10, "idle": 25}


def test_a_step_on_a_gpu_is_what_the_gpu_does() -> None:
    events = [
        event("aten::mm", "cpu_op", 0, 90),
        event("ampere_sgemm", "kernel", 10, 50, tid=20),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 40, 70, tid=24),
        event("Memcpy HtoD", "gpu_memcpy", 0, 5, tid=20),
    ]
    found = shares(events, (0, 100), 7)
    assert found == {"compute": 45, "communication": 30, "overlap": 10, "loading": 0, "idle": 35}


def test_collectives_that_overlap_have_rows_of_their_own(tmp_path: Path) -> None:
    pairs = [(0, 10), (5, 12), (11, 20), (12.5, 13)]
    events = [event("gloo:all_reduce", "user_annotation", *pair) for pair in pairs]
    flow = {"ph": "s", "name": "fwdbwd", "cat": "fwdbwd", "id": 900, "ts": 1, "pid": 1, "tid": 7}
    path = tmp_path / "rank"
    size = timeline.write(
        path, [*events, flow, {"ph": "i", "name": "Record Window End", "ts": 3}], [0.0, 20.0], "td.log()"
    )
    assert size == path.stat().st_size
    lines = [line.split("\t", 1) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    read = [{"ts": float(ts), **json.loads("{" + rest)} for ts, rest in lines]
    rows = {one["ts"]: one["tid"] - timeline.COLLECTIVES for one in read if one["name"] == "gloo:all_reduce"}
    assert rows == {0: 0, 5: 1, 11: 0, 12.5: 1}
    assert [one["id"] for one in read if one["ph"] == "s"] == [1] and not [one for one in read if one["ph"] == "i"]
    assert [(one["ts"], one["dur"], one["args"]["end"]) for one in read if one.get("cat") == "step"] == [
        (0, 20, "td.log()")
    ]


def test_times_are_exact(tmp_path: Path) -> None:
    now = 1795867861915108935
    trace = {"baseTimeNanoseconds": now - 1_234_567_125, "traceEvents": [{"ph": "X", "ts": 1_234_567.125}, {"ts": "x"}]}
    (tmp_path / "trace").write_text(json.dumps(trace))
    [one] = timeline.read(tmp_path / "trace", now // 1000)
    assert one["ts"] == pytest.approx(0.935, abs=1e-6)


@pytest.fixture
def rank(tmp_path: Path) -> tuple[profiler.Profiling, Path]:
    files = NodePaths(tmp_path)
    recorder = Recorder(files.metrics(0))
    return profiler.Profiling(files, 0, EventFile(files.rank_events(0), 0).write, recorder), files.rank_events(0)


def told(path: Path) -> list[Profiled]:
    return [Profiled.from_json(json.loads(line)["profile"]) for line in path.read_text().splitlines()]


def test_a_build_without_a_profiler(rank: tuple[profiler.Profiling, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "kineto_available", lambda: False)
    rank[0].ask(ProfileRequest("a", 1, 10))
    assert [one.problem for one in told(rank[1])] == [profiler.NONE]


def test_the_code_ends_or_fails_meanwhile(rank: tuple[profiler.Profiling, Path]) -> None:
    with rank[0].during(0):
        rank[0].ask(ProfileRequest("a", 1, profiler.FOREVER))
    rank[0].ask(ProfileRequest("b", 1, 10))
    with pytest.raises(ValueError, match="no"), rank[0].during(3):
        raise ValueError("no")
    words = ["its code ended before its first step had ended", profiler.ENDED, profiler.ENDED]
    assert [one.problem for one in told(rank[1])] == words


def test_milliseconds() -> None:
    assert [milliseconds(value) for value in (0.0000421, 0.0123, 1.2344)] == ["0.0421 ms", "12.3 ms", "1234 ms"]
