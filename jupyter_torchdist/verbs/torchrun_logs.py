"""What torchrun's options do with output: ``--redirects``, ``--tee``, ``--log-dir``, filters, the prefix of a line.

The job keeps the whole output anyway. Files in ``--log-dir`` are copies that ``torchdist run`` writes while it waits.
"""

from __future__ import annotations

import json
import os
import re
import string
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..protocol.disk import open_plain
from ..protocol.paths import JobPaths
from ..protocol.state import JobState
from ..store import logs
from ..store.segments import Log

BITS = {"out": 1, "err": 2}
NAMES = {"out": "stdout", "err": "stderr"}
CHUNK = 1 << 20


def parse_std(text: str) -> dict[int | None, int]:
    """``3`` or ``0:1,1:2`` as {rank: bits of streams}; None is every other rank. Raises ``ValueError``."""
    if re.fullmatch(r"[0-3]", text):
        return {None: int(text)}
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ValueError(
            "expected 0, 1 (stdout), 2 (stderr), 3 (both), or such a number for ranks", "write 3, or 0:1,1:3"
        )
    return {int(rank): int(bits) for rank, bits in (pair.split(":") for pair in text.split(","))}


@dataclass
class Output:
    """Where output goes. Without options: to the shell alone, with ``[rank N]`` before each line."""

    only: frozenset[int] | None = None
    """Ranks whose output is printed; None for all."""
    redirects: Mapping[int | None, int] = field(default_factory=dict)
    tee: Mapping[int | None, int] = field(default_factory=dict)
    log_dir: str = ""
    filters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Stream -> a line with one of these texts also goes to one file for all ranks."""
    template: str = ""

    @property
    def to_files(self) -> bool:
        """Whether anything is written to files."""
        return any((*self.redirects.values(), *self.tee.values(), *self.filters.values()))

    def prints(self, rank: int, stream: str) -> bool:
        """Whether the shell shows this stream."""
        if self.only is not None and rank not in self.only:
            return False
        return _has(self.tee, rank, stream) or not _has(self.redirects, rank, stream)

    def copies(self, rank: int, stream: str) -> bool:
        """Whether this stream goes to a file of its own."""
        return _has(self.tee, rank, stream) or _has(self.redirects, rank, stream)

    def label(self, role: str, rank: int, text: str) -> str:
        """``text`` with the prefix before each line."""
        if not self.template:
            return logs.labelled(rank, text)
        names = {"role_name": role, "local_rank": rank, "rank": rank}
        prefix = string.Template(self.template).safe_substitute(names)
        return "".join(prefix + line for line in text.splitlines(keepends=True))


def _has(chosen: Mapping[int | None, int], rank: int, stream: str) -> bool:
    return bool(chosen.get(rank, chosen.get(None, 0)) & BITS[stream])


class LogDir:
    """The files of one run below ``--log-dir``, in torchrun's layout: ``RUN_…/attempt_0/RANK/stdout.log``."""

    def __init__(self, output: Output, paths: JobPaths, run_id: str, role: str) -> None:
        """Raises ``OSError`` if the directory cannot be made."""
        self._output, self._paths, self._role = output, paths, role
        base = output.log_dir or tempfile.mkdtemp(prefix="torchelastic_")
        os.makedirs(base, exist_ok=True)
        self.root = Path(tempfile.mkdtemp(prefix=f"{run_id or 'none'}_", dir=base))
        self._offsets: dict[Path, int] = {}
        self._attempt = self.root / "attempt_0"

    def tick(self, state: JobState) -> None:
        """Copy what ranks have written."""
        self._attempt = self.root / f"attempt_{state.restarts}"
        for file in logs.files(self._paths):
            if self._output.copies(file.rank, file.stream):
                self._copy(file)

    def tap(self, log: Log, text: str) -> None:
        """Write the lines of ``text`` that a filter wants."""
        wanted = self._output.filters.get(log.stream, ())
        kept = [line for line in text.splitlines(keepends=True) if any(word in line for word in wanted)]
        if kept:
            self._attempt.mkdir(parents=True, exist_ok=True)
            with open(self._attempt / f"filtered_{NAMES[log.stream]}.log", "a", encoding="utf-8") as file:
                file.write(self._output.label(self._role, log.rank, "".join(kept)))

    def finish(self, state: JobState) -> None:
        """Copy the rest, and write the exceptions of failed ranks as ``error.json``."""
        self.tick(state)
        for rank in state.failures():
            if rank.error is not None:
                folder = self._attempt / str(rank.rank)
                folder.mkdir(parents=True, exist_ok=True)
                extra = {"py_callstack": rank.error.text, "timestamp": str(int(rank.error.t))}
                content = {"message": {"message": rank.error.title, "extraInfo": extra}}
                (folder / "error.json").write_text(json.dumps(content), encoding="utf-8")

    def _copy(self, file: logs.LogFile) -> None:
        target = self._attempt / str(file.rank) / f"{NAMES[file.stream]}.log"
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_plain(file.path) as source, open(target, "ab") as copy:
            source.seek(self._offsets.get(file.path, 0))
            while data := source.read(CHUNK):
                copy.write(data)
            self._offsets[file.path] = source.tell()
