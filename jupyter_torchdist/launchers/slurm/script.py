"""What Slurm is sent: the batch script of a job, and the process that waits on each node."""

from __future__ import annotations

import shlex
from typing import Any

from ...protocol.options.launcher import SLURM, launcher_values
from ...protocol.plan import Plan, open_kind
from ...protocol.spec import Options

WARNING_SECONDS = 30
"""Between the warning and the time limit, beyond the job's grace: for results and the last lines."""

LIMIT = "the time limit of Slurm: -O time=TIME asks for more"
"""How a job that Slurm's time limit ended is worded."""

HOLD = """\
umask 077
p=/tmp/torchdist-$(id -u); d=$p/{name}; s=$p/scratch-{name}
mkdir -p "$d" && [ -O "$p" ] && [ -O "$d" ] || {{ echo "$d belongs to another user" >&2; exit 1; }}
clean() {{
  wait; rm -rf "$d"
  find "$s" ! -type d ! -path "*/work/*" -delete; find "$s" -depth -type d -empty -delete
}}
trap "clean 2>/dev/null" EXIT; trap "exit 0" TERM INT
export TORCHDIST_RUNTIME_DIR="$d" TORCHDIST_SUCCESSORS=0
env -0 >"$d/environ"; mkfifo "$d/start"; exec 3<>"$d/start"
while :; do if read -r line <&3; then sh -c "$line" & fi; done"""
"""For sh. It runs what comes through the pipe, so that Slurm knows the agent and its ranks as the job's.

At its end all of the job is deleted but the files that its cell wrote. No warm process is kept for a next job.
"""

AWAIT = """\
p=/tmp/torchdist-$(id -u); d=$p/{name}; n=0
until [ -p "$d/start" ]; do n=$((n + 1)); [ $n -lt 250 ] || exit 1; sleep 0.1; done
export TORCHDIST_RUNTIME_DIR="$d" TORCHDIST_SCRATCH="$p/scratch-{name}"
"""
"""For the shell of a connection: until ``HOLD`` is there."""

BATCH = """\
#!/bin/sh
{lines}
# The process that waits on each node: the driver comes by `srun --overlap`, and starts an agent through it.
hold='{hold}'
srun {step} sh -c "$hold" &
holds=$!
# Before the time limit: the agents end the ranks with SIGTERM, so that they save.
trap 'srun {step} sh -c "echo {words} >/tmp/torchdist-\\$(id -u)/{name}/expiring"' USR1
while kill -0 $holds 2>/dev/null; do wait $holds; done
"""

SBATCH = ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude", "mem")
"""Options that sbatch has by the same name."""


def batch_script(plan: Plan, options: Options, cpus: int) -> str:
    """The script of a new allocation. ``cpus``: of each node."""
    values = launcher_values(options)
    settings: dict[str, Any] = {
        "job-name": job_name(plan.job),
        "nodes": len(plan.nodes),
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        **_gpus(plan),
        **{name: values[name] for name in SBATCH if name in values},
    }
    if "time" in values:
        settings["time"] = written_time(values["time"])
    settings |= {"signal": f"B:USR1@{warning(plan.grace, values.get('time'))}", "output": "/dev/null", "chdir": "/"}
    lines = [f"#SBATCH --{name}={value}" for name, value in settings.items()]
    lines += ["#SBATCH --exclusive"] if values.get("exclusive") else []
    lines += ["#SBATCH --no-requeue"]
    name = f"{SLURM}-$SLURM_JOB_ID"
    return BATCH.format(
        lines="\n".join(lines),
        hold=HOLD.format(name=name),
        name=name,
        words=LIMIT,
        step=shlex.join(step(plan, cpus)),
    )


def step_command(plan: Plan, allocation: str, cpus: int) -> str:
    """The command that starts the processes on the nodes of an allocation; ``submit`` adds their names."""
    nodes = ",".join(node.host for node in plan.nodes)
    return shlex.join(["srun", f"--jobid={allocation}", f"--nodelist={nodes}", *step(plan, cpus), "sh", "-c"])


def step(plan: Plan, cpus: int) -> list[str]:
    """Options of srun for one process on each node that has all of the job's cores and GPUs there."""
    settings: dict[str, Any] = {"nodes": len(plan.nodes), "ntasks-per-node": 1, "cpus-per-task": cpus, **_gpus(plan)}
    words = [f"--{name}={value}" for name, value in settings.items()]
    return ["--overlap", "--kill-on-bad-exit=0", "--wait=0", *words]


def job_name(job: str) -> str:
    return f"torchdist-{job}"


def warning(grace: float, limit: float | None) -> int:
    """Seconds before the time limit at which Slurm warns. Slurm looks every 30 s, and may warn that much earlier."""
    room = grace + WARNING_SECONDS if limit is None else min(grace + WARNING_SECONDS, limit / 10)
    return int(max(grace, room)) + 1


def written_time(seconds: int) -> str:
    """``2-03:04:05``, as Slurm writes it."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"


def _gpus(plan: Plan) -> dict[str, str]:
    """As many GPUs on each node as the fullest one needs, of the kind that the plan names."""
    kind = open_kind(gpu for node in plan.nodes for gpu in node.gpus)
    most = max(len(node.gpus) for node in plan.nodes)
    return {"gpus-per-node": f"{kind}:{most}" if kind else str(most)} if most else {}
