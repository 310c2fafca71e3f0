"""A job's submission to its engine: submit, poll, cancel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..launchers.base import ENDED, QUEUED, RUNNING, EngineState, Launcher, Submission
from ..protocol.errors import LaunchError
from ..protocol.events import Event
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from .links import Link

LOOK_SECONDS = 1.0
"""Seconds between two state queries to the engine."""


class Engine:
    """``say`` writes an event into the journal: a token at once, a state whenever it changes."""

    def __init__(self, find: Callable[[], Launcher], say: Callable[..., None]) -> None:
        self._find = find
        self._say = say
        self._submission: Submission | None = None
        self._looked = float("-inf")
        self.state = EngineState()

    @property
    def queued(self) -> bool:
        return self.state.word == QUEUED

    @property
    def ended(self) -> bool:
        return self.state.word == ENDED

    @property
    def taken(self) -> str | None:
        """Why nodes are lost in place of which another submission may get others; None: it would get none."""
        one_for_all = self._submission is not None and self._submission.token
        return self.state.reason if one_for_all and (not self.ended or self.state.again) else None

    def named(self, plan: Plan, links: Sequence[Link]) -> Plan:
        """The plan with the names that the engine has given its nodes so far, which the links get, too."""
        hosts = self._submission.hosts if self._submission else ()
        if not hosts or [node.host for node in plan.nodes] == list(hosts):
            return plan
        nodes = tuple(replace(node, host=host) for node, host in zip(plan.nodes, hosts, strict=True))
        for link, node in zip(links, nodes, strict=True):
            link.node = node
        return replace(plan, nodes=nodes)

    def with_gpus(self, plan: Plan) -> Plan:
        """The plan with the GPUs of this machine for which the job waited, if it did."""
        (node, *others), gpus = plan.nodes, self.state.gpus
        return replace(plan, nodes=(replace(node, gpus=gpus, gpu_numbers=()), *others)) if gpus else plan

    def submit(self, plan: Plan, attempt: int) -> Submission:
        """A new submission, unless one lasts. That of an earlier attempt is cancelled. Raises ``LaunchError``."""
        if self._submission is not None and getattr(self._submission, "lasts", False):
            return self._follow(self._submission)
        self.cancel()
        self.state = EngineState()
        submission = self._find().submit(plan, attempt)
        if submission.token:
            self._say("job.launched", token=submission.token, attempt=attempt)
        return self._follow(submission)

    def attach(self, plan: Plan, events: Sequence[Event]) -> Submission:
        """The submission that an earlier driver wrote into the journal. Raises ``LaunchError``."""
        token: dict[str, Any] = {}
        for event in events:
            if event.kind == "job.launched":
                token = event.data.get("token", {})
            elif event.kind == "job.engine":
                said = event.data
                self.state = EngineState(said.get("state", RUNNING), said.get("position"), said.get("reason", ""))
        return self._follow(self._find().attach(plan, token))

    def _follow(self, submission: Submission) -> Submission:
        self._submission = submission
        self._looked = float("-inf")
        self.look(time.monotonic())
        return submission

    def look(self, now: float) -> None:
        """Query the submission's state, if it is time. If the engine does not answer, the last state remains."""
        if self._submission is None or self.ended or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        with contextlib.suppress(LaunchError):
            state = self._submission.state()
            if state != self.state:
                self.state = state
                words: dict[str, Any] = {"state": state.word, "position": state.position, "reason": state.reason}
                self._say("job.engine", **words)

    def cancel(self) -> None:
        """Cancel the submission. A failure is reported as a note in the journal."""
        submission, self._submission = self._submission, None
        if submission is not None:
            try:
                submission.cancel()
            except Exception as error:  # noqa: BLE001  # foreign code; the job's end must be written anyway
                self._say("job.note", text=f"the launcher could not remove the job, so look for it there: {error}")


def begun(spec: JobSpec, submitted: Iterable[Event]) -> float:
    """When the job's time began, in seconds since the epoch: at its submission, with ``--wait`` at its turn."""
    turns = [event.t for event in submitted if spec.options.wait and event.data.get("state") == RUNNING]
    return max([spec.created, *turns])
