"""A Slurm of its own: the controller on this machine, and one slurmd on each host of a bed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jupyter_torchdist.client import Job
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import PATH
from tests.cluster.layout import CALLER
from tests.leaks import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
PATIENCE = 30.0

CONF = """\
ClusterName=torchdist
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
ReturnToService=2
EnforcePartLimits=ALL
MpiDefault=none
KillWait=10
SlurmdTimeout=30
MinJobAge=60
GresTypes=gpu
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP
PartitionName=small Nodes=node1 MaxTime=10 AllowAccounts=rich State=UP
PartitionName=bare Nodes=node1 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 State=UP
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if not shutil.which(name, path=f"{PATH}:{os.environ.get('PATH', '')}")]


class Slurm:
    """``directory`` has a short path, and all hosts of ``bed`` see it."""

    def __init__(self, bed: Cluster, directory: Path) -> None:
        self.bed = bed
        self.directory = directory
        self.conf = directory / "slurm.conf"
        self._started: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        """Start all of it; returns when the nodes wait for jobs."""
        (self.directory / "state").mkdir()
        (self.directory / "munge.key").write_bytes(os.urandom(1024))
        (self.directory / "munge.key").chmod(0o400)
        with socket.socket() as any_socket:
            any_socket.bind(("", 0))
            port = any_socket.getsockname()[1]
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={self.bed.address(node)} CPUs=4 CoresPerSocket=4 RealMemory=4000 Gres=gpu:2"
            for node in self.bed.nodes
        )
        address = self.bed.address(CALLER)
        host = socket.gethostname().partition(".")[0]
        self.conf.write_text(CONF.format(host=host, address=address, port=port, nodes=nodes, directory=self.directory))
        (self.directory / "gres.conf").write_text(f"NodeName={','.join(self.bed.nodes)} Name=gpu File=/dev/tty[1-2]\n")
        files = {name: self.directory / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        words = [f"--{name}-file={path}" for name, path in files.items() if name != "socket"]
        key = f"--key-file={self.directory}/munge.key"
        self._start("munged", ["munged", "--foreground", "--force", key, f"--socket={files['socket']}", *words])
        assert wait_until(files["socket"].exists, PATIENCE), self.told("munged")
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        for node in self.bed.nodes:
            self.start_node(node)
        assert wait_until(lambda: self.idle() == len(self.bed.nodes), PATIENCE), self.told("slurmctld")

    def start_node(self, node: str) -> None:
        log = self.directory / f"{node}.log"
        self.bed.run(node, "slurmd", "-N", node, "-f", str(self.conf), "-L", str(log))

    def _start(self, name: str, command: Sequence[str]) -> None:
        with open(self.directory / f"{name}.out", "wb") as log:
            self._started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PATH": f"{os.environ['PATH']}:{PATH}", "SLURM_CONF": str(self.conf)},
                    start_new_session=True,
                )
            )

    def told(self, name: str) -> str:
        return (self.directory / f"{name}.out").read_text()

    def run(self, *command: str) -> str:
        """What a command of Slurm prints on this machine."""
        environ = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE)
        return done.stdout.strip() if not done.returncode else done.stderr

    def idle(self) -> int:
        """How many nodes wait for jobs."""
        words = self.run("sinfo", "-h", "-p", "debug", "-o", "%t %D").split()
        return sum(int(count) for state, count in zip(words[::2], words[1::2], strict=False) if state == "idle")

    def queue(self) -> list[str]:
        """Jobs that wait, run, or are about to end: number, name, state."""
        return self.run("squeue", "-h", "-o", "%i %j %T").splitlines()

    def number(self, job: Job) -> str:
        """Of the job in Slurm."""
        return str(next(event.data["token"]["job"] for event in job.events() if event.kind == "job.launched"))

    def occupy(self, partition: str = "debug") -> str:
        """A job of somebody else that has all cores of both nodes: its number. ``urgent`` takes them from others."""
        words = ("--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000", f"--partition={partition}")
        number = self.run("sbatch", "--parsable", *words)
        running = f"{number} wrap RUNNING"
        assert wait_until(lambda: running in self.queue(), PATIENCE), self.queue()
        return number

    def steps(self) -> list[str]:
        return self.run("squeue", "-h", "--steps", "-o", "%i %j").splitlines()

    def left_on(self, node: str) -> list[str]:
        """One line for each process of a job there."""
        daemons = ("slurmd ", "slurmstepd: [", "sleep 1000000")
        found = self.bed.processes(node).items()
        lines = [f"{node}: process {pid}: {said}" for pid, said in found if not said.startswith(daemons)]
        return [*lines, *self.bed.run(node, "find", "/tmp/torchdist-0", "-mindepth", "1", check=False).stdout.split()]

    def clear(self) -> None:
        """End what tests left."""
        self.run("scancel", "--user=root")
        assert wait_until(lambda: self.idle() == len(self.bed.nodes), PATIENCE), self.run("sinfo")
        for node in self.bed.nodes:
            self.bed.run(node, "rm", "-rf", "/tmp/torchdist-0")

    def down(self) -> None:
        """End the controller; a slurmd ends with its host."""
        for process in reversed(self._started):
            process.terminate()
            process.wait()


if __name__ == "__main__":  # by hand
    import tempfile

    from tests.cluster import node_python

    place = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    made = place / "s"
    made.mkdir()
    here = Path(tempfile.mkdtemp(prefix="bed-", dir="/tmp"))
    cluster = Cluster.up(here / "c", 2, python=node_python.make(here / "python"), shared=[made])
    slurm = Slurm(cluster, made)
    try:
        slurm.up()
        print(f"export SLURM_CONF={slurm.conf}", flush=True)
        sys.stdin.read()
    finally:
        slurm.down()
        cluster.down()
        shutil.rmtree(place)
        shutil.rmtree(here)
