"""A rank that prints a gigabyte (``make soak``): whole and in order on the disk, read everywhere in bounded memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from jupyter_torchdist.feed import Feed
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.store import catalog, journal, logs
from tests.integration.test_bad_ranks import QUIET, on_ranks, output_size, peak
from tests.leaks import wait_until
from tests.notebook import Notebook

LINES = 10_000_000
WIDTH = 100
"""Bytes of a line, its end included."""

FLOOD = f"""\
if td.rank == 0:
    text = "x" * {WIDTH - 10}
    for number in range({LINES}):
        print(f"{{number:08d}}", text)
value = 1
"""

PATIENCE = 800.0
"""Seconds; a quiet machine takes a tenth."""


class Reader:
    """A view in a browser that answers at once, and what it was told."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.bytes, self.latest = feed, 0, -1
        self.answers: list[dict[str, Any]] = []
        self._take(feed.receive({"type": "open", "logs": {}}))

    def look(self) -> None:
        self._take(self.feed.poll(time.monotonic()))

    def _take(self, said: list[dict[str, Any]]) -> None:
        for message in said:
            self.bytes += len(codec.dumps(message))
            if message["type"] == "lines":
                for number in numbers(message["segments"]):
                    assert number > self.latest, "no line comes twice, or before an earlier one"
                    self.latest = number
            elif message["type"] == "answer":
                self.answers.append(message)
        if said:
            self._take(self.feed.receive({"type": "ack", "n": said[-1]["n"]}))

    def ask(self, **question: Any) -> dict[str, Any]:
        self._take(self.feed.receive({"type": "ask", "id": 1, **question}))

        def answered() -> bool:
            self.look()
            return bool(self.answers)

        assert wait_until(answered)
        return self.answers.pop()


def numbers(segments: list[dict[str, Any]]) -> Iterator[int]:
    """Of the whole lines of rank 0 in them."""
    for segment in segments:
        if segment["file"] == "0.out":
            yield from (int(line[:8]) for line in segment["text"].splitlines() if len(line) == WIDTH - 1)


def in_order(path: Path) -> bool:
    """Whether the file is every line, once, one after another."""
    if path.stat().st_size != LINES * WIDTH:
        return False
    rows = np.memmap(path, np.uint8, "r", shape=(LINES, WIDTH))
    powers = 10 ** np.arange(7, -1, -1)
    for start in range(0, LINES, 100_000):
        part = rows[start : start + 100_000]
        found = (part[:, :8].astype(np.int64) - ord("0")) @ powers
        if not (found == np.arange(start, start + len(part))).all():
            return False
        if not (part[:, 8] == ord(" ")).all() or not (part[:, 9:-1] == ord("x")).all():
            return False
    return bool((rows[:, -1] == ord("\n")).all())


def resident(pid: int) -> float:
    """MB of its own; what it has mapped of files is the system's."""
    memory = psutil.Process(pid).memory_info()
    return float(memory.rss - memory.shared) / 1e6


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_gigabyte_of_one_rank(home: Path, kernel: Notebook) -> None:
    kernel.run("%%distribute --ranks 2\nprint('warm')")
    kernel_before, own_before, most = peak(kernel), resident(os.getpid()), 0.0
    before = {job.job for job in catalog.jobs()}
    cell = kernel.start(on_ranks(FLOOD))
    assert wait_until(lambda: {job.job for job in catalog.jobs()} > before)
    (job,) = {job.job for job in catalog.jobs()} - before
    paths = Home(home).job(job)
    reader = Reader(Feed(paths, Home(home)))
    began, ranks_most = time.monotonic(), 0.0
    while not journal.state(paths).final and time.monotonic() - began < PATIENCE:
        reader.look()
        most = max(most, resident(os.getpid()) - own_before)
        for process in journal.state(paths).ranks.values():
            if process.pid and psutil.pid_exists(process.pid):
                ranks_most = max(ranks_most, resident(process.pid))
        time.sleep(0.05)
    took = time.monotonic() - began
    kernel.finish(cell, 60)
    assert kernel.value("value") == 1
    assert "[rank 0] 09999999 xx" in cell.text
    assert output_size(cell) < QUIET and peak(kernel) - kernel_before < 40

    def has_the_last() -> bool:
        reader.look()
        return reader.latest == LINES - 1

    assert wait_until(has_the_last), reader.latest
    assert reader.bytes < LINES * WIDTH / 5 and most < 100, "it reads along where it can, and keeps nothing"
    asked = reader.ask(what="around", file="0.out", offset=LINES * WIDTH // 2, limit=20)
    assert LINES // 2 in set(numbers(asked["segments"]))
    reader.feed.close()

    assert 0 < ranks_most < 400, "a rank holds nothing of what it printed"
    (path,) = (file.path for file in logs.files(paths, stream="out") if file.path.stat().st_size)
    assert in_order(path)
    print(f"{took:.0f} s; kernel +{peak(kernel) - kernel_before:.0f} MB, feed +{most:.0f} MB, rank {ranks_most:.0f} MB")
