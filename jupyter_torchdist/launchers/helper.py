"""A process that speaks with an engine, so that the driver need not import the engine's package: the process's side.

Driver and process exchange packets over a socket. Each is an object of JSON. One of the driver has a word, ``do``, for
which the process has a method. One of the process is a state (``state``, ``reason``, ``hosts``), or the answer to
``cancel`` (``cancelled``, ``error``). The driver's side is ``helped.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from .base import ENDED

PACKET = 1024 * 1024
ROOM = 4 * PACKET


class Helper(ABC):
    def __init__(self) -> None:
        self._driver: socket.socket | None = None
        self._sending = threading.Lock()

    def serve(self, driver: socket.socket) -> None:
        """Do what this driver asks for, until it closes the socket."""
        self._driver = driver
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(driver, PACKET, 4)
            except ConnectionError:
                return
            if not data:
                return
            words = json.loads(data)
            getattr(self, words.pop("do"))(*fds, **words)

    def say(self, **words: Any) -> None:
        with self._sending, contextlib.suppress(OSError):
            if self._driver is not None:
                self._driver.send(json.dumps(words).encode())

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
