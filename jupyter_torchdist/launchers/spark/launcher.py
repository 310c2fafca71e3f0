"""``--launcher spark``: the nodes that a job asks for, the application's settings, the submission."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...protocol.errors import LaunchError, OptionError, ResourceError
from ...protocol.hosts import settings_of_all
from ...protocol.options.launcher import launcher_values
from ...protocol.plan import Inventory, Plan, open_gpu
from ...protocol.spec import Options
from .settings import VARIABLES, Settings, settings
from .submission import SparkSubmission

CONNECT_SECONDS = 5.0

CORES, GPUS = "spark.executor.cores", "spark.executor.resource.gpu.amount"

OWN = {
    "spark.dynamicAllocation.enabled": "false",
    "spark.speculation": "false",
    "spark.task.maxFailures": "1",
    "spark.stage.maxConsecutiveAttempts": "1",
}
"""What a barrier stage needs; a job that fails starts again as a new application (``--restarts``)."""

DEFAULT = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "600",
}
"""Unless ``-O`` says otherwise. The stage waits for its executors as long as Spark lets it, which is ten minutes."""


class SparkLauncher:
    """One agent on each node, below a task that has an executor for itself."""

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        _check_installed(environ)
        if options.hosts:
            raise OptionError("--launcher spark: Spark chooses the nodes", "leave --hosts out; --nodes N says how many")
        if options.gpu_type is not None:
            raise OptionError("--launcher spark: Spark does not say which GPUs it has", "leave --gpu-type out")
        values = launcher_values(options)
        found = settings(values, environ)
        _check_answers(found)
        nodes, gpus, cores = _size(options, values, found)
        node = Inventory(
            host="",
            cores=cores,
            memory=0,
            gpus=tuple(map(open_gpu, range(gpus))),
            numactl=True,
            addresses=("",),
            reach=settings_of_all(options.host_option),
            allocation=found.master,
        )
        return (node,) * nodes

    def planned(self, plan: Plan, options: Options, inventories: Sequence[Inventory]) -> Plan:
        found = settings(launcher_values(options), os.environ)
        tasks, cores = len(plan.nodes), str(inventories[0].cores)
        executors = {
            "spark.executor.instances": str(tasks),
            CORES: cores,
            "spark.task.cpus": cores,
            "spark.cores.max": str(tasks * int(cores)),
        }
        if gpus := max(len(node.gpus) for node in plan.nodes):
            executors |= {GPUS: str(gpus), "spark.task.resource.gpu.amount": str(gpus)}
        environ = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        python = environ.get("PYSPARK_PYTHON") or found.values.get("spark.pyspark.python")
        environ["PYSPARK_PYTHON"] = inventories[0].reach.python or python or sys.executable
        request = {
            "master": found.master,
            "tasks": tasks,
            "settings": DEFAULT | found.values | executors | OWN,
            "environ": environ,
        }
        return replace(plan, allocation=found.master, request=json.dumps(request, indent=1))

    def submit(self, plan: Plan, attempt: int) -> SparkSubmission:
        return SparkSubmission.submit(plan, attempt)

    def attach(self, plan: Plan, token: Mapping[str, Any]) -> SparkSubmission:
        return SparkSubmission.attach(plan, token)


def _check_installed(environ: Mapping[str, str]) -> None:
    if importlib.util.find_spec("pyspark") is None:
        raise LaunchError(
            f"--launcher spark needs the package pyspark, which is not installed in {sys.executable}",
            f"{sys.executable} -m pip install 'jupyter_torchdist[spark]'",
        )
    home = environ.get("JAVA_HOME", "")
    if shutil.which(f"{home}/bin/java" if home else "java", path=environ.get("PATH")) is None:
        raise LaunchError(
            "--launcher spark needs Java 17 or newer, and there is none: "
            + (f"JAVA_HOME={home} has no bin/java" if home else "JAVA_HOME is not set, and PATH has no java"),
            "install one, such as the package openjdk-17-jre-headless",
        )


def _check_answers(found: Settings) -> None:
    """Spark itself would try for a minute. Raises ``LaunchError`` with what was tried."""
    errors = []
    for host, port in re.findall(r"(?:^\w+://(?:https?://)?|,)(\[[^]]+\]|[^:,/]+):(\d+)", found.master):
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
            return
        except OSError as error:
            errors.append(f"{host}:{port}: {error.strerror or error}")
    if errors:
        raise LaunchError(
            f"no Spark master answers at {found.master} (from {found.source}): {'; '.join(errors)}",
            "-O master=spark://HOST:7077 names another; `start-master.sh` of Spark starts one",
        )


def _size(options: Options, values: Mapping[str, Any], found: Settings) -> tuple[int, int, int]:
    """How many nodes, and the GPUs and cores of each. Raises ``ResourceError``."""
    own = {name: int(found.values[name]) for name in (CORES, GPUS) if found.values.get(name, "").isdecimal()}
    if options.ranks is not None:
        fits = values.get("cpus") or own.get(CORES) or _cores_of_local(found.master) or options.ranks
        nodes = options.nodes or -(-options.ranks // fits)
        ranks = -(-options.ranks // nodes)
        return nodes, 0, values.get("cpus") or own.get(CORES) or ranks
    each = own.get(GPUS)
    if options.gpus is None and each is None:
        raise ResourceError(
            "--launcher spark: how many GPUs an executor has is not known",
            f"--gpus N, or -O {GPUS}=N with --nodes N; --ranks N for CPU ranks",
        )
    nodes = options.nodes or (-(-options.gpus // each) if options.gpus and each else 1)
    gpus = each or 0 if options.gpus is None else -(-options.gpus // nodes)
    return nodes, gpus, values.get("cpus") or own.get(CORES) or gpus


def _cores_of_local(master: str) -> int | None:
    """Of a worker of a cluster that Spark starts for the application."""
    found = re.fullmatch(r"local-cluster\[\d+,(\d+),\d+\]", master)
    return int(found[1]) if found else None
