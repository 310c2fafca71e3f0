"""Nodes that hear each other over sockets of this machine: who is missed, and what is dropped. The clock is ours."""

from __future__ import annotations

import hmac
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from jupyter_torchdist.node.unattended import neighbours
from jupyter_torchdist.node.unattended.neighbours import PATIENCE_SECONDS, Neighbours
from jupyter_torchdist.protocol.errors import ChannelError
from jupyter_torchdist.protocol.wire.beats import LONGEST, Beat, Part, opened, sealed

NAMES = ("node0", "node1", "node2")
BEAT = Beat("job", 1, "node1", 10**18, "runs", False)
"""Its number is larger than those of a clock."""


class Nodes:
    """Three nodes of a job. ``now`` goes on by ``go``; a node in ``dead`` does nothing, a driver is on ``attended``."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.steward = Neighbours.of_steward("job", 1, address, "node0", NAMES[1:])
        place = self.steward.place
        self.all = {"node0": self.steward} | {name: Neighbours.of_another(place, name, "node0") for name in NAMES[1:]}
        self.now = time.monotonic()
        self.dead: set[str] = set()
        self.attended: set[str] = set()
        self.parts: dict[str, Part] = dict.fromkeys(NAMES, "runs")
        self.said: dict[str, tuple[str, ...] | None] = dict.fromkeys(NAMES)

    def go(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for name, node in self.all.items():
                if name not in self.dead:
                    said = node.turn(self.now, self.parts[name], name in self.attended)
                    self.said[name] = said if self.said[name] is None else self.said[name]

    def nobody_ends(self) -> bool:
        return set(self.said.values()) == {None}

    def close(self) -> None:
        for node in self.all.values():
            node.close()

    def throw(self, data: bytes) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(data, ("127.0.0.1", self.steward.place.port))


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    nodes.go(3.0)
    yield nodes
    nodes.close()


def test_nodes_that_are_all_there_miss_nobody(nodes: Nodes) -> None:
    nodes.go(10 * PATIENCE_SECONDS)
    assert nodes.nobody_ends()


def test_a_node_that_is_silent_is_missed_by_all(nodes: Nodes) -> None:
    nodes.dead = {"node2"}
    nodes.go(PATIENCE_SECONDS - 2)
    assert nodes.nobody_ends()
    nodes.go(4)
    assert nodes.said == {"node0": ("node2",), "node1": ("node2",), "node2": None}


def test_without_the_steward_the_others_end_by_themselves(nodes: Nodes) -> None:
    nodes.dead = {"node0"}
    nodes.go(PATIENCE_SECONDS + 2)
    assert nodes.said == {"node0": None, "node1": ("node0",), "node2": ("node0",)}


def test_the_second_node_is_known_to_the_others_as_soon_as_the_steward_has_heard_it() -> None:
    nodes = Nodes()
    try:
        nodes.go(1.0)
        nodes.dead = {"node0"}
        nodes.go(PATIENCE_SECONDS + 2)
        for name in NAMES[1:]:
            nodes.all[name].succeed(list(NAMES[1:]), nodes.now)
        nodes.parts = dict.fromkeys(NAMES, "short")
        nodes.go(3.0)
        assert nodes.all["node1"].gathered(NAMES[1:], nodes.now)
    finally:
        nodes.close()


def test_silence_that_ends_in_time_changes_nothing(nodes: Nodes) -> None:
    for _ in range(5):
        nodes.dead = {"node2"}
        nodes.go(PATIENCE_SECONDS - 2)
        nodes.dead = set()
        nodes.go(2)
    assert nodes.nobody_ends()


@pytest.mark.parametrize("where", ["node0", "node1"])
def test_while_a_driver_is_connected_to_any_node_nobody_is_missed(nodes: Nodes, where: str) -> None:
    nodes.attended = {where}
    nodes.go(2)
    nodes.dead = {"node2"}
    nodes.go(3 * PATIENCE_SECONDS)
    assert nodes.nobody_ends()
    nodes.attended = set()
    nodes.go(PATIENCE_SECONDS - 2)
    assert nodes.nobody_ends(), "the driver may come back"
    nodes.go(8)
    assert nodes.said["node0"] == nodes.said["node1"] == ("node2",)


def test_a_node_that_was_never_heard_is_not_missed() -> None:
    nodes = Nodes()
    nodes.dead = {"node2"}
    nodes.go(3 * PATIENCE_SECONDS)
    assert nodes.nobody_ends()
    assert [node.unheard(nodes.now) for node in nodes.all.values()] == [False, False, True]
    assert not nodes.all["node2"].unheard(nodes.now), "it says so once"
    nodes.close()


def test_a_part_that_is_done_may_fall_silent(nodes: Nodes) -> None:
    nodes.parts["node2"] = "done"
    nodes.go(2)
    nodes.dead = {"node2"}
    nodes.go(3 * PATIENCE_SECONDS)
    assert nodes.nobody_ends()


def test_a_part_that_fell_short_ends_all(nodes: Nodes) -> None:
    nodes.parts["node2"] = "short"
    nodes.go(3)
    assert nodes.said["node0"] == ()
    nodes.parts["node0"] = "short"
    nodes.go(3)
    assert nodes.said["node1"] == ()


def test_after_its_end_a_node_speaks_for_a_while_and_closes_its_port(nodes: Nodes) -> None:
    nodes.parts = dict.fromkeys(NAMES, "done")
    closed = []
    for seconds in (neighbours.LAST_WORDS_SECONDS - 2, 4):
        nodes.go(seconds)
        closed.append(nodes.steward.closed)
    assert closed == [False, True]
    nodes.go(4)
    assert nodes.nobody_ends()


def test_one_that_stood_still_gives_the_others_their_time(nodes: Nodes) -> None:
    """As on a machine that was paused: it has heard nothing, and all others are well."""
    nodes.dead = {"node1", "node2"}
    nodes.now += 5 * PATIENCE_SECONDS
    nodes.go(1)
    nodes.dead = set()
    nodes.go(2 * PATIENCE_SECONDS)
    assert nodes.nobody_ends()


def test_whatever_strangers_send_is_dropped(nodes: Nodes) -> None:
    choose = random.Random(3)
    secret = nodes.steward.place.secret
    right = sealed(BEAT, secret)
    wrong = [
        *(b"", b"x", b"\x00" * LONGEST, b"GET / HTTP/1.1\r\n\r\n", right[:-1], right + b" ", right[::-1]),
        *(sealed(replace(BEAT, lost=("node1",)), other) for other in ("", "0" * 64)),
        *(sealed(beat, secret) for beat in (replace(BEAT, job="another"), replace(BEAT, attempt=2))),
        *(sealed(replace(BEAT, node=node), secret) for node in ("node0", "node9", "")),
        *(choose.randbytes(choose.randrange(600)) for _ in range(2000)),
    ]
    nodes.dead = {"node1"}
    for data in wrong:
        nodes.throw(data)
        if choose.random() < 0.01:
            nodes.go(0.5)
    nodes.go(PATIENCE_SECONDS + 2)
    assert nodes.said["node0"] == ("node1",), "nothing of that was taken for a word of node1"


def test_a_beat_that_is_sent_again_counts_for_nothing(nodes: Nodes) -> None:
    nodes.throw(sealed(replace(BEAT, number=time.monotonic_ns()), nodes.steward.place.secret))
    nodes.dead = {"node1"}
    for _ in range(int(PATIENCE_SECONDS) + 2):
        nodes.throw(sealed(replace(BEAT, number=1), nodes.steward.place.secret))
        nodes.go(1)
    assert nodes.said["node0"] == ("node1",)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{}", b"\xff", b'{"job":1}', b"[" * 5000])
def test_what_was_sealed_and_is_no_beat(text: bytes) -> None:
    with pytest.raises(ChannelError, match="no beat"):
        opened(hmac.digest(b"secret", text, "sha256") + text, "secret")


def test_a_beat_is_read_as_it_was_sent() -> None:
    assert opened(sealed(BEAT, "secret"), "secret") == BEAT


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        Neighbours.of_steward("job", 1, "203.0.113.7", "node0", ["node1"])


def test_addresses_of_the_newer_protocol() -> None:
    try:
        nodes = Nodes("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    nodes.go(3)
    nodes.dead = {"node2"}
    nodes.go(PATIENCE_SECONDS + 2)
    assert nodes.said["node0"] == nodes.said["node1"] == ("node2",)
    nodes.close()
