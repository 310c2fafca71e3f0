"""Two loops that run at one time and work by turns, a few steps each: whatever slows the machine slows both.

A machine may be a quarter slower for seconds or minutes. Runs one after the other then compare two machines; windows
of half a second side by side compare two programs, and the median of their ratios is steady to a percent.
"""

from __future__ import annotations

import socket
import threading

WINDOW, SKIPPED = 20, 3
"""Steps of a turn, and how many of its first are not measured: caches belong to the other side."""
WARM = 4
"""Turns that are not measured."""
PATIENCE = 120.0
"""Seconds that one side waits for the other."""

SOURCE = f"""
import os, socket, time

class Turns:
    \"\"\"Rank 0 waits for its turn; the others wait for rank 0, in a collective.\"\"\"

    def __init__(self, port):
        first = os.environ["RANK"] == "0"
        self.line = socket.create_connection(("127.0.0.1", port)) if first else None
        self.count, self.windows = 0, []
        self.wait()

    def wait(self):
        if self.line is not None and not self.line.recv(1):
            raise RuntimeError("the other side is gone")

    def step(self):
        \"\"\"At the end of each.\"\"\"
        self.count += 1
        place = self.count % {WINDOW}
        if place == {SKIPPED}:
            self.begun = time.perf_counter(), time.thread_time()
        elif place == 0:
            ended = time.perf_counter(), time.thread_time()
            spent = tuple((end - begin) / {WINDOW - SKIPPED} * 1e3 for begin, end in zip(self.begun, ended))
            self.windows.append(spent)
            if self.line is not None:
                self.line.send(b".")
                self.wait()

    def end(self):
        \"\"\"Milliseconds a step, by the clock and of the main thread's processor time, in each measured turn.\"\"\"
        if self.line is not None:
            self.line.close()
        return self.windows[{WARM}:]
"""


class Table:
    """Where two sides meet: each has its turn when the other has had one, until both have ended."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._alternate)
        self._thread.start()

    def _alternate(self) -> None:
        lines: list[socket.socket] = []
        try:
            for _ in range(2):
                line, _address = self._listener.accept()
                line.settimeout(PATIENCE)
                lines.append(line)
            going = list(lines)
            while going:
                line = going.pop(0)
                line.sendall(b".")
                if line.recv(1):
                    going.append(line)
        except OSError:
            pass  # what a side has to say of it, it says itself; the other is told by its line's end
        finally:
            for line in lines:
                line.close()

    def close(self) -> None:
        self._listener.close()
        self._thread.join()
