"""``--launcher ray``: what the cluster has, the placement group, the submission."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...protocol.errors import LaunchError, OptionError, ResourceError
from ...protocol.hosts import settings_of_all
from ...protocol.options.launcher import launcher_values
from ...protocol.plan import Inventory, Plan, open_gpu, open_kind
from ...protocol.spec import Options
from ...views.wording import count
from ..helped import environ
from ..nodes import Node, check_gpus, cores_asked_for
from .submission import CLIENT, RaySubmission

PROBE_SECONDS = 60.0
CONNECT_SECONDS = 5.0
IMPATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
"""A setting of Ray: for the address of a cluster that has ended, it would try for two minutes."""


class RayLauncher:
    """One agent on each node, below an actor that has all of the job's cores and GPUs there."""

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(
                f"--launcher ray needs the package ray, which is not installed in {sys.executable}",
                f"{sys.executable} -m pip install 'jupyter_torchdist[ray]'",
            )
        if options.hosts:
            raise OptionError("--launcher ray: Ray chooses the nodes", "leave --hosts out; --nodes N says how many")
        values = launcher_values(options)
        cluster = ask(*_address(values, environ))
        nodes = sorted((_node(one, options.gpu_type) for one in cluster["nodes"]), key=lambda node: -node.gpus)
        kinds = sorted({one["kind"] for one in cluster["nodes"] if one["gpus"]})
        where = f"the Ray cluster at {cluster['address']}"
        wanted = options.nodes or 1
        if wanted > len(nodes):
            raise ResourceError(
                f"--nodes {wanted}: {where} has {count(len(nodes), 'node')}",
                f"--nodes {len(nodes)}" if nodes else "add one with `ray start --address=…`",
            )
        if wrong := next((node for node in nodes[:wanted] if node.cores < values.get("cpus", 1)), None):
            raise ResourceError(
                f"-O cpus={values['cpus']}: node {wrong.name} of {where} has {wrong.cores} CPUs",
                f"-O cpus={wrong.cores}, or more nodes with --nodes",
            )
        nodes = nodes[:wanted]
        if options.gpu_type is not None and not any(node.gpus for node in nodes):
            raise ResourceError(
                f"no node of {where} has a GPU {options.gpu_type}: {', '.join(kinds) or 'none has a GPU'}",
                "leave --gpu-type out, or --ranks N for CPU ranks",
            )
        check_gpus(options, nodes, where, "start its nodes with --num-gpus")
        return tuple(
            Inventory(
                host="",
                cores=cores_asked_for(node, options, values, wanted),
                memory=0,
                gpus=tuple(open_gpu(index, node.kind) for index in range(node.gpus)),
                numactl=True,
                addresses=("",),
                reach=settings_of_all(options.host_option),
                allocation=cluster["address"],
            )
            for node in nodes
        )

    def planned(self, plan: Plan, options: Options, inventories: Sequence[Inventory]) -> Plan:
        named = open_kind(gpu for node in plan.nodes for gpu in node.gpus)
        kind = {f"accelerator_type:{named}": 0.001} if named else {}
        bundles = [
            {"CPU": inventory.cores, **({"GPU": len(node.gpus), **kind} if node.gpus else {})}
            for node, inventory in zip(plan.nodes, inventories, strict=True)
        ]
        request = json.dumps({"strategy": "STRICT_SPREAD", "bundles": bundles})
        return replace(plan, allocation=inventories[0].allocation, request=request)

    def submit(self, plan: Plan, attempt: int) -> RaySubmission:
        return RaySubmission.submit(plan, attempt)

    def attach(self, plan: Plan, token: Mapping[str, Any]) -> RaySubmission:
        return RaySubmission.attach(plan, token)


def _address(values: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, str]:
    """Of the cluster, and where it comes from."""
    if address := values.get("address"):
        return address, f"-O address={address}"
    if address := environ.get("RAY_ADDRESS"):
        return address, f"RAY_ADDRESS={address}"
    return "auto", "-O address and RAY_ADDRESS are not set, and none runs on this machine"


def ask(address: str, tried: str) -> dict[str, Any]:
    """What the cluster has (``client.inventory``). Raises ``LaunchError`` that says what was tried."""
    hint = "`ray start --head` starts one; -O address=HOST:PORT names one that this machine is a node of"
    host, found, port = address.rpartition(":")
    try:
        if found and port.isdecimal() and "/" not in host:  # Ray itself would try for a minute
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        done = subprocess.run(
            [sys.executable, "-m", CLIENT, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environ() | IMPATIENT,
            timeout=PROBE_SECONDS,
            cwd="/",
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1] if done.stdout else b"")
    except OSError as error:
        raise LaunchError(f"no Ray cluster answers ({tried}): {error.strerror or error}", hint) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"no Ray cluster has answered within {PROBE_SECONDS:g} s ({tried})", hint) from None
    except ValueError:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        said = re.sub(r"^\[.*?\] \S+ ", "", said).partition(". ")[0]  # Ray's log line, its first sentence
        raise LaunchError(f"no Ray cluster answers ({tried}): {said}", hint) from None
    if "error" in answer:
        raise LaunchError(f"no Ray cluster answers ({tried}): {answer['error']}", hint)
    return answer


def _node(facts: Mapping[str, Any], kind: str | None) -> Node:
    """GPUs of another ``kind`` do not count."""
    fits = kind is None or open_gpu(0, facts["kind"]).is_a(kind)
    return Node(facts["name"], facts["cores"], facts["gpus"] if fits else 0, facts["kind"])
