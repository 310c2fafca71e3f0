"""Pods on the hosts of a bed, as a kubelet runs them: a container is a process with its own PIDs and ``/tmp``."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jupyter_torchdist.protocol.process import start_ticks
from tests.cluster import node_python
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import children
from tests.leaks import wait_until

INDEX = "batch.kubernetes.io/job-completion-index"
IMAGE = "registry.test/torch:1"
IMAGE_ENVIRON = {"PATH": f"{node_python.PLACE}/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
"""The one image that nodes have, and its environment."""

CONTAINER = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
OWN = 'mount -t tmpfs none /tmp; hostname "$1"; shift; exec "$@"'

_numbers = itertools.count()


class Pod:
    """``object``: as the API shows it."""

    def __init__(self, job: Mapping[str, Any], index: int) -> None:
        name, template = job["metadata"]["name"], job["spec"]["template"]
        self.grace = float(template["spec"].get("terminationGracePeriodSeconds", 30))
        self.object: dict[str, Any] = {
            "metadata": {
                "name": f"{name}-{index}-{next(_numbers):05x}",
                "namespace": job["metadata"]["namespace"],
                "labels": {**template["metadata"].get("labels", {}), "job-name": name},
                "annotations": {INDEX: str(index)},
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        self.kill_at = float("inf")
        self._process: subprocess.Popen[bytes] | None = None
        self._bed: Cluster | None = None

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def hostname(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def container(self) -> dict[str, Any]:
        found: dict[str, Any] = self.object["spec"]["containers"][0]
        return found

    @property
    def phase(self) -> str:
        return str(self.object["status"]["phase"])

    def asks(self, resource: str) -> int:
        resources = self.container.get("resources", {})
        return int(resources.get("requests", {}).get(resource) or resources.get("limits", {}).get(resource) or 0)

    @property
    def environ(self) -> dict[str, str]:
        """Of the container: the image's, and that of the manifest with ``$(NAME)`` of earlier names."""
        fields = {"metadata.name": self.name, "status.podIP": self.object["status"].get("podIP", "")}
        found: dict[str, str] = {}
        for one in self.container.get("env", []):
            value = fields[one["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in one else one.get("value", "")
            found[one["name"]] = expanded(value, found)
        return IMAGE_ENVIRON | found

    # -- life

    def wait(self, reason: str, message: str) -> None:
        """It stays pending: the scheduler's words."""
        lack = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
        self.object["status"] = {"phase": "Pending", "conditions": [lack]}

    def start(self, bed: Cluster, node: str) -> None:
        self.object["spec"] = {**self.object["spec"], "nodeName": node}
        if self.container["image"] != IMAGE:
            words = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{self.container["image"]}"'}
            self._status("Pending", {"waiting": words})
            return
        self._bed = bed
        self.object["status"] = {"podIP": bed.address(node)}
        command = [expanded(word, self.environ) for word in self.container["command"]]
        self._process = subprocess.Popen(
            bed.command(node, *CONTAINER, "sh", "-c", OWN, "sh", self.hostname, *command),
            env=self.environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert wait_until(lambda: self.first is not None)
        self._status("Running", {"running": {}}, podIP=bed.address(node))

    @property
    def first(self) -> int | None:
        """PID 1 of the container, as this machine counts it: below nsenter and unshare."""
        pid = self._process.pid if self._process is not None else 0
        for _ in range(2):
            pid = next(iter(children(pid)), 0) if pid else 0
        return pid or None

    def command(self, *words: str) -> list[str]:
        """How this machine runs a command in the container, as ``exec`` does."""
        return ["nsenter", "--all", "--target", str(self.first), "sh", "-c", 'cd /; exec "$@"', "sh", *words]

    def look(self) -> None:
        """The end of its process, if that has come."""
        code = self._process.poll() if self._process is not None else None
        if code is not None and self.phase == "Running":
            code = 128 - code if code < 0 else code
            word = "Error" if code else "Completed"
            self._status("Failed" if code else "Succeeded", {"terminated": {"exitCode": code, "reason": word}})

    def end(self, number: signal.Signals) -> None:
        if (first := self.first) is not None and start_ticks(first):
            with suppress(ProcessLookupError):
                os.kill(first, number)

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _status(self, phase: str, state: dict[str, Any], **more: Any) -> None:
        facts = {"name": self.container["name"], "image": self.container["image"], "imageID": "", "restartCount": 0}
        self.object["status"] = {
            **self.object["status"],
            **more,
            "phase": phase,
            "containerStatuses": [{**facts, "ready": phase == "Running", "state": state}],
        }


def expanded(text: str, known: Mapping[str, str]) -> str:
    """As Kubernetes does in commands and values: ``$(NAME)`` if it is known, ``$$`` for a ``$``."""
    return re.sub(
        r"\$(?:\$|\(([^)]*)\))", lambda found: known.get(found[1], found[0]) if found[1] is not None else "$", text
    )
