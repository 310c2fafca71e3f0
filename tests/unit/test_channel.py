"""Frames over real descriptors: cut at any byte, slow, gone, nonsense."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_torchdist.protocol.errors import ChannelError
from jupyter_torchdist.protocol.wire import frames
from jupyter_torchdist.protocol.wire.channel import Channel

Messages = list[frames.Message]


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    fd = ours.detach()
    channel = Channel(fd, fd)
    theirs.settimeout(10)
    yield channel, theirs
    channel.close()
    theirs.close()


def receive_all(channel: Channel) -> Messages:
    found: Messages = []
    while more := channel.receive():
        found += more
    return found


def drained(sender: Channel, take: Callable[[], Any]) -> None:
    """Let the other end take what was sent until nothing is pending."""
    while sender.pending:
        take()
        sender.flush()


MESSAGES: Messages = [
    ({"type": "hello"}, b""),
    ({"type": "bytes", "offset": 2**60, "x": float("inf"), "text": "é\ud800@"}, b"\xa7T\0\n" * 7),
    ({}, bytes(range(256)) * 40),
]


@given(cuts=st.lists(st.integers(1, 400), max_size=80))
def test_frames_in_any_pieces(cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        fd = ours.detach()
        channel = Channel(fd, fd)
        data = b"".join(frames.encode(header, body) for header, body in MESSAGES)
        found: Messages = []
        for cut in [*cuts, len(data)]:
            theirs.sendall(data[:cut])
            data = data[cut:]
            found += channel.receive()
        assert found == MESSAGES
        assert channel.between_frames
        channel.close()


def test_half_a_frame_is_kept(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    frame = frames.encode(*MESSAGES[1])
    theirs.sendall(frame[:-1])
    assert channel.receive() == []
    assert not channel.between_frames
    theirs.sendall(frame[-1:])
    assert channel.receive() == [MESSAGES[1]]


def test_nothing_has_come(pair: tuple[Channel, socket.socket]) -> None:
    assert pair[0].receive() == []


def test_a_slow_reader_never_blocks_the_sender(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    randomness = random.Random(3)
    sent = [({"number": number}, randomness.randbytes(randomness.randrange(300_000))) for number in range(20)]
    for header, body in sent:
        channel.send(header, body)
    assert channel.pending > 0
    assert not channel.between_frames
    decoder, found = frames.Decoder(), []
    while channel.pending:
        found += list(decoder.feed(theirs.recv(randomness.randrange(1, 70_000))))
        channel.flush()
    theirs.setblocking(False)
    while len(found) < len(sent):
        found += list(decoder.feed(theirs.recv(1_000_000)))
    assert found == sent
    assert channel.pending == 0


def test_two_channels_over_pipes_as_over_ssh() -> None:
    here_read, there_write = os.pipe()
    there_read, here_write = os.pipe()
    here, there = Channel(here_read, here_write), Channel(there_read, there_write)
    here.send({"type": "a"}, bytes(500_000))
    found: Messages = []
    drained(here, lambda: found.extend(there.receive()))
    found += receive_all(there)
    assert found == [({"type": "a"}, bytes(500_000))]
    there.send({"type": "b"})
    assert here.receive() == [({"type": "b"}, b"")]
    here.close()
    with pytest.raises(EOFError):
        there.receive()
    with pytest.raises(ChannelError, match="Broken pipe"):
        there.send({"type": "c"})
    there.close()


def test_the_peer_is_gone(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    theirs.sendall(frames.encode({"type": "last"}) + b"\xa7T")
    theirs.close()
    assert channel.receive() == [({"type": "last"}, b"")]
    with pytest.raises(EOFError):
        channel.receive()
    with pytest.raises(ChannelError, match="is gone"):
        channel.send({"type": "x"})


def test_the_peer_went_with_unread_bytes(pair: tuple[Channel, socket.socket]) -> None:
    """The system then resets the connection instead of ending it."""
    channel, theirs = pair
    channel.send({"type": "unread"})
    theirs.close()
    with pytest.raises(EOFError):
        channel.receive()


HEAD = struct.Struct("!2sIQ")

NONSENSE = {
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a header without end": HEAD.pack(b"\xa7T", frames.HEADER_LIMIT + 1, 0),
    "a body without end": HEAD.pack(b"\xa7T", 2, frames.BODY_LIMIT + 1) + b"{}",
    "no JSON": HEAD.pack(b"\xa7T", 3, 0) + b"{]}",
    "no text": HEAD.pack(b"\xa7T", 3, 0) + b"\xff\xfe\xfd",
    "no object": HEAD.pack(b"\xa7T", 2, 0) + b"[]",
    "an abyss": HEAD.pack(b"\xa7T", 200_000, 0) + b"[" * 200_000,
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused(case: str, pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    data = NONSENSE[case]

    def take_all() -> None:
        nonlocal data
        while data:
            data = data[theirs.send(data[:50_000]) :]
            channel.receive()
        channel.receive()

    with pytest.raises(ChannelError):
        take_all()


@given(data=st.binary(max_size=100))
def test_random_bytes_are_nonsense_or_not_yet_a_frame(data: bytes) -> None:
    decoder = frames.Decoder()
    try:
        assert all(isinstance(header, dict) for header, _ in decoder.feed(data))
    except ChannelError:
        assert len(data) >= HEAD.size


def test_a_closed_channel_touches_no_descriptor(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    fd = channel.read_fd
    theirs.sendall(b"x")
    channel.close()
    channel.close()
    os.dup2(theirs.fileno(), fd)  # as another connection would get the number
    with pytest.raises(EOFError):
        channel.receive()
    with pytest.raises(ChannelError, match="closed"):
        channel.send({})
    os.close(fd)


def test_a_message_without_json_form_is_the_callers_mistake(pair: tuple[Channel, socket.socket]) -> None:
    channel, _ = pair
    with pytest.raises(TypeError):
        channel.send({"type": object()})
    assert channel.between_frames
