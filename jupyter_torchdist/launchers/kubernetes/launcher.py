"""``--launcher kubernetes``: what the cluster has, the Job, the submission."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...protocol.errors import LaunchError, OptionError, ResourceError
from ...protocol.hosts import settings_of_all
from ...protocol.options.launcher import launcher_values
from ...protocol.plan import Inventory, Plan, open_gpu
from ...protocol.spec import Options
from ...views.wording import count
from ..helped import environ
from ..nodes import Node, check_gpus, cores_asked_for
from .manifest import GPU, manifest, written
from .submission import CLIENT, INSIDE, KubernetesSubmission

ASK_SECONDS = 60.0


class KubernetesLauncher:
    """One agent in each pod of an indexed Job. A pod is a node of the plan."""

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        if importlib.util.find_spec("kubernetes") is None:
            raise LaunchError(
                f"--launcher kubernetes needs the package kubernetes, which is not installed in {sys.executable}",
                f"{sys.executable} -m pip install 'jupyter_torchdist[kubernetes]'",
            )
        if options.hosts:
            raise OptionError(
                "--launcher kubernetes: Kubernetes chooses the nodes", "leave --hosts out; --nodes N says how many"
            )
        values = launcher_values(options)
        if "image" not in values and "template" not in values:
            raise OptionError(
                "--launcher kubernetes: which image the pods have is not known",
                "-O image=NAME names one that has Python 3.10 or newer with torch",
            )
        cluster = _inventory(values)
        nodes = _nodes(cluster, options, values)
        return tuple(
            Inventory(
                host="",
                cores=cores_asked_for(node, options, values, len(nodes)),
                memory=0,
                gpus=tuple(open_gpu(index, node.kind) for index in range(node.gpus)),
                numactl=True,
                addresses=("",),
                reach=settings_of_all(options.host_option),
                allocation=cluster["context"] or INSIDE,
            )
            for node in nodes
        )

    def planned(self, plan: Plan, options: Options, inventories: Sequence[Inventory]) -> Plan:
        """Asks the API whether it takes the Job: the names, the quota, and what this user may do."""
        values = launcher_values(options)
        job = manifest(plan, values, max(inventory.cores for inventory in inventories))
        said = _ask(values, job=job)
        if "error" in said:
            raise LaunchError(
                f"Kubernetes refuses the job: {said['error']}",
                "--plan shows what it is sent; `kubectl auth can-i create jobs` says whether you may",
            )
        job["metadata"]["namespace"] = said["namespace"]
        context = inventories[0].allocation
        return replace(plan, allocation=context, request=written(job), configuration=_configuration())

    def submit(self, plan: Plan, attempt: int) -> KubernetesSubmission:
        return KubernetesSubmission.submit(plan, attempt)

    def attach(self, plan: Plan, token: Mapping[str, Any]) -> KubernetesSubmission:
        return KubernetesSubmission.attach(plan, token)


def _configuration() -> str:
    """The driver has another directory than the notebook, and maybe another ``KUBECONFIG``."""
    files = filter(None, os.environ.get("KUBECONFIG", "").split(os.pathsep))
    return os.pathsep.join(os.path.abspath(os.path.expanduser(file)) for file in files)


def _ask(values: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """An answer of ``client.answer``. Raises ``LaunchError``."""
    question = {"context": values.get("context", ""), "namespace": values.get("namespace", ""), **more}
    try:
        done = subprocess.run(
            [sys.executable, "-m", CLIENT, "ask"],
            input=json.dumps(question).encode(),
            capture_output=True,
            env=environ(),
            timeout=ASK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"Kubernetes has not answered within {ASK_SECONDS:g} s", LOOK) from None
    said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise LaunchError(f"the client of Kubernetes has failed: {said}", LOOK) from None
    if "error" in answer and said.startswith("ERROR:"):  # of a login program (`exec` of the user), for instance
        answer["error"] += f" ({said.rpartition(':root:')[2]})"
    return answer


LOOK = "`kubectl cluster-info` says whether the cluster answers; -O context=NAME names another of your kubeconfig"


def _inventory(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the cluster has. Raises ``LaunchError`` that says what was tried."""
    answer = _ask(values, gpu=values.get("gpu", GPU))
    if "error" in answer:
        tried = f"-O context={values['context']}" if "context" in values else "the current context of your kubeconfig"
        raise LaunchError(f"no Kubernetes cluster answers ({tried}): {answer['error']}", LOOK)
    return answer


def _nodes(cluster: Mapping[str, Any], options: Options, values: Mapping[str, Any]) -> list[Node]:
    """As many as the job has. Raises ``ResourceError`` for what the cluster does not have."""
    wanted = options.nodes or 1
    if cluster["nodes"] is None:
        return [_unseen(options, wanted)] * wanted
    nodes = sorted((_node(one, options.gpu_type) for one in cluster["nodes"]), key=lambda node: -node.gpus)
    where = f"the cluster at {cluster['server']}"
    if wanted > len(nodes):
        raise ResourceError(
            f"--nodes {wanted}: {where} has {count(len(nodes), 'node')}",
            f"--nodes {len(nodes)}" if nodes else "`kubectl get nodes` shows them",
        )
    nodes = nodes[:wanted]
    if wrong := next((node for node in nodes if node.cores < values.get("cpus", 1)), None):
        raise ResourceError(
            f"-O cpus={values['cpus']}: node {wrong.name} of {where} has {wrong.cores} CPUs for a job",
            f"-O cpus={wrong.cores}, or more nodes with --nodes",
        )
    if options.gpu_type is not None and not any(node.gpus for node in nodes):
        kinds = sorted({one["kind"] for one in cluster["nodes"] if one["gpus"]})
        raise ResourceError(
            f"no node of {where} has a GPU {options.gpu_type}: {', '.join(kinds) or 'none has a GPU'}",
            "leave --gpu-type out, or --ranks N for CPU ranks",
        )
    check_gpus(options, nodes, where, f"-O gpu=NAME names their resource ({values.get('gpu', GPU)})")
    return nodes


def _unseen(options: Options, nodes: int) -> Node:
    """A node of a cluster whose nodes this user may not list: it has what the job asks for."""
    if options.ranks is not None:
        return Node("", -(-options.ranks // nodes), 0)
    if options.gpus is None or options.gpu_type is not None:
        raise ResourceError(
            "--launcher kubernetes: which GPUs the nodes have is not known, because you may not list nodes",
            "--gpus N with --nodes N, without --gpu-type; nodeSelector of -O template=FILE chooses a kind",
        )
    each = -(-options.gpus // nodes)
    return Node("", each, each)


def _node(facts: Mapping[str, Any], kind: str | None) -> Node:
    """GPUs of another ``kind`` do not count."""
    fits = kind is None or open_gpu(0, facts["kind"]).is_a(kind)
    return Node(facts["name"], facts["cores"], facts["gpus"] if fits else 0, facts["kind"])
