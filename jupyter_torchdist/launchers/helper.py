"""A process that speaks with an engine, so that the driver need not import the engine's package: the process's side.

Driver and process exchange packets over a socket (``packets.py``). One of the driver has a word, ``do``, for
which the process has a method. One of the process is a state (``state``, ``reason``, ``hosts``, ``again``), or the
answer to ``cancel`` (``cancelled``, ``error``). The driver's side is ``helped.py``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from .base import ENDED
from .packets import Packets

ROOM = 4 * 1024 * 1024


class Helper(ABC):
    def __init__(self) -> None:
        self._driver: Packets | None = None
        self._said: dict[str, Any] = {}
        """The state that the driver was told last."""
        self._sending = threading.Lock()

    def serve(self, driver: socket.socket) -> None:
        """Do what this driver asks for, until it closes the socket."""
        self._driver = packets = Packets(driver)
        if self._said:
            self.say(**self._said)
        while (packet := packets.receive()) is not None:
            words, fds = packet
            getattr(self, words.pop("do"))(*fds, **words)

    def say(self, **words: Any) -> None:
        with self._sending, contextlib.suppress(OSError):
            if self._driver is not None:
                self._driver.send(words)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """An error ends the submission, with its line as the reason."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # told to the driver
            self.say(state=ENDED, reason=self.brief(error))

    @abstractmethod
    def brief(self, error: BaseException) -> str:
        """The line of an engine's error that says why."""

    @contextlib.contextmanager
    def carrying(self, link: socket.socket, words: int) -> Iterator[None]:
        """For the bytes of a channel. An error is its end: ``words`` gets the reason.

        ``link``: the driver's end. Another thread may still read it.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001  # told to the driver
            os.write(words, self.brief(error).encode())
        finally:
            os.close(words)
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
