"""``python -m jupyter_torchdist.launchers.kubernetes.client [ask]``: a process that imports the official client.

With ``ask``, it reads one question as an object of JSON, and prints the answer, or an error. Without, it is the
driver's: standard input is a socket of packets (``helper.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...views.wording import count
from ..base import ENDED, QUEUED, RUNNING
from ..helper import Helper
from .manifest import CONTAINER, JOB, KIND

LOOK_SECONDS, ALIVE_SECONDS, PAUSE_SECONDS = 0.5, 5.0, 0.2
"""Between two looks at the pods: until they run, and then; at least, when connections end."""

TIMEOUT = (5.0, 30.0)
"""Seconds that a request may take: to connect, and to be answered."""

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

INDEX = "batch.kubernetes.io/job-completion-index"
CONTROL = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
"""Taints of nodes that take no pods of users."""

WAITS = ("ContainerCreating", "PodInitializing")
NEVER = ("InvalidImageName", "ErrImageNeverPull")
"""Why a container waits: as always, and for ever."""

ENTER = 'export TORCHDIST_PATH="$PATH"; IFS= read -r command; eval "$command"'
"""What ``exec`` starts. The command is the first line of its input: in the address of a request it would be too long.

``TORCHDIST_PATH``: of the image, which a login shell would set anew.
"""

PIECE = 256 * 1024
"""Bytes of a message to a pod, at most."""

STDOUT, STDERR, STATUS = 1, 2, 3
"""Channels of ``exec``: the first byte of a message."""

BINARY, CLOSE = 2, 8
"""Kinds of messages (RFC 6455)."""


class Cluster:
    """The API of a context of the user's file, else that of the cluster in which this process runs.

    Raises the client's ``ConfigException`` for a context that there is not.
    """

    def __init__(self, context: str, namespace: str) -> None:
        self._package: Any = importlib.import_module("kubernetes")
        config = self._package.config
        configuration = self._package.client.Configuration()
        try:
            config.load_kube_config(context=context or None, client_configuration=configuration)
            contexts, current = config.list_kube_config_contexts()
            chosen = next((one for one in contexts if one["name"] == context), current)
            self.context = chosen["name"]
            own = chosen["context"].get("namespace")
        except config.ConfigException:
            if context or not ACCOUNT.exists():
                raise
            config.load_incluster_config(client_configuration=configuration)
            self.context, own = "", ACCOUNT.read_text().strip()
        self.namespace = namespace or own or "default"
        configuration.retries = False
        self.server = configuration.host
        self._configuration = configuration
        self.core, self.batch = self._core(), self._package.client.BatchV1Api(self._client())

    def _client(self) -> Any:
        return self._package.client.ApiClient(self._configuration)

    def _core(self) -> Any:
        return self._package.client.CoreV1Api(self._client())

    def nodes(self, gpu: str) -> list[dict[str, Any]] | None:
        """What the nodes for users' pods have. ``gpu``: the name of the resource. None: this user may not list them."""
        try:
            found = self.core.list_node(_request_timeout=TIMEOUT).items
        except self._package.client.ApiException as error:
            if error.status == 403:
                return None
            raise
        return [
            {
                "name": node.metadata.name,
                "cores": cores(node.status.allocatable.get("cpu", "0")),
                "gpus": int(node.status.allocatable.get(gpu, "0")),
                "kind": (node.metadata.labels or {}).get(KIND, "gpu"),
            }
            for node in found
            if not node.spec.unschedulable and not any(taint.key in CONTROL for taint in node.spec.taints or [])
        ]

    def create(self, job: Mapping[str, Any], **more: Any) -> None:
        self.batch.create_namespaced_job(self.namespace, dict(job), _request_timeout=TIMEOUT, **more)

    def job(self, name: str) -> Any:
        """None: there is none."""
        try:
            return self.batch.read_namespaced_job(name, self.namespace, _request_timeout=TIMEOUT)
        except self._package.client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def jobs_of(self, job: str) -> list[str]:
        """The names of the Jobs of a job, in order of their attempts."""
        found = self.batch.list_namespaced_job(self.namespace, label_selector=f"{JOB}={job}", _request_timeout=TIMEOUT)
        names = [one.metadata.name for one in found.items]
        return sorted(names, key=lambda name: int(name.rpartition("-")[2]))

    def delete(self, name: str) -> None:
        """The Job, and so its pods. One that is not there is deleted already."""
        try:
            self.batch.delete_namespaced_job(
                name, self.namespace, propagation_policy="Background", _request_timeout=TIMEOUT
            )
        except self._package.client.ApiException as error:
            if error.status != 404:
                raise

    def pods(self, name: str) -> dict[int, Any]:
        """Those of the Job, by index."""
        found = self.core.list_namespaced_pod(
            self.namespace, label_selector=f"job-name={name}", _request_timeout=TIMEOUT
        )
        return {int(pod.metadata.annotations[INDEX]): pod for pod in found.items}

    def refusal(self, name: str) -> str:
        """Why no pods are made for the Job; empty if that is not known."""
        which = f"involvedObject.name={name},reason=FailedCreate"
        with contextlib.suppress(self._package.client.ApiException):  # this user may not see events
            found = self.core.list_namespaced_event(self.namespace, field_selector=which, _request_timeout=TIMEOUT)
            return str(found.items[-1].message) if found.items else ""
        return ""

    def enter(self, pod: str) -> Any:
        """A connection to a shell in the pod (``ENTER``)."""
        return self._package.stream.stream(
            self._core().connect_get_namespaced_pod_exec,  # a client of its own: the call changes it meanwhile
            pod,
            self.namespace,
            container=CONTAINER,
            command=["sh", "-c", ENTER],
            stdin=True,
            stdout=True,
            stderr=True,
            tty=False,
            binary=True,
            _preload_content=False,
        )


