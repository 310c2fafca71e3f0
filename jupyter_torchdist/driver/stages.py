"""What the start of a job on hosts waits for, said once for each stage: hosts, data, Python, the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..protocol.plan import Plan
from ..protocol.state import JobState
from ..views.wording import first_few, size
from .links import Link


class Stages:
    """``say`` writes an event. A job on this machine alone has no stages."""

    def __init__(self, plan: Plan, say: Callable[..., None]) -> None:
        self._plan, self._say = plan, say
        self._last = ""

    def look(self, links: Sequence[Link], state: JobState) -> None:
        if state.state != "starting" or state.queued or all(link.shared for link in links):
            return
        if not state.stages and self._plan.asked:  # the hosts were asked before there was a job
            hosts = first_few(node.called for node in self._plan.nodes)
            self._say("job.stage", text=f"asking {hosts}", seconds=self._plan.asked)
        stage, text = self._now(links, state)
        if stage != self._last:
            self._last = stage
            self._say("job.stage", text=text)

    def _now(self, links: Sequence[Link], state: JobState) -> tuple[str, str]:
        """The stage's key, and its text."""
        if unsure := [link.node.called for link in links if link.to_send is None]:
            return "reach", f"reaching {first_few(unsure)}"
        if waiting := [link for link in links if link.to_send]:
            total = sum(link.to_send or 0 for link in waiting)
            return "send", f"sending {size(total)} to {first_few(link.node.called for link in waiting)}"
        if absent := [link.node.called for link in links if not state.ranks.keys() & set(link.node.ranks)]:
            return "python", f"starting Python on {first_few(absent)}"
        return "meet", "the ranks meet"
