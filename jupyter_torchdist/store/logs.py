"""The output of the ranks. Reading takes bounded memory, however large a file is or how long its lines are."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..protocol.disk import open_plain
from ..protocol.paths import JobPaths
from . import screen

STREAMS = ("out", "err")

NCCL, RECORDER = "nccl", "recorder"
"""Streams that are read for their causes alone."""

LINE_LIMIT = 64 * 1024
"""Largest size of a line in bytes; a longer line is read in pieces of this size."""

LAST_WORDS = 3
"""Lines of a log that show why a program ended."""

_STACK_OR_LOGGING = re.compile(r"\s|Traceback \(most|[DIWEC] \d{4}-\d\d-\d\d |During handling|The above exception")

_BLOCK = 64 * 1024
_ORDER = (*STREAMS, NCCL, RECORDER)
_NAME = re.compile(r"rank-(\d+)\.(out|err|recorder|nccl)(?:\.\d+)?")
_DUMP = re.compile(r"nccl-dump-(\d+)()")


@dataclass(frozen=True, order=True)
class LogFile:
    """One stream of one rank."""

    rank: int
    stream: str
    node: str
    path: Path


def files(paths: JobPaths, rank: int | None = None, stream: str | None = None) -> list[LogFile]:
    """The logs that exist, by rank, ``out`` before ``err``."""
    chosen = STREAMS if stream is None else (stream,)
    return [file for file in evidence(paths) if file.stream in chosen and rank in (None, file.rank)]


def evidence(paths: JobPaths) -> list[LogFile]:
    """All that ranks left which may tell why they failed, by rank. PyTorch's own dumps come before ours."""
    found = []
    for node in _entries(paths.nodes):
        for entry in _entries(Path(node.path)):
            match = _NAME.fullmatch(entry.name) or _DUMP.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                found.append(LogFile(int(match[1]), match[2] or RECORDER, node.name, Path(entry.path)))
    return sorted(found, key=lambda file: (file.rank, _ORDER.index(file.stream), file.node, file.path.name))


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def decode(data: bytes) -> str:
    """Decode UTF-8; invalid bytes are shown as ``\\xff``."""
    return data.decode("utf-8", "backslashreplace")


def tail(path: Path, lines: int, limit: int = 1024 * 1024) -> str:
    """The last ``lines`` lines, at most ``limit`` bytes."""
    if lines <= 0:
        return ""
    pieces: list[bytes] = []
    newlines = 0
    try:
        with open_plain(path, buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            start = end
            while start > 0 and end - start < limit and newlines <= lines:
                step = min(_BLOCK, start, limit - (end - start))
                start -= step
                file.seek(start)
                pieces.append(file.read(step))
                newlines += screen.lines_in(pieces[-1])
    except OSError:
        return ""
    data = b"".join(reversed(pieces))
    if start > 0:
        data = _whole_characters(data)
    return "".join(_split(screen.settled(decode(data)))[-lines:])


def last_words(path: Path) -> str:
    """Why a program ended, as the end of its log shows: without stacks and lines of the ``logging`` module."""
    kept = [
        line.rstrip() for line in tail(path, 200).splitlines() if line.strip() and not _STACK_OR_LOGGING.match(line)
    ]
    return "\n".join(kept[-LAST_WORDS:])


def _split(text: str) -> list[str]:
    """Split only at ``\\n``: ``splitlines`` also splits at ``\\r``, form feeds and others."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _whole_characters(data: bytes) -> bytes:
    """``data`` without the rest of a character that was cut at its beginning (at most 3 bytes)."""
    for index in range(min(4, len(data))):
        if data[index] & 0xC0 != 0x80:
            return data[index:]
    return data


def lines(path: Path) -> Iterator[str]:
    """Every line with its newline. A line longer than ``LINE_LIMIT`` bytes is returned in pieces."""
    held = screen.Screen()
    try:
        with open_plain(path) as file:
            while piece := file.readline(LINE_LIMIT):
                if len(piece) < LINE_LIMIT:
                    yield from _split(held.write(decode(piece)))
                else:
                    yield from (*_split(held.end()), decode(piece))
    except OSError:
        return
    yield from _split(held.end())


def grep(path: Path, pattern: str | re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its newline) for each line that matches ``pattern``.

    Raises ``re.error`` if the pattern is not a regular expression.
    """
    search = re.compile(pattern).search
    number = 1
    for line in lines(path):
        text = line.rstrip("\n")
        if search(text):
            yield number, text
        number += line.endswith("\n")


def selected(path: Path, pattern: str | None = None, last: int | None = None) -> Iterator[str]:
    """Lines with their newlines: the last ``last`` of the lines that match ``pattern``. Raises like ``grep``."""
    if pattern is None and last is not None:
        return iter(_split(tail(path, last)))
    found = lines(path) if pattern is None else (f"{line}\n" for _, line in grep(path, pattern))
    return found if last is None else iter(deque(found, maxlen=last))


def labelled(rank: int, text: str) -> str:
    """``text`` with the prefix ``[rank 3]`` on every line; the last line gets a newline."""
    whole = text.removesuffix("\n").split("\n") if text else []
    return "".join(f"[rank {rank}] {line}\n" for line in whole)
