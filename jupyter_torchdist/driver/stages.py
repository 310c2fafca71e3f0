"""What the start of a job on hosts waits for, said once for each stage: packages, hosts, data, Python, other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..protocol.plan import Plan
from ..protocol.state import JobState
from ..views.wording import first_few, size
from .links import Link

SAY_SECONDS = 1.0
"""How often at most is said how much of a stage is done."""


class Stages:
    """``say`` writes an event. A job on this machine alone has no stages."""

    def __init__(self, plan: Plan, say: Callable[..., None]) -> None:
        self._plan, self._say = plan, say
        self._last = self._text = ""
        self._percent = 0
        self._said_at = 0.0
        self._told: set[str] = set()

    def look(self, links: Sequence[Link], state: JobState) -> None:
        if state.state != "starting" or state.queued or all(link.shared for link in links):
            return
        if not state.stages and self._plan.asked:  # the hosts were asked before there was a job
            hosts = first_few(node.called for node in self._plan.nodes)
            self._say("job.stage", text=f"asking {hosts}", seconds=self._plan.asked)
        for left in {link.cargo.left for link in links if link.cargo} - {"", *self._told}:
            self._told.add(left)
            self._say("job.note", text=left)
        stage, text, done = self._now(links, state)
        now, percent = time.monotonic(), int(100 * done)
        if stage != self._last:
            self._last, self._text, self._percent = stage, text, 0
            self._say("job.stage", text=text)
            self._said_at = now
        elif percent > self._percent and now - self._said_at > SAY_SECONDS:
            self._say("job.stage", text=self._text, percent=percent)
            self._percent, self._said_at = percent, now

    def _now(self, links: Sequence[Link], state: JobState) -> tuple[str, str, float]:
        """The stage's key, its text, and how much of it is done, from 0 to 1."""
        loaded = [(link.node.called, link.cargo) for link in links if link.cargo is not None]
        if getting := [host for host, cargo in loaded if cargo.getting]:
            return "packages", f"getting packages for {first_few(getting)}", 0.0
        if unsure := [host for host, cargo in loaded if cargo.total is None]:
            return "reach", f"reaching {first_few(unsure)}", 0.0
        if waiting := [(host, cargo) for host, cargo in loaded if not cargo.there]:
            total = sum(cargo.total or 0 for _, cargo in waiting)
            sent = sum(cargo.sent for _, cargo in waiting)
            text = f"sending {size(total)} to {first_few(host for host, _ in waiting)}"
            return "send", text, min(1.0, sent / max(1, total))
        if building := [host for host, cargo in loaded if cargo.building]:
            return "build", f"installing packages on {first_few(building)}", 0.0
        if absent := [link.node.called for link in links if not state.ranks.keys() & set(link.node.ranks)]:
            return "python", f"starting Python on {first_few(absent)}", 0.0
        return "meet", "the ranks meet", 0.0
