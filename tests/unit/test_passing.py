"""Blobs along the nodes: over real sockets of this machine, from one directory to the next."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.node.shipping import passing as module
from jupyter_torchdist.node.shipping.incoming import Incoming
from jupyter_torchdist.node.shipping.passing import Fetching, Passing
from jupyter_torchdist.protocol.errors import ChannelError
from jupyter_torchdist.protocol.wire.passing import NONCE, Question, opened

DATA = random.Random(0).randbytes(5_000_000)
DIGEST = hashlib.sha256(DATA).hexdigest()
MORE = b"more" * 1000
OTHER = hashlib.sha256(MORE).hexdigest()
SECRET = "ab" * 32
ADDRESS = "127.0.0.1"


class Node:
    """With the blobs that it has, and what it was told of those that it gets."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.blobs, self.incoming, self.passing = place, Incoming(place), Passing()
        listening = self.passing.listen("job", ADDRESS, place, SECRET, {DIGEST, OTHER})
        assert listening is not None
        self.port = listening[1]
        self.came = 0
        self.left: list[dict[str, int]] = []
        self.stored: list[tuple[str, bool]] = []

    def get(self, source: int, blobs: dict[str, int], secret: str = SECRET) -> None:
        self.passing.fetch(1, Fetching((ADDRESS, source), secret, blobs, self.incoming, self._tell))

    def _tell(self, size: int, left: dict[str, int]) -> None:
        self.came += size
        self.left += [left] if left else []

    def turn(self, now: float | None = None) -> None:
        self.passing.turn(time.monotonic() if now is None else now)
        self.stored += self.incoming.turn()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[], Node]]:
    nodes: list[Node] = []

    def made() -> Node:
        nodes.append(Node(tmp_path / str(len(nodes))))
        return nodes[-1]

    yield made
    for one in nodes:
        one.passing.close()


def until(done: Callable[[], object], *nodes: Node) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        for node in nodes:
            node.turn()


def test_what_the_other_has(node: Callable[[], Node]) -> None:
    one, two = node(), node()
    (one.blobs / DIGEST).write_bytes(DATA)
    (one.blobs / OTHER).write_bytes(MORE)
    two.get(one.port, {DIGEST: len(DATA), OTHER: len(MORE)})
    until(lambda: len(two.stored) == 2, one, two)
    assert two.stored == [(DIGEST, True), (OTHER, True)]
    assert (two.blobs / DIGEST).read_bytes() == DATA
    assert two.came == len(DATA) + len(MORE)
    until(lambda: not (one.passing.busy or two.passing.busy), one, two)
    assert two.left == []


def test_what_still_comes_goes_on_at_once(node: Callable[[], Node]) -> None:
    first, second, third = node(), node(), node()
    second.get(first.port, {DIGEST: len(DATA)})
    third.get(second.port, {DIGEST: len(DATA)})
    half = len(DATA) // 2
    for _ in range(20):
        for each in (first, second, third):
            each.turn()
    first.incoming.take(DIGEST, 0, DATA[:half], last=False)
    until(lambda: third.came == half, first, second, third)
    assert third.stored == []
    first.incoming.take(DIGEST, half, DATA[half:], last=True)
    until(lambda: third.stored, first, second, third)
    assert first.stored == second.stored == third.stored == [(DIGEST, True)]


def test_it_goes_on_after_what_is_here(node: Callable[[], Node]) -> None:
    one, two = node(), node()
    (one.blobs / DIGEST).write_bytes(DATA)
    two.incoming.take(DIGEST, 0, DATA[:4_000_000], last=False)
    two.get(one.port, {DIGEST: len(DATA)})
    until(lambda: two.stored, one, two)
    assert two.stored == [(DIGEST, True)]
    assert two.came == 1_000_000


def test_the_other_node_dies(node: Callable[[], Node]) -> None:
    one, two = node(), node()
    one.incoming.take(DIGEST, 0, DATA[:3_000_000], last=False)
    two.get(one.port, {DIGEST: len(DATA), OTHER: len(MORE)})
    until(lambda: two.came == 3_000_000, one, two)
    one.passing.close()
    until(lambda: two.left, two)
    assert two.left == [{DIGEST: 3_000_000, OTHER: 0}], "the driver sends the rest"
    assert not two.passing.busy


