"""A small stand-in for the API of Kubernetes: HTTP and WebSocket over TLS for its client, and what a cluster does.

It takes indexed Jobs, checks them against the client's models of the API, makes their pods, gives them to the nodes
that have room (``kubernetes_pods.py``), lets ``exec`` in, and deletes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import yaml
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from tests.cluster.cluster import Cluster
from tests.cluster.layout import CALLER
from tests.engines.kubernetes_pods import Pod

NAMESPACE, TOKEN = "ml", "the-token-of-this-user"
CERTIFICATE = "certificate.pem"
HAVE = {"cpu": 5, "nvidia.com/gpu": 2}
"""What a node has for pods."""

KIND = "NVIDIA-A100-SXM4-80GB"
TICK = 0.05


class Refused(Exception):
    """``code`` of HTTP; ``status``, as the API writes it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        self.code = code
        self.status = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code}


class KubernetesApi:
    """One namespace on the nodes of ``bed``. What tests look at and change is under ``lock``."""

    def __init__(self, bed: Cluster, directory: Path) -> None:
        self.bed = bed
        self.directory = directory
        self.config = directory / "kubeconfig"
        self.lock = threading.RLock()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: list[Pod] = []
        self.forbidden: set[str] = set()
        """Resources that this user may not read or make."""
        self.quota: int | None = None
        """How many pods the namespace may have."""
        self.suspends = False
        """Whether a queue holds new Jobs back."""
        self.protocols = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
        self._ready = threading.Event()
        self._stop: Callable[[], object] = lambda: None

    # -- its own life

    def up(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="kubernetes")
        self._thread.start()
        assert self._ready.wait(30)

    async def _serve(self) -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
        base = rf"/(?:api/v1|apis/batch/v1)(?:/namespaces/{NAMESPACE})?"
        routes = [
            (rf"{base}/pods/(?P<name>[^/]+)/exec", Exec, {"api": self}),
            (rf"{base}/(?P<kind>nodes|jobs|pods|events)(?:/(?P<name>[^/]+))?", Resources, {"api": self}),
        ]
        address = self.bed.address(CALLER)
        own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        own.load_cert_chain(*certificate(self.directory, address))
        server = HTTPServer(Application(routes, websocket_max_message_size=2**26), ssl_options=own)
        sockets = bind_sockets(0, address)
        server.add_sockets(sockets)
        self.server = f"https://{address}:{sockets[0].getsockname()[1]}"
        self.write_config(self.server)
        self._ready.set()
        while not stopped.is_set():
            with self.lock:
                self._turn(time.monotonic())
            await asyncio.sleep(TICK)
        server.stop()
        await server.close_all_connections()

    def write_config(self, server: str, **user: Any) -> None:
        """The user's file. ``user``: how the user logs in; a token if it is not said."""
        context = {"cluster": "test", "user": "me", "namespace": NAMESPACE}
        cluster = {"server": server, "certificate-authority": str(self.directory / CERTIFICATE)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "me", "user": user or {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": context}],
        }
        self.config.write_text(yaml.safe_dump(config))

    def down(self) -> None:
        with self.lock:
            for pod in self.pods:
                pod.end(SIGKILL)
        self._stop()
        self._thread.join()

    # -- what tests ask

    def left(self) -> list[str]:
        """Jobs, pods, and processes of jobs on the nodes."""
        with self.lock:
            found = [*self.jobs, *(pod.name for pod in self.pods)]
        for node in filter(self.bed.pid, self.bed.nodes):
            found += [f"{node}: {said}" for said in self.bed.processes(node).values() if "jupyter_torchdist" in said]
        return found

    def pod(self, index: int) -> Pod:
        """Of the one Job."""
        with self.lock:
            return next(pod for pod in self.pods if pod.hostname.endswith(f"-{index}"))

    # -- what a cluster does

    def _turn(self, now: float) -> None:
        for job in self.jobs.values():
            if not job["spec"].get("suspend"):
                self._run(job)
        for pod in list(self.pods):
            pod.look()
            if pod.object["metadata"].get("deletionTimestamp"):
                if now > pod.kill_at:
                    pod.end(SIGKILL)
                if pod.ended:
                    self.pods.remove(pod)
            elif pod.phase == "Pending" and "nodeName" not in pod.object["spec"]:
                self._schedule(pod)

    def _run(self, job: dict[str, Any]) -> None:
        name, conditions = job["metadata"]["name"], job["status"]["conditions"]
        own = [pod for pod in self.pods if pod.object["metadata"]["labels"]["job-name"] == name]
        if conditions:
            return
        if not job["status"].get("started"):
            job["status"]["started"] = 1
            for index in range(job["spec"]["completions"]):
                if self.quota is None or len(self.pods) < self.quota:
                    self.pods.append(Pod(job, index))
        elif any(pod.phase == "Failed" for pod in own):
            why = {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}
            conditions.append({"type": "Failed", "status": "True", **why})
            for pod in own:
                if pod.phase != "Failed":
                    self.delete(pod)
        elif own and all(pod.phase == "Succeeded" for pod in own):
            conditions.append({"type": "Complete", "status": "True"})

    def _schedule(self, pod: Pod) -> None:
        lacks = []
        for node in filter(self.bed.pid, self.bed.nodes):
            here = [one for one in self.pods if one.object["spec"].get("nodeName") == node and not one.ended]
            free = {what: most - sum(one.asks(what) for one in here) for what, most in HAVE.items()}
            if all(pod.asks(what) <= free[what] for what in HAVE):
                pod.start(self.bed, node)
                return
            lacks += [what for what in HAVE if pod.asks(what) > free[what]]
        words = ", ".join(f"{lacks.count(what)} Insufficient {what}" for what in dict.fromkeys(lacks))
        pod.wait("Unschedulable", f"0/{len(self.bed.nodes)} nodes are available: {words}.")

    def delete(self, pod: Pod) -> None:
        """As ``kubectl delete pod``: SIGTERM, and SIGKILL after the pod's grace."""
        if not pod.object["metadata"].get("deletionTimestamp"):
            pod.object["metadata"]["deletionTimestamp"] = "2026-11-28T00:00:00Z"
            pod.kill_at = time.monotonic() + pod.grace
            pod.end(SIGTERM)

    # -- what a user asks for

    def check(self, authorization: str, verb: str, kind: str) -> None:
        """Raises ``Refused``."""
        if authorization != f"Bearer {TOKEN}":
            raise Refused(401, "Unauthorized", "Unauthorized")
        if kind in self.forbidden:
            raise Refused(403, "Forbidden", f'{kind} is forbidden: User "me" cannot {verb} resource "{kind}"')

    def listed(self, kind: str, label: str) -> list[dict[str, Any]]:
        name, _, value = label.partition("=")
        if kind == "nodes":
            return [self._node(node) for node in filter(self.bed.pid, self.bed.nodes)] + [self._control()]
        if kind == "events":
            lack = f"Error creating: pods is forbidden: exceeded quota: pods={self.quota}"
            return [] if self.quota is None else [_event(lack)]
        found = list(self.jobs.values()) if kind == "jobs" else [pod.object for pod in self.pods]
        return [one for one in found if not name or one["metadata"]["labels"].get(name) == value]

    def _node(self, name: str) -> dict[str, Any]:
        allocatable = {what: str(most) for what, most in HAVE.items()} | {"cpu": "5000m"}
        labels = {"nvidia.com/gpu.product": KIND}
        return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {"allocatable": allocatable}}

    def _control(self) -> dict[str, Any]:
        taint = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
        status = {"allocatable": {"cpu": "64"}}
        return {"metadata": {"name": "head"}, "spec": {"taints": [taint]}, "status": status}

    def create(self, job: dict[str, Any], dry: bool) -> dict[str, Any]:
        check_model(job)
        name = job["metadata"]["name"]
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) or len(name) > 63:
            raise Refused(422, "Invalid", f'Job.batch "{name}" is invalid: metadata.name')
        if name in self.jobs:
            raise Refused(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
        if not dry:
            job["metadata"]["namespace"] = NAMESPACE
            job["spec"]["suspend"] = self.suspends
            job["status"] = {"conditions": []}
            self.jobs[name] = job
        return job

    def remove(self, name: str) -> dict[str, Any]:
        if self.jobs.pop(name, None) is None:
            raise Refused(404, "NotFound", f'jobs.batch "{name}" not found')
        for pod in self.pods:
            if pod.object["metadata"]["labels"]["job-name"] == name:
                self.delete(pod)
        return {"kind": "Status", "status": "Success"}


def certificate(directory: Path, address: str) -> tuple[Path, Path]:
    """A certificate of its own for the API, and its key."""
    files = directory / CERTIFICATE, directory / "key.pem"
    kind = ["req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    words = [
        "-subj",
        "/CN=kubernetes",
        "-addext",
        f"subjectAltName=IP:{address}",
        "-out",
        str(files[0]),
        "-keyout",
        str(files[1]),
    ]
    subprocess.run(["openssl", *kind, *words], check=True, capture_output=True)
    return files


def check_model(job: dict[str, Any]) -> None:
    """Against the official client's models, which are made from the API's schema. Raises ``Refused``."""
    client: Any = importlib.import_module("kubernetes.client")
    read = client.ApiClient().sanitize_for_serialization(client.V1Job.from_dict(job))
    if read != job:
        raise Refused(400, "BadRequest", f"strict decoding error: {json.dumps(job)} is read as {json.dumps(read)}")


def _event(message: str) -> dict[str, Any]:
    return {"metadata": {"name": "one"}, "involvedObject": {}, "reason": "FailedCreate", "message": message}


class Resources(RequestHandler):
    def initialize(self, api: KubernetesApi) -> None:
        self.api = api

    def get(self, kind: str, name: str | None) -> None:
        def found() -> dict[str, Any]:
            if name is None:
                return {"items": self.api.listed(kind, self.get_query_argument("labelSelector", ""))}
            if name not in self.api.jobs:
                raise Refused(404, "NotFound", f'{kind}.batch "{name}" not found')
            return self.api.jobs[name]

        self._answer("list" if name is None else "get", kind, found)

    def post(self, kind: str, name: str | None) -> None:
        dry = self.get_query_argument("dryRun", "") == "All"
        self._answer("create", kind, lambda: self.api.create(json.loads(self.request.body), dry))

    def delete(self, kind: str, name: str | None) -> None:
        self._answer("delete", kind, lambda: self.api.remove(name or ""))

    def _answer(self, verb: str, kind: str, does: Callable[[], dict[str, Any]]) -> None:
        self.set_header("Content-Type", "application/json")
        try:
            with self.api.lock:
                self.api.check(self.request.headers.get("Authorization", ""), verb, kind)
                self.finish(json.dumps(does()))
        except Refused as refused:
            self.set_status(refused.code)
            self.finish(refused.status)


class Exec(WebSocketHandler):
    """Channels: 0 standard input, 1 output, 2 errors, 3 the status at the end."""

    def initialize(self, api: KubernetesApi) -> None:
        self.api = api

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        return next((one for one in self.api.protocols if one in subprotocols), None)

    def prepare(self) -> None:
        try:
            self.api.check(self.request.headers.get("Authorization", ""), "get", "pods/exec")
        except Refused as refused:
            self.set_status(refused.code)
            self.finish(refused.status)

    async def open(self, name: str) -> None:
        with self.api.lock:
            pod = next(pod for pod in self.api.pods if pod.name == name)
            assert self.get_query_argument("container") == pod.container["name"]
            command, environ = pod.command(*self.get_query_arguments("command")), pod.environ
        pipe = subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        assert self.process.stdout is not None and self.process.stderr is not None
        try:
            await asyncio.gather(self._copy(self.process.stdout, 1), self._copy(self.process.stderr, 2))
            code = await self.process.wait()
            words = {"status": "Failure", "message": f"command terminated with non-zero exit code: {code}"}
            status = json.dumps(words if code else {"status": "Success"})
            await self.write_message(b"\3" + status.encode(), binary=True)
            self.close()
        except WebSocketClosedError:
            await self.process.wait()

    async def _copy(self, source: asyncio.StreamReader, channel: int) -> None:
        while data := await source.read(65536):
            await self.write_message(bytes([channel]) + data, binary=True)

    async def on_message(self, message: str | bytes) -> None:
        assert isinstance(message, bytes) and self.process.stdin is not None
        if message[0] == 0:
            try:
                self.process.stdin.write(message[1:])
                await self.process.stdin.drain()
            except ConnectionError:
                pass  # it has ended

    def on_close(self) -> None:
        """What was started gets the end of its input, as from a kubelet, and is not killed."""
        if self.process.stdin is not None:
            self.process.stdin.close()