class _Client(Helper):
    """The driver's hands in Kubernetes."""

    def __init__(self) -> None:
        super().__init__()
        self._cluster: Cluster | None = None
        self._name = ""
        self._nodes = 0
        self._pods: dict[int, Any] = {}
        self._hurry = threading.Event()
        """A connection has ended, which may be the end of the job."""

    # -- what the driver asks for

    def submit(self, context: str, name: str, nodes: int, request: dict[str, Any]) -> None:
        with self.reporting():
            self._cluster = Cluster(context, request["metadata"]["namespace"])
            request["metadata"]["name"] = self._name = name
            self._cluster.create(request)
            self._watch(nodes)

    def attach(self, context: str, name: str, nodes: int, namespace: str, job: str) -> None:
        """``name``: empty if it is not known; then the last attempt of the job."""
        with self.reporting():
            self._cluster = Cluster(context, namespace)
            self._name = name or next(reversed(self._cluster.jobs_of(job)), "")
            if not self._name:
                self.say(state=ENDED, reason="Kubernetes does not know the job any more")
                return
            self._watch(nodes)

    def connect(self, ours: int, words: int, node: int, command: str) -> None:
        link = socket.socket(fileno=ours)
        threading.Thread(target=self._carry, args=(link, words, node, command), daemon=True).start()

    def cancel(self) -> None:
        error = ""
        try:
            if self._cluster is not None and self._name:
                self._cluster.delete(self._name)
        except Exception as failure:  # noqa: BLE001  # told to the driver
            error = brief(failure)
        self.say(cancelled=True, error=error)

    # -- state

    def _watch(self, nodes: int) -> None:
        self._nodes = nodes
        self.say(state=QUEUED, reason="")
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        """Tell each change of the state."""
        assert self._cluster is not None
        while self._said.get("state") != ENDED:
            with contextlib.suppress(Exception):  # the API does not answer: the last state remains
                state = self._state(self._cluster)
                if state != self._said:
                    self._said = state
                    self.say(**state)
            self._hurry.wait(LOOK_SECONDS if self._said.get("state") != RUNNING else ALIVE_SECONDS)
            self._hurry.clear()
            time.sleep(PAUSE_SECONDS)

    def _state(self, cluster: Cluster) -> dict[str, Any]:
        job = cluster.job(self._name)
        if job is None or job.metadata.deletion_timestamp is not None:
            return {"state": ENDED, "reason": "its Job was deleted in Kubernetes"}
        self._pods = cluster.pods(self._name)
        pods = [self._pods[index] for index in sorted(self._pods)]
        ends = {one.type: one for one in job.status.conditions or [] if one.status == "True"}
        if end := ends.get("Failed") or ends.get("Complete"):
            why = failure(pods)
            return {"state": ENDED, "reason": why or end.message or "its pods have ended", "again": bool(why)}
        if self._said.get("state") == RUNNING:
            return self._said
        if len(pods) == self._nodes and all(pod.status.phase == "Running" for pod in pods):
            return {"state": RUNNING, "reason": "", "hosts": [f"{self._name}-{index}" for index in range(self._nodes)]}
        waiting = {pod.metadata.name: waits(pod) for pod in pods}
        if never := [name for name, (reason, _) in waiting.items() if reason in NEVER]:
            return {"state": ENDED, "reason": f"pod {never[0]}: {': '.join(waiting[never[0]])}"}
        return {"state": QUEUED, "reason": self._lack(cluster, job, pods)}

    def _lack(self, cluster: Cluster, job: Any, pods: Sequence[Any]) -> str:
        """Why the Job waits."""
        if job.spec.suspend:
            return "the Job is suspended: its queue has not admitted it yet"
        if len(pods) < self._nodes and (refusal := cluster.refusal(self._name)):
            return refusal
        for pod in pods:
            reason, message = waits(pod)
            if reason and reason not in WAITS:
                return f"pod {pod.metadata.name}: {reason}: {message}"
        running = sum(pod.status.phase == "Running" for pod in pods)
        return f"waiting for {count(self._nodes, 'pod')}, of which {running} run{'s' * (running == 1)}"

    # -- bytes

    def _carry(self, link: socket.socket, words: int, node: int, command: str) -> None:
        """Between a socket and a shell in a pod, until one of them ends."""
        with link, self.carrying(link, words):
            assert self._cluster is not None
            shell = self._cluster.enter(self._pods[node].metadata.name)
            try:
                shell.write_stdin(f"{command}\n".encode())
                said = carry(link, shell)
            finally:
                shell.close()
            os.write(words, said)
        self._hurry.set()

    def brief(self, error: BaseException) -> str:
        return brief(error)


