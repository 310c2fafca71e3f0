"""Waits for what agents say, and for room to tell them more."""

from __future__ import annotations

import contextlib
import selectors

from ..protocol.wire.channel import Channel
from .links import Link


class LinkSelector:
    """A selector over the channels of links, which break and are opened anew."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watched: dict[Link, tuple[Channel | None, dict[int, int]]] = {}

    def watch(self, link: Link) -> None:
        """Wake up for input, and for output when bytes wait to be sent. To be called after each change of a link."""
        wanted: dict[int, int] = {}
        if link.channel is not None:
            wanted[link.channel.read_fd] = selectors.EVENT_READ
            if link.writing:
                wanted[link.channel.write_fd] = wanted.get(link.channel.write_fd, 0) | selectors.EVENT_WRITE
        if self._watched.get(link) == (link.channel, wanted):
            return
        _, before = self._watched.pop(link, (None, {}))
        for fd in before:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
        for fd, events in wanted.items():
            self._selector.register(fd, events, link)
        self._watched[link] = (link.channel, wanted)

    def wait(self, seconds: float) -> list[Link]:
        """Links whose agents said something, or whose channels broke."""
        return [key.data for key, mask in self._selector.select(seconds) if mask & selectors.EVENT_READ]

    def close(self) -> None:
        self._selector.close()
