"""What Kubernetes is sent: an indexed Job. Its pods wait for the driver, which comes by ``exec`` (``client.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...protocol.errors import OptionError
from ...protocol.plan import Plan, open_kind

CONTAINER = "node"
GPU = "nvidia.com/gpu"
KIND = "nvidia.com/gpu.product"
"""The label of a node that says what its GPUs are; NVIDIA's feature discovery sets it."""

JOB = "jupyter-torchdist/job"
"""A label of ours, with the job's id."""

ENDS = "Kubernetes ends its pods: they were deleted, evicted, or their node is drained"

KEPT_SECONDS = 3600
"""How long Kubernetes keeps a Job that has ended, and that nobody has deleted."""

IDLE_SECONDS = 300
"""A pod without an agent ends after this time: nobody will come."""

LAST_SECONDS = 30
"""Between the end of the ranks' grace and SIGKILL for the pod: for results and the last lines."""

PAUSE = 2

HOLD = f"""\
# The driver comes by exec, and starts an agent here. Without an agent for {IDLE_SECONDS} s, the pod ends.
agents() {{ for s in "$TORCHDIST_RUNTIME_DIR"/agent-*/agent.sock; do [ -S "$s" ] && return; done; return 1; }}
# Before Kubernetes ends the pod: the agent ends the ranks with SIGTERM, so that they save.
last() {{ agents || exit 0; echo "{ENDS}" >"$TORCHDIST_RUNTIME_DIR/expiring"; while agents; do sleep 1; done; exit 0; }}
trap last TERM
n=0
while [ $n -lt {IDLE_SECONDS // PAUSE} ]; do sleep {PAUSE} & wait $!; n=$((n + 1)); if agents; then n=0; fi; done
"""

ENVIRON: tuple[dict[str, Any], ...] = (
    {"name": "TORCHDIST_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    {"name": "TORCHDIST_NODE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    {"name": "TORCHDIST_RUNTIME_DIR", "value": "/tmp/$(TORCHDIST_POD)"},
    {"name": "TORCHDIST_SCRATCH", "value": "/tmp/$(TORCHDIST_POD)/scratch"},
    {"name": "TORCHDIST_SUCCESSORS", "value": "0"},
)
"""Of a pod, and so of what ``exec`` starts in it."""

SHM = "torchdist-shm"
"""The volume of shared memory: a container has 64 MB by itself, too little for NCCL and for data loaders."""


def manifest(plan: Plan, values: Mapping[str, Any], cpus: int) -> dict[str, Any]:
    """The Job. ``values``: the launcher's options. ``cpus``: of each pod. Raises ``OptionError`` (``-O template``)."""
    template = _template(values.get("template"))
    nodes, labels = len(plan.nodes), {JOB: plan.job}
    metadata = template.get("metadata", {})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(plan.job), "labels": {**metadata.get("labels", {}), **labels}},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {
                "metadata": {**metadata, "labels": {**metadata.get("labels", {}), **labels}},
                "spec": _pod(plan, values, cpus, template.get("spec", {})),
            },
        },
    }


def job_name(job: str) -> str:
    """Of the Jobs of a job, without the attempt."""
    return f"torchdist-{job}"


def _pod(plan: Plan, values: Mapping[str, Any], cpus: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given``: the user's. Ours is laid over it."""
    first, *others = given.get("containers") or [{}]
    asked = first.get("resources", {})
    memory = {"memory": values["mem"]} if "mem" in values else {}
    most = max(len(node.gpus) for node in plan.nodes)
    gpus = {values.get("gpu", GPU): str(most)} if most else {}
    image = {"image": values["image"]} if "image" in values else {}
    container = {
        **first,
        "name": CONTAINER,
        **image,
        "command": ["sh", "-c", HOLD],
        "env": [*first.get("env", []), *ENVIRON],
        "resources": {
            **asked,
            "requests": {**asked.get("requests", {}), "cpu": str(cpus), **memory},
            "limits": {**asked.get("limits", {}), **memory, **gpus},
        },
    }
    container.pop("args", None)
    volumes, mounts = list(given.get("volumes", [])), list(first.get("volumeMounts", []))
    if not any(mount.get("mountPath") == "/dev/shm" for mount in mounts):
        volumes.append({"name": SHM, "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": SHM, "mountPath": "/dev/shm"})
    kind = open_kind(gpu for node in plan.nodes for gpu in node.gpus)
    chosen = {"nodeSelector": {**given.get("nodeSelector", {}), KIND: kind}} if kind else {}
    return {
        **given,
        **chosen,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(plan.grace) + LAST_SECONDS,
        "containers": [{**container, "volumeMounts": mounts}, *others],
        "volumes": volumes,
    }


def _template(path: str | None) -> dict[str, Any]:
    """The pod template in a file: ``metadata`` and ``spec``, as in a Pod or a Job's ``template``."""
    if path is None:
        return {}
    import yaml

    hint = "the file has `metadata` and `spec` of a pod, as below `template` of a Job"
    try:
        found = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = getattr(error, "strerror", None) or str(error).replace("\n", " ")
        raise OptionError(f"-O template={path}: {said}", hint) from None
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise OptionError(f"-O template={path}: there is no `spec`", hint)
    return found


def written(job: Mapping[str, Any]) -> str:
    """The manifest as YAML; texts of several lines as such."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    said: str = yaml.dump(dict(job), Dumper=Dumper, sort_keys=False, width=1000)
    return said
