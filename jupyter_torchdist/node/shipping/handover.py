"""A job that another machine takes over: what its driver needs, and which machine drives it now."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...protocol import codec
from ...protocol.disk import read_plain
from ...protocol.events import parse_lines
from ...protocol.paths import JobPaths, is_safe
from ...protocol.typed import Record
from ...protocol.wire.messages import Copied
from .replica import publish_private, replica_paths


@dataclass(frozen=True)
class Driving(Record):
    """The machine that drives a job: its number (``Plan.driver``), and who drives from where."""

    number: int
    origin: str


def taken_over(paths: JobPaths, number: int, origin: str) -> str:
    """Who else drives the job now; empty if it is this driver, which is noted. Raises ``OSError`` on a full disk."""
    known = _driving(paths)
    if known is not None and (known.number, known.origin) == (number, origin):
        return ""
    if known is not None and known.number >= number:
        return known.origin
    paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    publish_private(paths.driver, codec.dumps(Driving(number, origin).to_json()).encode("ascii"))
    return ""


def copied(scratch: Path, text: str) -> Copied:
    """What the node has of the job whose id is ``text`` or begins with it, else of the newest one with that name."""
    meant = _meant(scratch / "jobs", text)
    if len(meant) != 1:
        return Copied(tuple(meant))
    paths = replica_paths(scratch, meant[0])
    nodes = sorted(entry.name for entry in paths.nodes.iterdir() if is_safe(entry.name))
    if not nodes:
        return Copied(())
    driving = _driving(paths)
    files = {path.name: read_plain(path).decode("utf-8") for path in (paths.spec, paths.plan, paths.manifest)}
    return Copied(tuple(meant), files, nodes[0], attempt_of(paths, nodes[0]), driving.number if driving else 1)


def _driving(paths: JobPaths) -> Driving | None:
    try:
        return Driving.from_json(codec.loads(read_plain(paths.driver)))
    except (OSError, ValueError):
        return None


def _meant(jobs: Path, text: str) -> list[str]:
    present = sorted(name for name in _listed(jobs) if is_safe(name) and (jobs / name / "plan.json").exists())
    if text in present:
        return [text]
    if begin := [name for name in present if text and name.startswith(text)]:
        return begin
    return [name for name in present if _name(JobPaths(jobs / name)) == text][-1:]


def _listed(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from os.listdir(folder)


def _name(paths: JobPaths) -> str | None:
    try:
        found = codec.loads(read_plain(paths.spec))["options"]["name"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def attempt_of(paths: JobPaths, node: str) -> int:
    """That the node's ranks are in, or were in last."""
    try:
        events = parse_lines(read_plain(paths.node(node).launcher_events)).events
    except OSError:
        return 1
    return max((event.data.get("attempt", 1) for event in events if event.kind == "launcher.started"), default=1)
