"""``--launcher slurm``: what the cluster has, the request, the submission."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...protocol.errors import LaunchError, OptionError, ResourceError
from ...protocol.hosts import settings_of_all
from ...protocol.options.launcher import launcher_values
from ...protocol.plan import Inventory, Plan, open_gpu
from ...protocol.spec import Options
from ...views.wording import count
from ..nodes import Node, check_gpus, cores_asked_for
from .commands import Commands
from .script import batch_script, job_name, step_command
from .submission import SlurmSubmission, StepSubmission, expanded

_CAUSES = (
    ("account|association", "account", "`sacctmgr show associations user=$USER` lists your accounts"),
    ("partition", "partition", "`sinfo -s` lists the partitions"),
    ("qos", "qos", "`sacctmgr show qos` lists them"),
    ("time limit", "time", "`sinfo -o '%P %l'` shows the limit of each partition"),
    ("feature", "constraint", "`sinfo -o '%N %f'` lists the features of the nodes"),
    ("reservation", "reservation", "`scontrol show reservations` lists them"),
    ("invalid node name", "nodelist", "`sinfo -N` lists the nodes"),
    (
        "node|memory|cpu|processors|gres",
        "nodes|cpus-per-task|gpus-per-node|mem",
        "`sinfo -o '%P %D %N %c %m %G'` shows what each partition has",
    ),
)
"""A pattern of Slurm's words, the options of sbatch that it is about, and where to look."""


class SlurmLauncher:
    """One agent on each node, in a new allocation or in the one that the notebook is in."""

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        values = launcher_values(options)
        commands = Commands(values.get("login", ""))
        if options.hosts:
            raise OptionError("--launcher slurm: Slurm chooses the nodes", "use -O nodelist=NODE,… instead of --hosts")
        commands.check()
        _check_time(options, values)
        allocation = _allocation(values, environ)
        nodes = _of_allocation(commands, allocation) if allocation else _of_partition(commands, values, options)
        where = f"allocation {allocation}" if allocation else _partition(values)
        wanted = options.nodes or (len(nodes) if allocation else 1)
        if wanted > len(nodes):
            raise ResourceError(f"--nodes {wanted}: {where} has {count(len(nodes), 'node')}", f"--nodes {len(nodes)}")
        nodes = nodes[:wanted]
        _check_gpus(options, nodes, where)
        return tuple(
            Inventory(
                host=node.name if allocation else "",
                cores=node.cores if allocation else cores_asked_for(node, options, values, wanted),
                memory=0,
                gpus=tuple(open_gpu(index, node.kind) for index in range(node.gpus)),
                numactl=True,  # nothing is known of them yet
                addresses=("",),
                reach=settings_of_all(options.host_option),
                allocation=allocation,
            )
            for node in nodes
        )

    def planned(self, plan: Plan, options: Options, inventories: Sequence[Inventory]) -> Plan:
        cpus = max(inventory.cores for inventory in inventories)
        plan = replace(plan, login=launcher_values(options).get("login", ""))
        if allocation := inventories[0].allocation:
            return replace(plan, allocation=allocation, request=step_command(plan, allocation, cpus))
        plan = replace(plan, request=batch_script(plan, options, cpus))
        _send(Commands(plan.login), plan.request, "--test-only")
        return plan

    def submit(self, plan: Plan, attempt: int) -> SlurmSubmission:
        if plan.allocation:
            return StepSubmission.start(plan, attempt)
        return SlurmSubmission(plan, _send(Commands(plan.login), plan.request, "--parsable").partition(";")[0])

    def attach(self, plan: Plan, token: Mapping[str, Any]) -> SlurmSubmission:
        if plan.allocation:
            return StepSubmission.find(plan, token)
        job, name = token.get("job"), job_name(plan.job)
        if not job:
            said = Commands(plan.login).run("squeue", "--noheader", f"--name={name}", "--sort=-i", "-o", "%A")
            job = said.partition("\n")[0]
        if not job:
            raise LaunchError(f"Slurm has no job {name}", "run the cell again")
        return SlurmSubmission(plan, job)


