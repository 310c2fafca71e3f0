"""When output was written: the writer beside a rank's streams, and the reader that searches its file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.protocol import times as form
from jupyter_torchdist.protocol.times import RECORD
from jupyter_torchdist.ranks.streams import times as writer
from jupyter_torchdist.ranks.streams.times import Times
from jupyter_torchdist.store.times import LAG, TimeIndex

FEW = settings(max_examples=50, deadline=None)
ERR = 1 << 63


def write(path: Path, records: list[tuple[float, str, int]]) -> TimeIndex:
    path.write_bytes(b"".join(RECORD.pack(t, size | (ERR if stream == "err" else 0)) for t, stream, size in records))
    return TimeIndex(path)


def test_the_form_of_files_that_are_there_already() -> None:
    assert (form.RECORD.format, form.ERR) == ("<dQ", ERR)


def test_a_missing_file_knows_nothing(tmp_path: Path) -> None:
    index = TimeIndex(tmp_path / "none")
    assert index.written("out", 5) is None
    assert index.offset("out", 1e12) == 0
    assert index.marks("err", 0, 10) == []
    assert not index.known()


def test_between_two_records_time_is_linear(tmp_path: Path) -> None:
    index = write(tmp_path / "times", [(10.0, "out", 100), (10.1, "err", 7), (10.1, "out", 200)])
    assert index.written("out", 100) == 10.0
    assert index.written("out", 150) == pytest.approx(10.05)
    assert index.written("out", 200) == pytest.approx(10.1)
    assert index.written("out", 201) is None
    assert index.written("err", 7) == pytest.approx(10.1)


def test_times_of_a_node_whose_clock_is_ahead_are_on_the_drivers_clock(tmp_path: Path) -> None:
    write(tmp_path / "times", [(1010.0, "out", 100), (1010.1, "out", 200)])
    clock = tmp_path / "clock"
    index = TimeIndex(tmp_path / "times", clock)
    assert index.written("out", 100) == 1010.0
    clock.write_text('{"ahead": 1000.0}')
    assert index.written("out", 100) == 10.0
    assert index.offset("out", 10.05) == 100
    assert [mark.t for mark in index.marks("out", 0, 200)] == pytest.approx([10.0, 10.1])
    for damaged in ("", "[]", '{"ahead": "x"}', '{"ahead": NaN}', "{}"):
        clock.write_text(damaged)
        assert index.written("out", 100) == 1010.0


def test_what_came_after_a_silence_is_not_spread_over_it(tmp_path: Path) -> None:
    index = write(tmp_path / "times", [(10.0, "out", 100), (500.0, "out", 200)])
    found = index.written("out", 101)
    assert found is not None
    assert 500.0 - LAG <= found <= 500.0


def test_the_offset_of_a_time(tmp_path: Path) -> None:
    index = write(tmp_path / "times", [(1.0, "out", 10), (2.0, "err", 5), (3.0, "out", 30)])
    assert [index.offset("out", t) for t in (0.5, 1.0, 2.5, 3.0, 99.0)] == [0, 10, 10, 30, 30]
    assert index.offset("err", 99.0) == 5


def test_half_a_record_at_the_end_is_passed_over(tmp_path: Path) -> None:
    index = write(tmp_path / "times", [(1.0, "out", 10)])
    with open(tmp_path / "times", "ab") as file:
        file.write(b"\0" * 9)
    assert index.written("out", 10) == 1.0
    assert index.written("out", 11) is None


@FEW
@given(st.lists(st.tuples(st.sampled_from(["out", "err"]), st.integers(0, 50)), min_size=1, max_size=60))
def test_bisection_finds_what_a_scan_finds(
    tmp_path_factory: pytest.TempPathFactory, grown: list[tuple[str, int]]
) -> None:
    sizes, records = {"out": 0, "err": 0}, []
    for number, (stream, more) in enumerate(grown):
        sizes[stream] += more
        records.append((float(number), stream, sizes[stream]))
    index = write(tmp_path_factory.mktemp("times") / "times", records)
    for stream, size in sizes.items():
        for offset in range(1, size + 1, 7):
            after = next(t for t, name, at in records if name == stream and at >= offset)
            found = index.written(stream, offset)
            assert found is not None
            assert after - LAG <= found <= after
            marks = index.marks(stream, offset - 1, size)
            assert marks[0].t == after
            assert marks[-1].size == size
    for t in range(len(records)):
        assert index.offset("out", t + 0.5) == max(
            (at for when, name, at in records if name == "out" and when <= t), default=0
        )


def make(tmp_path: Path) -> tuple[Times, Path, Path]:
    out, err = tmp_path / "out", tmp_path / "err"
    out.touch()
    err.touch()
    return Times(tmp_path / "times", out, err), out, err


def test_the_writer_records_what_grew_and_no_faster_than_its_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PERIOD", 3600.0)
    times, out, err = make(tmp_path)
    begun = time.time()
    out.write_text("a\n")
    times.written()
    assert times.deadline is not None
    times.flush()
    out.write_text("a\nb\n")
    err.write_text("e\n")
    times.written()
    for _ in range(100):
        times.flush()
    assert (tmp_path / "times").stat().st_size == RECORD.size
    times.close()
    times.close()
    index = TimeIndex(tmp_path / "times")
    for stream, size in (("out", 4), ("err", 2)):
        found = index.written(stream, size)
        assert found is not None
        assert begun - 1 <= found <= time.time()
    assert (tmp_path / "times").stat().st_size == 3 * RECORD.size


def test_a_quiet_stream_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PERIOD", 0.0)
    times, out, err = make(tmp_path)
    err.write_text("once\n")
    with open(out, "a") as file:
        for _ in range(500):
            file.write("x")
            file.flush()
            times.flush()
    times.close()
    index = TimeIndex(tmp_path / "times")
    assert index.written("err", 5) is not None
    assert index.written("err", 6) is None
    assert index.written("out", 500) is not None


def test_a_place_that_cannot_be_written_costs_the_times_alone(tmp_path: Path) -> None:
    times = Times(tmp_path / "missing" / "times", tmp_path / "out", tmp_path / "err")
    times.written()
    times.flush()
    times.close()


def test_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from pathlib import Path
from jupyter_torchdist.ranks.streams import times
from jupyter_torchdist.ranks.streams import times as writer
from jupyter_torchdist.ranks.streams.times import Times
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
times.PERIOD = 0.0
folder = Path(sys.argv[1])
(folder / "out").write_text(""); (folder / "err").write_text("")
index = Times(folder / "times", folder / "out", folder / "err")
with open(folder / "out", "a") as file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
    for _ in range(20):
        file.write("x"); file.flush()
        index.flush()
index.close()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert (tmp_path / "times").stat().st_size == 2 * RECORD.size
    assert TimeIndex(tmp_path / "times").offset("out", 1e12) == 2


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    times, out, _ = make(tmp_path)
    pid = os.fork()
    if pid == 0:
        try:
            out.write_text("from the child\n")
            times.flush()
            times.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "times").stat().st_size == 0
    times.close()
    assert (tmp_path / "times").stat().st_size == RECORD.size


def test_streams_of_a_rank_are_recorded(tmp_path: Path) -> None:
    program = """
