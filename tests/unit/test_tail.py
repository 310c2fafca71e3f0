"""What is new in a job's files, whole events only, and how it reaches a driver with or without the same disk."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.node.shipping.replica import publish_private
from jupyter_torchdist.node.shipping.tail import Shipment
from jupyter_torchdist.protocol.errors import ChannelError
from jupyter_torchdist.protocol.eventreader import EventReader
from jupyter_torchdist.protocol.events import Event
from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.protocol.wire.channel import Channel
from jupyter_torchdist.protocol.wire.frames import CHUNK
from jupyter_torchdist.ranks.eventfile import EventFile


def line(kind: str) -> bytes:
    return Event(kind, 1.0).to_line()


# -- events


def test_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "x.events"
    tail = EventReader(path, None)
    assert tail.read() == []
    path.write_bytes(line("a") + line("b")[:-5])
    assert [event.kind for event in tail.read()] == ["a"]
    assert tail.read() == []
    path.write_bytes(line("a") + line("b") + b"damaged\n" + line("c"))
    assert [event.kind for event in tail.read()] == ["b", "c"]
    assert tail.offset == path.stat().st_size


def test_from_an_offset_on(tmp_path: Path) -> None:
    path = tmp_path / "x.events"
    path.write_bytes(line("old") + line("new"))
    assert [event.kind for event in EventReader(path, None, len(line("old"))).read()] == ["new"]


def test_a_file_that_went_away_or_shrank(tmp_path: Path) -> None:
    path = tmp_path / "x.events"
    path.write_bytes(line("a"))
    tail = EventReader(path, None)
    assert len(tail.read()) == 1
    path.write_bytes(b"")
    assert tail.read() == []
    path.unlink()
    assert tail.read() == []


def test_an_event_that_a_full_disk_refused_comes_with_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "x.events"
    events = EventFile(path, rank=3)
    disk = os.dup(events.fd)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, events.fd)
    for _ in range(5000):
        events.write("rank.dropped", lines=7)  # must neither raise nor fill the memory
    os.dup2(disk, events.fd)
    events.write("rank.done")
    found = EventReader(path, None).read()
    assert found[0].kind == "rank.dropped"
    assert {event.rank for event in found} == {3}
    assert path.stat().st_size < 100_000
    events.write("rank.done")
    assert EventReader(path, None).read()[-1].kind == "rank.done"
    events.close()
    os.close(disk)
    os.close(full)


# -- shipments


class Driver:
    """The far end of a shipment: keeps what it is told and sent."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.agent, self.channel = (Channel(fd, fd) for fd in (ours.detach(), theirs.detach()))
        self.sizes: dict[str, int] = {}
        self.files: dict[str, bytes] = {}
        self.order: list[str] = []

    def take(self) -> None:
        for header, body in self.channel.receive():
            name = header["file"]
            assert header["job"] == "j"
            self.order.append(name)
            if header["type"] == "whole":
                self.files[name] = body
            elif header["type"] == "grown":
                self.sizes[name] = header["size"]
            else:
                assert header["offset"] == len(self.files.get(name, b""))
                self.files[name] = self.files.get(name, b"") + body

    def close(self) -> None:
        self.agent.close()
        self.channel.close()


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    paths = JobPaths(tmp_path / "j")
    for folder in (paths.node("node0").root, paths.node("node1").root, paths.results):
        folder.mkdir(parents=True)
    return paths


def test_on_the_same_disk_only_the_growth_of_events_is_told(paths: JobPaths, driver: Driver) -> None:
    shipment = Shipment(driver.agent, paths, "node0", shared=True)
    node = paths.node("node0")
    assert shipment.pump()
    node.rank_events(0).write_bytes(line("a"))
    node.out(0).write_bytes(b"output")
    paths.node("node1").rank_events(1).write_bytes(line("b"))
    assert shipment.pump()
    assert shipment.pump()
    driver.take()
    assert driver.sizes == {"nodes/node0/rank-00000.events": len(line("a"))}
    assert driver.order == ["nodes/node0/rank-00000.events"]  # once


def test_a_driver_without_the_disk_gets_every_byte_once(paths: JobPaths, driver: Driver) -> None:
    shipment = Shipment(driver.agent, paths, "node0", shared=False)
    node = paths.node("node0")
    large = os.urandom(CHUNK + 123_456)
    node.out(0).write_bytes(large)
    node.rank_events(0).write_bytes(line("a"))
    (node.root / ".status.tmp").write_bytes(b"aside")
    (paths.results / "rank-00000.pkl.tmp").write_bytes(b"aside")
    paths.result(0).write_bytes(b"pickle")
    paths.result_buffer(0, 0).write_bytes(b"buffer")
    while not shipment.pump():
        driver.agent.flush()
        driver.take()
    driver.take()
    assert driver.files == {
        "nodes/node0/rank-00000.out": large,
        "nodes/node0/rank-00000.events": line("a"),
        "results/rank-00000.pkl": b"pickle",
        "results/rank-00000.buf-00000": b"buffer",
    }
    # A result names its buffers, so they come first.
    assert driver.order.index("results/rank-00000.buf-00000") < driver.order.index("results/rank-00000.pkl")


