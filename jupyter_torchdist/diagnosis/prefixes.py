"""Who printed a line: prefixes of torchrun, mpirun, srun, Ray, Kubernetes, pdsh, NCCL and c10d, taken off."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

LONGEST = 4000
"""Characters of a line that are read; no message is longer."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")

_PREFIX = re.compile(
    r"""\s{0,3}(?:
      \[\d+,\s?(?P<mpi>\d+)\]<std(?:out|err|diag)>:\s?                    # mpirun --tag-output
    | \[(?:rank|Rank\ )(?P<torch>\d+)\]:?\s?                                # torch 2.2 and above
    | \[[a-z]\w*?(?P<local>\d+)\]:\s?                                      # torchrun --tee: the role, the local rank
    | \((?P<actor>[A-Za-z_][\w.]*)(?:\([^)]*\))?\ pid=(?P<pid>\d+)(?:,\ ip=(?P<ip>[\w.:-]+))?\)\s?   # Ray, vLLM
    | \[pod/(?P<pod>[\w.-]+)/[\w.-]+\]\s?                                  # kubectl logs --prefix
    | \d{4}-\d\d-\d\d[T\ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|\ ?[+-]\d\d:?\d\d)?[:,]?\s(?:std(?:out|err)\ [FP]\s)?
    | (?P<compose>[a-z][\w.-]*\d)\s+\|\s                                   # docker compose
    | (?P<srun>\d{1,5}):\s(?=\S)                                           # srun --label
    | (?P<pdsh>(?:\d{1,3}\.){3}\d{1,3}|[a-z][a-z-]*[\w-]*\d[\w-]*):\s(?=\S)   # pdsh, DeepSpeed's launcher
    )""",
    re.VERBOSE,
)

_NCCL = re.compile(
    r"(?:\[(?P<time>[^\]]*)\] )?(?P<host>[^\s:\[\]]+):(?P<pid>\d+):(?P<tid>\d+) \[(?P<device>-?\d+)\] "
    r"(?:(?P<place>\S+?:\d+) (?:\([^)]*\) )?(?:NCCL )?|NCCL )(?P<level>INFO|WARN|TRACE|ERROR|ABORT) ?"
)

_C10D_RANK = re.compile(r"\[Rank (?P<rank>\d+)\]|\bRank (?P<other>\d+)\]")

PREFIXES = 4
"""How many prefixes one line may have: Kubernetes' time, then torchrun's rank, then torch's, then one more."""


@dataclass(frozen=True)
class Line:
    """``text`` is the line without its prefixes; of NCCL's, the place in its source stays.

    ``stream`` is equal for lines of one process, as far as they tell.
    """

    file: str
    number: int
    raw: str
    text: str
    rank: int | None = None
    node: str | None = None
    pid: str | None = None
    level: str = ""
    stream: str = ""


def read(file: str, number: int, raw: str) -> Line:
    """``number`` counts from 1."""
    cut = raw[:LONGEST]
    text, rank, node, pid, stream = _without_prefixes(cut)
    line = Line(file, number, cut, text, rank, node, pid, stream=stream)
    nccl = _NCCL.match(text)
    if nccl:
        return replace(
            line,
            text=f"{nccl['place'] or ''} NCCL {nccl['level']} {text[nccl.end() :]}",
            node=node or nccl["host"],
            pid=nccl["pid"],
            level=nccl["level"],
            stream=f"{nccl['host']}:{nccl['pid']}",
        )
    named = _C10D_RANK.search(text, 0, 200) if rank is None else None
    return replace(line, rank=int(named["rank"] or named["other"])) if named else line


@lru_cache(maxsize=4096)
def _without_prefixes(raw: str) -> tuple[str, int | None, str | None, str | None, str]:
    text = _ANSI.sub("", raw) if "\x1b" in raw else raw
    rank: int | None = None
    node = pid = None
    start = 0
    for _ in range(PREFIXES):
        match = _PREFIX.match(text, start)
        if match is None or _is_error(match):
            break
        start = match.end()
        number = match["torch"] or match["mpi"] or match["srun"] or match["local"]
        rank = int(number) if number and (rank is None or match["torch"]) else rank
        node = match["ip"] or match["pod"] or match["compose"] or match["pdsh"] or node
        pid = match["pid"] or pid
    return text[start:], rank, node, pid, f"{rank} {node} {pid}"


def _is_error(match: re.Match[str]) -> bool:
    """``some2.module: text`` of a host, not ``some2.Error: text`` of an exception."""
    return bool(match["pdsh"]) and match["pdsh"].endswith(("error", "exception", "warning"))