import os, sys, time
from pathlib import Path
from jupyter_torchdist.ranks.streams.flusher import Flusher
from jupyter_torchdist.ranks.streams.output import Output
from jupyter_torchdist.ranks.streams import times as writer
from jupyter_torchdist.ranks.streams.times import Times
folder = Path(sys.argv[1])
flusher = Flusher()
times = Times(folder / "times", folder / "out", folder / "err")
output = Output(folder / "out", folder / "err", flusher, lambda lines: None, times.written)
flusher.add(times)
flusher.start()
print("first")
time.sleep(0.5)
os.write(2, b"from C\\n")
time.sleep(0.5)
for i in range(1000): print("flood", i)
print("last")
flusher.stop(); output.close(); times.close()
"""
    begun = time.time()
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    index = TimeIndex(tmp_path / "times")
    first, last = index.written("out", 6), index.written("out", (tmp_path / "out").stat().st_size)
    from_c = index.written("err", 7)
    assert first is not None
    assert last is not None
    assert from_c is not None
    assert begun <= first < from_c < last <= time.time()
    assert last - first > 0.9


@FEW
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.data())
def test_who_reads_along_hears_the_same_as_who_asks_once(steps: list[int], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "times"
        records, sizes = list[tuple[float, str, int]](), {"out": 0, "err": 0}
        for number, step in enumerate(steps):
            stream = data.draw(st.sampled_from(["out", "err"]))
            sizes[stream] += step
            records.append((float(number), stream, sizes[stream]))
        along = write(path, records)
        for _ in range(10):
            stream, start = data.draw(st.sampled_from(["out", "err"])), data.draw(st.integers(0, 900))
            once = TimeIndex(path)
            assert along.marks(stream, start, start + 50) == once.marks(stream, start, start + 50)
            assert along.written(stream, start + 1) == TimeIndex(path).written(stream, start + 1)