def test_nobody_listens(node: Callable[[], Node]) -> None:
    one = node()
    with socket.create_server((ADDRESS, 0)) as server:
        port = server.getsockname()[1]
    one.get(port, {DIGEST: len(DATA)})
    until(lambda: one.left, one)
    assert one.left == [{DIGEST: 0}]


def test_a_firewall_that_answers_nothing(node: Callable[[], Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REACH_SECONDS", 0.2)
    one = node()
    with (
        socket.create_server((ADDRESS, 0), backlog=0) as server,
        socket.create_connection(server.getsockname()),  # its queue is full with this one
    ):
        one.get(server.getsockname()[1], {DIGEST: len(DATA)})
        until(lambda: one.left, one)
    assert one.left == [{DIGEST: 0}]


def test_the_other_node_stands_still(node: Callable[[], Node]) -> None:
    one, two = node(), node()
    two.get(one.port, {DIGEST: len(DATA)})
    for _ in range(20):
        one.turn()
        two.turn()
    assert two.passing.busy
    two.turn(time.monotonic() + module.PATIENCE_SECONDS + 1)
    assert two.left == [{DIGEST: 0}]
    until(lambda: not one.passing.busy, one)


def test_data_that_was_damaged_before_it_came(node: Callable[[], Node]) -> None:
    first, second = node(), node()
    second.get(first.port, {DIGEST: len(DATA)})
    first.incoming.take(DIGEST, 0, b"x" * 1000, last=False)
    until(lambda: second.came == 1000, first, second)
    first.incoming.take(DIGEST, 1000, DATA[1000:], last=True)
    until(lambda: second.left, first, second)
    assert first.stored == [(DIGEST, False)]
    assert second.stored == []


def test_a_node_that_waits_no_more(node: Callable[[], Node]) -> None:
    one, two = node(), node()
    two.get(one.port, {DIGEST: len(DATA)})
    until(lambda: one.passing.busy, one, two)
    two.passing.forget(1)
    until(lambda: not one.passing.busy, one)
    assert two.left == []


def test_it_listens_no_longer_than_it_must(node: Callable[[], Node]) -> None:
    one = node()
    socket.create_connection((ADDRESS, one.port)).close()
    one.turn(time.monotonic() + module.OPEN_SECONDS + 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ADDRESS, one.port))


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    passing = Passing()
    assert passing.listen("job", "192.0.2.1", tmp_path, SECRET, {DIGEST}) is None
    passing.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.0\r\n\r\n" * 10, b"\xff" * 40, b"\0" * 36 + b"{}", b""])
def test_strangers_get_nothing(said: bytes, node: Callable[[], Node]) -> None:
    one = node()
    (one.blobs / DIGEST).write_bytes(DATA)
    with socket.create_connection((ADDRESS, one.port)) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        stranger.setblocking(False)
        came: list[bytes] = []

        def over() -> bool:
            with contextlib.suppress(BlockingIOError):
                came.append(stranger.recv(1000))
            return came[-1:] == [b""]

        until(over, one)
    assert len(b"".join(came)) == NONCE
    assert not one.passing.busy


def test_who_has_not_the_secret_gets_nothing(node: Callable[[], Node]) -> None:
    one, two = node(), node()
    (one.blobs / DIGEST).write_bytes(DATA)
    two.get(one.port, {DIGEST: len(DATA)}, secret="cd" * 32)
    until(lambda: two.left, one, two)
    assert two.came == 0


def test_only_the_jobs_blobs(node: Callable[[], Node]) -> None:
    one, two = node(), node()
    (one.blobs / ("ef" * 32)).write_bytes(b"another job's")
    two.get(one.port, {"ef" * 32: 13})
    until(lambda: two.left, one, two)
    assert two.came == 0


def test_a_question_counts_once() -> None:
    question = Question(((DIGEST, len(DATA), 0),))
    sealed = question.sealed(b"n" * NONCE, SECRET)
    assert opened(sealed, b"n" * NONCE, SECRET) == question
    assert opened(sealed[:-1], b"n" * NONCE, SECRET) is None
    for data, nonce, secret in [
        (sealed, b"m" * NONCE, SECRET),
        (sealed, b"n" * NONCE, "cd" * 32),
        (sealed[:-1] + b"]", b"n" * NONCE, SECRET),
        (b"\xff" * 36, b"n" * NONCE, SECRET),
    ]:
        with pytest.raises(ChannelError):
            opened(data, nonce, secret)