def test_it_goes_on_from_what_the_driver_has(paths: JobPaths, driver: Driver) -> None:
    name = "nodes/node0/rank-00000.out"
    paths.node("node0").out(0).write_bytes(b"0123456789")
    driver.files[name] = b"0123"
    shipment = Shipment(driver.agent, paths, "node0", shared=False, offsets={name: 4})
    assert shipment.pump()
    driver.take()
    assert driver.files[name] == b"0123456789"


def test_a_driver_that_has_more_is_sent_nothing(paths: JobPaths, driver: Driver) -> None:
    name = "nodes/node0/rank-00000.out"
    paths.node("node0").out(0).write_bytes(b"0123")
    assert Shipment(driver.agent, paths, "node0", shared=False, offsets={name: 9}).pump()
    assert driver.order == []


def test_a_slow_driver_bounds_what_is_read(paths: JobPaths, driver: Driver) -> None:
    """1 GB printed must not become 1 GB of the agent's memory."""
    with open(paths.node("node0").out(0), "wb") as file:
        file.truncate(1024**3)
    shipment = Shipment(driver.agent, paths, "node0", shared=False)
    for _ in range(5):
        assert not shipment.pump()
    assert driver.agent.pending < 4 * CHUNK


def test_the_first_frames_are_small(paths: JobPaths, driver: Driver) -> None:
    """On a connection that breaks every few kilobytes each life brings something."""
    paths.node("node0").out(0).write_bytes(bytes(100_000))
    Shipment(driver.agent, paths, "node0", shared=False).pump()
    sizes = [len(body) for _, body in driver.channel.receive()]
    assert sizes[:3] == [4096, 8192, 16384]
    assert sum(sizes) == 100_000


def test_a_driver_that_is_gone(paths: JobPaths, driver: Driver) -> None:
    paths.node("node0").out(0).write_bytes(b"x")
    driver.channel.close()
    with pytest.raises(ChannelError):
        Shipment(driver.agent, paths, "node0", shared=False).pump()


def test_a_job_whose_directory_is_gone(tmp_path: Path, driver: Driver) -> None:
    assert Shipment(driver.agent, JobPaths(tmp_path / "none"), "node0", shared=False).pump()


def test_files_that_come_and_go_are_seen_at_every_look(paths: JobPaths, driver: Driver) -> None:
    """The directory is listed anew only when it changed; nothing may hide in the coarseness of its time."""
    shipment = Shipment(driver.agent, paths, "node0", shared=False)
    node = paths.node("node0")
    os.utime(node.root, (1, 1))
    assert shipment.pump()
    for rank in range(30):
        node.out(rank).write_bytes(b"x")
        assert shipment.pump()
        driver.take()
        assert len(driver.files) == rank + 1
    node.out(3).unlink()
    node.out(4).write_bytes(b"xy")
    assert shipment.pump()
    driver.take()
    assert driver.files["nodes/node0/rank-00004.out"] == b"xy"


def test_the_gauges_are_replaced_not_appended_to(paths: JobPaths, driver: Driver) -> None:
    shipment = Shipment(driver.agent, paths, "node0", shared=False)
    path, name = paths.node("node0").gauges, "nodes/node0/gauges.json"
    for data in (b'{"0": {"cpu": 100}}', b'{"0": {"cpu": 99}}', b'{"0": {"cpu": 98}}'):
        publish_private(path, data)
        assert shipment.pump()
        driver.take()
        assert driver.files == {name: data}
        assert shipment.pump()
    driver.take()
    assert driver.order == [name] * 3  # once each
    path.unlink()
    assert shipment.pump()


def test_a_flood_of_lines_holds_up_no_gauges(paths: JobPaths, driver: Driver) -> None:
    with open(paths.node("node0").out(0), "wb") as file:
        file.truncate(3 * CHUNK)
    shipment = Shipment(driver.agent, paths, "node0", shared=False)
    for data in (b"old", b"new"):
        publish_private(paths.node("node0").gauges, data)
        assert not shipment.pump()
    while not shipment.pump():
        driver.agent.flush()
        driver.take()
    driver.take()
    assert driver.order[0] == "nodes/node0/gauges.json"
    assert driver.files["nodes/node0/gauges.json"] == b"new"
    assert len(driver.files["nodes/node0/rank-00000.out"]) == 3 * CHUNK


def test_on_the_same_disk_the_gauges_are_there_already(paths: JobPaths, driver: Driver) -> None:
    publish_private(paths.node("node0").gauges, b"{}")
    assert Shipment(driver.agent, paths, "node0", shared=True).pump()
    driver.take()
    assert driver.order == []
