"""What a test may leave on a cluster: the agent and its warm processes. Everything else is told, and ended."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from jupyter_torchdist.node.unattended.neighbours import LAST_WORDS_SECONDS
from tests.cluster.cluster import Cluster
from tests.leaks import command_of, is_warm, open_files, wait_until

PATIENCE = LAST_WORDS_SECONDS + 15.0
"""Seconds that processes on the hosts have to end after their test."""


def masters(cluster: Cluster) -> list[Path]:
    """Control sockets of this machine's ``ssh`` that keep a connection to a host of this cluster."""
    network = bytes((cluster.layout.number, 77, 10)).hex().upper()  # as /proc/net/tcp has it: back to front
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = {f"socket:[{row[9]}]" for row in rows if row[2][2:8] == network}
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        title = re.fullmatch(r"ssh: (.+) \[mux\]", command_of(int(entry)))
        if title and ours.intersection(open_files(int(entry))):
            found.append(Path(title[1]))
    return found


def end_masters(cluster: Cluster) -> None:
    for control in masters(cluster):
        subprocess.run(["ssh", "-O", "exit", "-S", str(control), "any"], capture_output=True)
    wait_until(lambda: not masters(cluster), PATIENCE)


def left_on(cluster: Cluster, node: str) -> list[str]:
    """One line for each process and port that should not be there."""
    found = {pid: command for pid, command in cluster.processes(node).items() if not is_warm(pid)}
    lines = [f"{node}: process {pid}: {command}" for pid, command in found.items()]
    return lines + [f"{node}: port {port} is open" for port in cluster.listening(node)]


def reset(cluster: Cluster, patience: float = PATIENCE) -> list[str]:
    """All hosts on and no faults. Returns what was left on them; a host with that was started anew."""
    cluster.heal()
    end_masters(cluster)
    cluster.start(*cluster.nodes)
    wait_until(lambda: not any(left_on(cluster, node) for node in cluster.nodes), patience)
    left = {node: lines for node in cluster.nodes if (lines := left_on(cluster, node))}
    for node in left:
        cluster.kill(node)
    cluster.start(*left)
    return [line for lines in left.values() for line in lines]
