"""When a driver wakes up for a node: never for bytes that nobody takes."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.driver.links import Link
from jupyter_torchdist.launchers.booted import ProcessChannel
from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.protocol.plan import Reach
from jupyter_torchdist.protocol.wire.channel import Channel
from jupyter_torchdist.testing import FakeSubmission, a_plan, a_spec


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    plan = a_plan(a_spec())
    link = Link(FakeSubmission(tmp_path, "one"), plan, plan.nodes[0], JobPaths(tmp_path / "j"), 1, started=False)
    yield link
    if link.channel is not None:
        link.channel.close()


class Silent(ProcessChannel):
    def way(self, command: str) -> list[str]:
        return ["sleep", "600"]


def test_bytes_for_a_host_that_does_not_answer_wake_nobody(link: Link) -> None:
    """Offline, ssh waits ten seconds for a host, and the pipe to it takes bytes all the time."""
    link.channel = Silent("host", Reach())
    assert isinstance(link.channel, Silent)
    process: subprocess.Popen[bytes] = link.channel.process
    link.send({"type": "ping", "t": 1.0})
    assert link.channel.pending
    assert not link.writing
    link.channel.close()
    assert process.poll() is not None


def test_bytes_that_the_node_takes_later_are_waited_for(link: Link) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        fd = ours.detach()
        link.channel = Channel(fd, fd)
        link.send({"type": "ping", "t": 1.0})
        assert not link.writing
        link.send({"type": "blob"}, bytes(10_000_000))
        assert link.writing


@pytest.mark.parametrize("given_up", [False, True])
def test_a_node_whose_part_has_ended_is_still_asked_whether_it_is_there(link: Link, given_up: bool) -> None:
    """While it answers, another node that is silent is gone, and not this machine offline."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        fd = ours.detach()
        link.channel, link.ended, link.given_up = Channel(fd, fd), True, given_up
        link.keep(5.0)
        if given_up:
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
        else:
            assert b'"ping"' in theirs.recv(1000)
        assert link.news(100.0) == "", "it is nobody's loss"