def carry(link: socket.socket, shell: Any) -> bytes:
    """One thread for both directions: a TLS connection must not be read and written by two. Returns what was said."""
    told = {STDERR: b"", STATUS: b""}
    line = shell.sock.sock
    poll = select.poll()
    for side in (link, line):
        poll.register(side, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        while line.fileno() in ready:
            opcode, frame = shell.sock.recv_data_frame(True)
            if opcode == CLOSE:
                return told[STDERR] or reason_of(told[STATUS])
            channel, data = frame.data[:1], frame.data[1:]
            if opcode == BINARY and channel == bytes([STDOUT]):
                try:
                    link.sendall(data)
                except OSError:  # the driver closed it
                    return b""
            elif opcode == BINARY and channel and channel[0] in told:
                told[channel[0]] += data
            if not getattr(line, "pending", int)():  # what TLS has decrypted, the poll does not see
                break
        if link.fileno() in ready:
            data = link.recv(PIECE)
            if not data:
                return b""
            shell.write_stdin(data)


def reason_of(status: bytes) -> bytes:
    """The words of the last message of ``exec``; empty if the command succeeded."""
    with contextlib.suppress(ValueError):
        return str(json.loads(status).get("message", "")).encode()
    return status


def cores(quantity: str) -> int:
    """``3920m`` → 3. A tenth is left for the pods that each node has."""
    number = float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
    return max(1, int(0.9 * number))


def waits(pod: Any) -> tuple[str, str]:
    """Why a pod does not run yet: a word and its text; empty if it is not said."""
    for one in pod.status.conditions or []:
        if one.type == "PodScheduled" and one.status == "False":
            return str(one.reason), str(one.message)
    for one in pod.status.container_statuses or []:
        if one.state.waiting is not None:
            return str(one.state.waiting.reason), str(one.state.waiting.message)
    return "", ""


def failure(pods: Sequence[Any]) -> str:
    """Why a pod has failed, and which; empty if none has."""
    for pod in pods:
        if pod.status.phase == "Failed":
            ended = [one.state.terminated for one in pod.status.container_statuses or [] if one.state.terminated]
            said = [pod.status.reason, pod.status.message] if pod.status.reason else []
            said += [f"{one.reason}, exit code {one.exit_code}" for one in ended[:1] if not said]
            where = f"pod {pod.metadata.name} on {pod.spec.node_name} has failed"
            return ": ".join([where, *filter(None, said)])
    return ""


def brief(error: BaseException) -> str:
    """The line that says why: the API's message, or the innermost reason of a connection that was not made."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(error.body)["message"])  # type: ignore[attr-defined]
    said = str(getattr(error, "reason", "") or error).strip()
    if found := re.search(r'"message": ?("(?:[^"\\]|\\.)*")', said):  # exec: of an answer to a handshake
        return str(json.loads(found[1]))
    first, *lines = said.splitlines() or [type(error).__name__]
    if "validation error" in first and len(lines) > 1:  # the client knows the schema itself
        return f"{lines[0]}: {lines[1].strip().partition(' [')[0]}"
    return first.rpartition(": ")[2] if "Failed to" in first else first


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """To a question of the kernel: what the cluster has, and whether it takes a Job."""
    try:
        cluster = Cluster(question["context"], question["namespace"])
        if job := question.get("job"):
            cluster.create(job, dry_run="All")
            return {"namespace": cluster.namespace}
        return {"context": cluster.context, "server": cluster.server, "nodes": cluster.nodes(question["gpu"])}
    except Exception as error:  # noqa: BLE001  # told to the caller
        return {"error": brief(error)}


def main(words: Sequence[str]) -> None:
    if words:
        print(json.dumps(answer(json.load(sys.stdin))))
    else:
        with socket.socket(fileno=0) as driver:
            _Client().serve(driver)
    sys.stdout.flush()
    os._exit(0)  # threads of connections


if __name__ == "__main__":
    main(sys.argv[1:])
