"""The way to a server, which can be closed, opened again and made slow: a relay on a port of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Road:
    """Closed at first. ``delay``: seconds that each connection waits before its first byte goes on."""

    def __init__(self, port: int) -> None:
        self._to = port
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.delay = 0.0
        self.passed = 0
        """Connections that were let through."""
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._spawn(self._accept, self._listener)

    def close(self) -> None:
        """Nothing passes any more; open connections are cut."""
        listener, self._listener = self._listener, None
        for one in [*([listener] if listener else []), *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()
        for thread in self._threads:
            thread.join(10)
        self._threads.clear()

    def _spawn(self, work: object, *words: object) -> None:
        self._threads.append(threading.Thread(target=work, args=words, daemon=True))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                self.passed += 1
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                self._spawn(self._carry, near, far, self.delay)
                self._spawn(self._carry, far, near, 0.0)

    def _carry(self, one: socket.socket, other: socket.socket, delay: float) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                until = time.monotonic() + delay
                while self._listener is not None and time.monotonic() < until:
                    time.sleep(0.01)
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)
