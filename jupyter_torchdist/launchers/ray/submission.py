"""One attempt of a job in Ray: a placement group with an actor on each node, and the process that speaks with them."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from ...protocol.plan import Plan
from ..helped import HelpedSubmission, start

CLIENT = "jupyter_torchdist.launchers.ray.client"


class RaySubmission(HelpedSubmission):
    """``name``: of the placement group; empty if a driver died before it wrote it down."""

    engine = "Ray"
    ends = "the process that speaks with Ray has ended"
    look = "look with `ray list placement-groups` in a terminal"

    def __init__(self, plan: Plan, name: str, order: Mapping[str, Any]) -> None:
        self._name = name
        ours, theirs = socket.socketpair()
        with theirs:
            process = start(CLIENT, theirs)
        super().__init__(plan, ours, process)
        self.ask(address=plan.allocation, name=name, **order)

    @classmethod
    def submit(cls, plan: Plan, attempt: int) -> RaySubmission:
        return cls(plan, f"{group_name(plan)}.{attempt}", {"do": "submit", "request": json.loads(plan.request)})

    @classmethod
    def attach(cls, plan: Plan, token: Mapping[str, Any]) -> RaySubmission:
        return cls(plan, token.get("name", ""), {"do": "attach", "job": group_name(plan)})

    @property
    def token(self) -> dict[str, Any]:
        return {"name": self._name}


def group_name(plan: Plan) -> str:
    """Of the placement groups of a job, without the attempt."""
    return f"torchdist-{plan.job}"
