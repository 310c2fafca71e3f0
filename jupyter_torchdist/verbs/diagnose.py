"""``diagnose``: the findings of log files of any job, or of a job of ours."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..client.job import attach
from ..diagnosis import logs, ours, reading
from ..protocol import codec
from ..protocol.errors import OptionError
from ..store.logs import files
from ..views import finding_text


def diagnose(arguments: argparse.Namespace) -> Iterator[str]:
    """A word is a file where there is one of this name, and else a job. Raises ``TorchDistError``."""
    words: list[str] = arguments.logs
    if any(_is_file(word) for word in words):
        found = logs.diagnose([reading.of_file(Path(word)) for word in words])
    elif len(words) == 1:
        job = attach(words[0])
        found = ours.diagnose(files(job.paths), job.state)
    else:
        raise OptionError(f"there is no file {words[0]}", "give the log files of one job, or one job's id")
    if arguments.json:
        yield codec.dumps([finding.to_json() for finding in found]) + "\n"
    else:
        yield finding_text.findings(found) + "\n"


def _is_file(word: str) -> bool:
    return word == "-" or "/" in word or Path(word).exists()
