"""One attempt of a job in Kubernetes: a Job, and the process that speaks with the API."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...protocol.errors import LaunchError
from ...protocol.plan import NodePlan, Plan
from ...protocol.wire.channel import Channel
from ..helped import HelpedChannel, HelpedSubmission, start
from .manifest import job_name

CLIENT = "jupyter_torchdist.launchers.kubernetes.client"


class KubernetesChannel(HelpedChannel):
    remedy = "-O image=NAME names another image; --host-option python=PATH another Python of this one"

    @property
    def shell(self) -> str:
        return "kubectl exec POD --"

    def fatal(self, said: str) -> LaunchError | None:
        """What this user may not do, another try does not change."""
        if "forbidden" not in said:
            return None
        return LaunchError(f"{self.host}: {said}", "`kubectl auth can-i get pods/exec` says whether you may")


class KubernetesSubmission(HelpedSubmission):
    """``name``: of the Job; empty if a driver died before it wrote it down."""

    engine = "Kubernetes"
    ends = "the process that speaks with Kubernetes has ended"
    look = "look with `kubectl get jobs,pods` in a terminal"
    channel = KubernetesChannel

    def __init__(self, plan: Plan, name: str, order: Mapping[str, Any]) -> None:
        self._name = name
        ours, theirs = socket.socketpair()
        with theirs:
            process = start(CLIENT, theirs, {"KUBECONFIG": plan.configuration} if plan.configuration else {})
        super().__init__(plan, ours, process)
        self.ask(context=context_of(plan), name=name, nodes=len(plan.nodes), **order)

    @classmethod
    def submit(cls, plan: Plan, attempt: int) -> KubernetesSubmission:
        return cls(plan, f"{job_name(plan.job)}-{attempt}", {"do": "submit", "request": request_of(plan)})

    @classmethod
    def attach(cls, plan: Plan, token: Mapping[str, Any]) -> KubernetesSubmission:
        order = {"do": "attach", "namespace": request_of(plan)["metadata"]["namespace"], "job": plan.job}
        return cls(plan, token.get("name", ""), order)

    @property
    def token(self) -> dict[str, Any]:
        return {"name": self._name}

    def connect(self, node: NodePlan) -> Channel:
        """A login shell would forget the image's PATH."""
        setup = f'PATH="$TORCHDIST_PATH"\n{node.reach.setup}'
        return super().connect(replace(node, reach=replace(node.reach, setup=setup)))


INSIDE = "the notebook's own cluster"


def context_of(plan: Plan) -> str:
    """Empty for the cluster in which the notebook runs."""
    return "" if plan.allocation == INSIDE else plan.allocation


def request_of(plan: Plan) -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = yaml.safe_load(plan.request)
    return found
