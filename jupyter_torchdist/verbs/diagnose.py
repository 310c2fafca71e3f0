"""``diagnose``: the findings of log files and dumps of any job, or of a job of ours."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..client.job import attach
from ..diagnosis import dumps, logs, ours, reading
from ..protocol.errors import OptionError
from ..protocol.events import Finding
from ..protocol.paths import JobPaths
from ..store import journal
from ..store.logs import evidence

MOST = 2000
"""Files of one directory."""


def diagnose(arguments: argparse.Namespace) -> list[Finding]:
    """A word is a file or a directory where there is one of this name, and else a job. Raises ``TorchDistError``."""
    words: list[str] = arguments.logs
    if len(words) == 1 and (job := JobPaths(Path(words[0]))).journal.is_file():
        return ours.diagnose(evidence(job), journal.state(job))
    if any(_is_file(word) for word in words):
        return _of_files([file for word in words for file in _files(Path(word))])
    if len(words) > 1:
        raise OptionError(f"there is no file {words[0]}", "give the log files of one job, or one job's id")
    one = attach(words[0])
    return ours.diagnose(evidence(one.paths), one.state)


def _of_files(files: Sequence[Path]) -> list[Finding]:
    texts: list[reading.Log] = []
    recorded: dict[int, dumps.Dump] = {}
    for file in files:
        data = reading.data_of(file)
        if not dumps.is_dump(data):
            texts.append(reading.of_data(str(file), data))
            continue
        dump = dumps.read(str(file), data)
        if dump.rank in recorded:
            first = recorded[dump.rank].file
            raise OptionError(f"{first} and {file} are both dumps of rank {dump.rank}", "give one dump of each rank")
        recorded[dump.rank] = dump
    return logs.diagnose(texts, dumps=list(recorded.values()))


def _files(path: Path) -> list[Path]:
    """All of a directory, those in folders below it, too. Raises ``OptionError`` where there are too many."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    if not found:
        raise OptionError(f"{path} has no files", "give the directory with the logs of one job")
    if len(found) > MOST:
        raise OptionError(f"{path} has {len(found)} files; {MOST} are read", "give the directory of one job's logs")
    return found


def _is_file(word: str) -> bool:
    return word == "-" or "/" in word or Path(word).exists()
