"""Frames: whatever pieces they arrive in; strangers and damage are refused."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.protocol.errors import ChannelError
from jupyter_torchdist.protocol.wire import frames

FEW = settings(max_examples=50, deadline=None)

HEADERS = st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=20), max_size=4)
MESSAGES = st.lists(st.tuples(HEADERS, st.binary(max_size=300)), max_size=6)


@FEW
@given(messages=MESSAGES, cuts=st.lists(st.integers(0, 3000), max_size=30))
def test_any_cut_gives_the_same_messages(messages: list[tuple[dict[str, Any], bytes]], cuts: list[int]) -> None:
    data = b"".join(frames.encode(header, body) for header, body in messages)
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    decoder, seen = frames.Decoder(), []
    for start, end in pairwise(edges):
        seen += list(decoder.feed(data[start:end]))
    assert seen == messages


@FEW
@given(messages=MESSAGES, cut=st.integers(0, 3000))
def test_a_channel_that_breaks_gives_only_whole_messages(
    messages: list[tuple[dict[str, Any], bytes]], cut: int
) -> None:
    seen = list(frames.Decoder().feed(b"".join(frames.encode(*message) for message in messages)[:cut]))
    assert seen == messages[: len(seen)]


@FEW
@given(st.binary(min_size=14, max_size=200))
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    if data[:2] == frames.encode({})[:2]:
        return
    with pytest.raises(ChannelError, match="does not speak"):
        list(frames.Decoder().feed(data))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (struct.pack("!2sIQ", b"\xa7T", frames.HEADER_LIMIT + 1, 0), "does not speak"),
        (struct.pack("!2sIQ", b"\xa7T", 2, frames.BODY_LIMIT + 1), "does not speak"),
        (struct.pack("!2sIQ", b"\xa7T", 2, 0) + b"{]", "not JSON"),
        (struct.pack("!2sIQ", b"\xa7T", 2, 0) + b"\xff\xff", "not JSON"),
        (struct.pack("!2sIQ", b"\xa7T", 2, 0) + b"[]", "not an object"),
    ],
)
def test_damage_is_refused_before_memory_is_taken(frame: bytes, words: str) -> None:
    with pytest.raises(ChannelError, match=words):
        list(frames.Decoder().feed(frame))


def test_the_largest_chunk_is_a_frame() -> None:
    body = bytes(frames.CHUNK)
    assert list(frames.Decoder().feed(frames.encode({"type": "bytes"}, body))) == [({"type": "bytes"}, body)]