def _allocation(values: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """In which the job runs; empty for a new one. Raises ``OptionError`` for options of a new one inside another."""
    chosen = values.get("allocation", "")
    own = "" if "login" in values else environ.get("SLURM_JOB_ID", "")
    allocation = "" if chosen == "new" else chosen or own
    wrong = [name for name in values if name not in ("allocation", "login")]
    if allocation and wrong:
        raise OptionError(
            f"-O {wrong[0]} is for a new allocation, and this job runs inside allocation {allocation}",
            f"leave -O {wrong[0]} out, or add -O allocation=new",
        )
    return allocation


def _of_allocation(commands: Commands, job: str) -> list[Node]:
    """Raises ``LaunchError`` when it does not run."""
    said = commands.run("scontrol", "show", "job", job, "--oneliner")
    facts = dict(word.split("=", 1) for word in said.split() if "=" in word)
    if facts.get("JobState") != "RUNNING":
        raise LaunchError(
            f"allocation {job} does not run: {facts.get('JobState')}", "-O allocation=new asks for a new one"
        )
    names = expanded(commands, facts["NodeList"])
    resources = facts.get("AllocTRES") or facts.get("TRES", "")
    found = re.search(r"gres/gpu=(\d+)", resources)
    gpus = int(found[1]) // len(names) if found else 0
    return [Node(name, int(facts["NumCPUs"]) // len(names), gpus) for name in names]


def _of_partition(commands: Commands, values: Mapping[str, Any], options: Options) -> list[Node]:
    """Those with the most GPUs of the wanted kind first. Raises ``LaunchError`` when there is no such partition."""
    which = [f"--partition={values['partition']}"] if "partition" in values else []
    said = commands.run("sinfo", "--noheader", "--Node", *which, "-o", "%N|%c|%G|%P")
    rows = [line.split("|") for line in said.splitlines()]
    if not which and (default := [row for row in rows if row[3].endswith("*")]):
        rows = default
    if not rows:
        script = f"#!/bin/sh\n#SBATCH --partition={values.get('partition', '')}\n"
        _send(commands, script, "--test-only")  # Slurm says why
        raise LaunchError(f"{_partition(values)} has no nodes", "`sinfo -s` lists the partitions")
    nodes = [_node(name, cores, gres, options.gpu_type) for name, cores, gres, _ in rows]
    return sorted({node.name: node for node in nodes}.values(), key=lambda node: -node.gpus)


def _node(name: str, cores: str, gres: str, kind: str | None) -> Node:
    """``gpu:a100:8(S:0-1),gpu:t4:2`` are GPUs of two kinds. Those of another ``kind`` do not count."""
    found = [(one[1] or "gpu", int(one[2])) for one in re.finditer(r"gpu(?::([\w.-]*[A-Za-z_][\w.-]*))?:(\d+)", gres)]
    fits = [(named, count) for named, count in found if kind is None or open_gpu(0, named).is_a(kind)]
    named, count = max(fits or [("gpu", 0)], key=lambda one: one[1])
    return Node(name, int(cores.rstrip("+")), count, named)


def _check_time(options: Options, values: Mapping[str, Any]) -> None:
    if "time" in values and values["time"] <= 2 * options.grace:
        raise OptionError(
            f"-O time: a time limit of {values['time']} s leaves no time before the end for --grace {options.grace:g}s",
            "ask for more time, or a shorter --grace",
        )


def _check_gpus(options: Options, nodes: Sequence[Node], where: str) -> None:
    kind = options.gpu_type
    if kind is not None and not any(open_gpu(0, node.kind).is_a(kind) for node in nodes if node.gpus):
        raise ResourceError(
            f"no node of {where} has a GPU {kind}, as Slurm calls them",
            "`sinfo -o '%N %G'` shows the kinds of GPUs; leave --gpu-type out where they have none",
        )
    check_gpus(options, nodes, where, "-O partition=NAME names another")


def _partition(values: Mapping[str, Any]) -> str:
    return f"partition {values['partition']}" if "partition" in values else "the default partition"


def _send(commands: Commands, script: str, how: str) -> str:
    """What sbatch says. Raises ``LaunchError`` with its words, the line of the script, and where to look."""
    try:
        return commands.run("sbatch", how, text=script)
    except LaunchError as error:
        for pattern, options, look in _CAUSES:
            lines = [line for line in script.splitlines() if re.match(f"#SBATCH --({options})=", line)]
            if lines and re.search(pattern, error.message, re.IGNORECASE):
                which = ", ".join([lines[0], *(line.removeprefix("#SBATCH ") for line in lines[1:])])
                raise LaunchError(f"Slurm refuses {which}: {error.message}", look) from None
        raise LaunchError(f"Slurm refuses the job: {error.message}", error.hint) from None
