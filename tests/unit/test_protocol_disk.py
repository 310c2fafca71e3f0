"""What user code can put in the place of a job's files: no reader hangs, and none gives a secret away."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.feed.feed import Feed
from jupyter_torchdist.protocol import disk
from jupyter_torchdist.protocol.disk import open_plain, read_plain
from jupyter_torchdist.protocol.errors import TorchDistError
from jupyter_torchdist.protocol.eventreader import LONGEST, PORTION, EventReader, reader_of
from jupyter_torchdist.protocol.events import AGENT, LAUNCHER, RANK, Event, Source
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.server import glance, jobs
from jupyter_torchdist.server.base import Refusal
from jupyter_torchdist.store import catalog, gauges, jobdir, journal, liveness, logs, metrics
from jupyter_torchdist.testing import FakeJob

SECRET = "root:x:0:0"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    secret = path.parent / ".secret"
    secret.write_text(f"{SECRET}\n")
    path.symlink_to(secret)


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS: list[Callable[[Path], None]] = [pipe, link, folder, device]


def a_job(home: Home) -> FakeJob:
    job = FakeJob(home).running()
    job.rank(0).prints("a line\n").prints("an error\n", "err").records(
        {"t": 1.0, "k": "log", "step": 1, "v": {"loss": 0.5}}
    )
    job.ended()
    gauges_file = job.paths.node("node0").gauges
    gauges_file.write_text("{}")
    return job


def everything(job: FakeJob, home: Home) -> list[Any]:
    """What each reader of a job's files says."""
    paths, said = job.paths, []

    def hear(function: Callable[[], Any]) -> None:
        with contextlib.suppress(TorchDistError, Refusal):
            said.append(function())

    def feed() -> list[Any]:
        view = Feed(paths, home)
        found = view.receive({"type": "open", "logs": {}})
        for number in range(4):
            found += view.poll(float(number))
            found += view.receive({"type": "ask", "id": number, "what": "search", "pattern": "o", "limit": 9})
        return found

    def log() -> bytes:
        with jobs.open_log(paths, "0.out") as file:
            return file.read(100)

    for function in (
        lambda: journal.state(paths),
        lambda: jobdir.read_spec(paths),
        lambda: jobdir.read_plan(paths),
        lambda: jobdir.read_manifest(paths),
        lambda: liveness.effective_state(paths),
        lambda: jobdir.taken_requests(paths),
        lambda: catalog.jobs(home),
        lambda: gauges.read(paths),
        lambda: metrics.columns(paths),
        lambda: [(file, list(logs.lines(file.path)), logs.tail(file.path, 3)) for file in logs.files(paths)],
        lambda: jobs.details(paths),
        lambda: glance.Glance(paths).look(),
        feed,
        log,
    ):
        hear(function)
    return said


NAMES = (
    "spec.json",
    "plan.json",
    "manifest.json",
    "journal.jsonl",
    "summary.json",
    "driver.json",
    "nodes/node0/gauges.json",
    "nodes/node0/rank-00000.out",
    "nodes/node0/rank-00000.err",
    "nodes/node0/rank-00000.times",
    "nodes/node0/rank-00000.metrics",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_no_reader_of_a_job_hangs_or_follows_a_link(tmp_path: Path, name: str, kind: Callable[[Path], None]) -> None:
    home = Home(tmp_path / "home")
    job = a_job(home)
    path = job.paths.root / name
    path.unlink(missing_ok=True)
    kind(path)
    said: list[Any] = []
    failed: list[BaseException] = []

    def read() -> None:
        try:
            said.extend(everything(job, home))
        except BaseException as error:  # told in the test's own thread
            failed.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "a reader hangs"
    assert not failed, failed
    assert SECRET not in repr(said)


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    assert read_plain(tmp_path / "file") == b"data"
    for kind in KINDS:
        path = tmp_path / kind.__name__
        kind(path)
        with pytest.raises(OSError):  # whichever the system has for it
            open_plain(path)


def test_a_reader_of_events_survives_any_file(tmp_path: Path) -> None:
    for kind in KINDS:
        path = tmp_path / f"{kind.__name__}.events"
        kind(path)
        assert EventReader(path, None).read() == []


def test_an_endless_line_is_passed_over_in_parts(tmp_path: Path) -> None:
    path, good = tmp_path / "rank.events", Event("rank.ready", 1.0, rank=0).to_line()
    path.write_bytes(good)
    reader = EventReader(path, Source(RANK, frozenset([0])))
    assert [event.kind for event in reader.read()] == ["rank.ready"]
    with open(path, "ab") as file:
        file.truncate(len(good) + 2 * LONGEST + 5)
    assert reader.read() == []
    with open(path, "ab") as file:
        file.write(b"\n" + good)
    assert [event.kind for event in reader.read()] == ["rank.ready"]
    assert reader.refused > 0
    assert reader.offset == path.stat().st_size


def test_a_flood_of_events_comes_in_portions(tmp_path: Path) -> None:
    path, good = tmp_path / "rank.events", Event("rank.ready", 1.0, rank=0).to_line()
    count = 4 * PORTION // len(good)
    path.write_bytes(good * count)
    reader, portions = EventReader(path, None), []
    while events := reader.read():
        portions.append(len(events))
    assert sum(portions) == count
    assert max(portions) <= PORTION // len(good) + 1


def test_the_limit_that_was_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "not" / "there"))
    assert disk.in_words(full) == str(full)
    real = os.statvfs(tmp_path)
    values = [*real[:7], 0, *real[8:]]  # f_favail
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(values))
    if real.f_files:
        assert disk.in_words(full).endswith("the file system has no free inodes, it holds too many files")
    other = OSError(errno.EACCES, "Permission denied", "x")
    assert disk.in_words(other) == str(other)


def test_each_file_of_a_node_has_one_owner() -> None:
    with FakeJob() as job:
        files = job.paths.node("node0")
        owner = {name: found.source for name in NAMES_OF_EVENTS if (found := reader_of(files, (0, 3), name))}
        assert owner == {
            "agent.events": Source(AGENT, frozenset([0, 3])),
            "launcher.events": Source(LAUNCHER),
            "rank-00003.events": Source(RANK, frozenset([3])),
        }


NAMES_OF_EVENTS = (
    *("agent.events", "launcher.events", "rank-00003.events"),
    *("rank-00001.events", "rank-000003.events", "rank-3.events", "stranger.events", "rank-00003.out", ""),
)
"""Of the first three somebody of ours is the owner, where a node has the ranks 0 and 3."""
