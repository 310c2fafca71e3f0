"""``diagnose``: the findings of log files of any job, or of a job of ours."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..client.job import Job, attach
from ..diagnosis import logs, reading
from ..diagnosis.elastic import End, Report
from ..diagnosis.finding import Finding
from ..diagnosis.prefixes import read
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
        found = of_job(attach(words[0]))
    else:
        raise OptionError(f"there is no file {words[0]}", "give the log files of one job, or one job's id")
    if arguments.json:
        yield codec.dumps([finding.as_json() for finding in found]) + "\n"
    else:
        yield finding_text.findings(found) + "\n"


def _is_file(word: str) -> bool:
    return word == "-" or "/" in word or Path(word).exists()


def of_job(job: Job) -> list[Finding]:
    """From the ranks' logs, their exceptions and exit codes."""
    texts = [reading.of_file(file.path, file.rank, file.node) for file in files(job.paths)]
    ends: list[End] = []
    for rank in sorted(job.state.ranks.values(), key=lambda rank: rank.error.t if rank.error else rank.ended):
        name = f"how rank {rank.rank} ended"
        if rank.error is not None:
            texts.append(reading.of_text(name, rank.error.text, rank.rank, rank.node))
        if rank.state not in ("failed", "killed", "lost"):
            continue
        code = 1 if rank.error else rank.code or 0
        line = read(name, 1, f"rank {rank.rank} {rank.why or rank.state}")
        ends.append(End(rank.rank, rank.host or rank.node, code, line, root=not ends))
    return logs.diagnose(texts, Report(tuple(ends), terminated=True, present=job.state.state == "failed"))
