"""``python -m tests.cluster up | ssh | exec | kill | … | down``: a cluster of hosts on this machine, by hand."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cluster import node_python
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import ENVIRON, ROOT, missing_programs, refused
from tests.cluster.layout import BedError

Verb = Callable[[Cluster, argparse.Namespace], object]

FAULTS: dict[str, tuple[tuple[str, ...], str, Verb]] = {
    "start": (("node",), "switch a host on", lambda cluster, a: cluster.start(a.node)),
    "kill": (("node",), "end its processes; peers know at once", lambda cluster, a: cluster.kill(a.node)),
    "poweroff": (("node",), "a power cut; peers hear nothing", lambda cluster, a: cluster.poweroff(a.node)),
    "unplug": (("node",), "pull its cable out", lambda cluster, a: cluster.link(a.node, up=False)),
    "plug": (("node",), "plug its cable in", lambda cluster, a: cluster.link(a.node, up=True)),
    "partition": (("one", "other"), "nothing gets across", lambda cluster, a: cluster.partition(a.one, a.other)),
    "delay": (("node", "ms"), "in each direction", lambda cluster, a: cluster.delay(a.node, float(a.ms))),
    "loss": (("node", "percent"), "in each direction", lambda cluster, a: cluster.loss(a.node, float(a.percent))),
    "limit": (("node", "mbit"), "in each direction", lambda cluster, a: cluster.limit(a.node, float(a.mbit))),
    "firewall": (("node", "port"), "drop what comes to it", lambda cluster, a: cluster.firewall(a.node, int(a.port))),
    "drop-ssh": (("node",), "end its ssh connections", lambda cluster, a: cluster.drop_ssh(a.node)),
    "heal": ((), "end all faults of the network", lambda cluster, a: cluster.heal()),
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description="Hosts on this machine. Needs root.")
    parser.add_argument("--directory", type=Path, default=ROOT / "out/cluster", help="its files (default: %(default)s)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start node1, node2, …")
    up.add_argument("nodes", type=int, nargs="?", default=3)
    up.add_argument(
        "--share", type=Path, nargs="*", default=[], help="folders that all hosts and this machine write to"
    )
    verbs.add_parser("ssh", help="as ssh does").add_argument("words", nargs=argparse.REMAINDER)
    execute = verbs.add_parser("exec", help="run a command on a host without ssh")
    execute.add_argument("node")
    execute.add_argument("command", nargs=argparse.REMAINDER, help="default: bash")
    for verb, (names, about, _) in FAULTS.items():
        parser_of_verb = verbs.add_parser(verb, help=about)
        for name in names:
            parser_of_verb.add_argument(name)
    verbs.add_parser("down", help="end all of it")
    return parser


def up(directory: Path, nodes: int, shared: list[Path]) -> None:
    if why := refused():
        raise BedError(f"no hosts on this machine: {why}")
    if missing := missing_programs():
        raise BedError(f"no {', '.join(missing)} here: make cluster")
    if (directory / "keeper.json").exists():
        down(directory)
    python = node_python.make(directory / "python")
    cluster = Cluster.up(directory, nodes, python=python, shared=[path.resolve() for path in shared], stays=True)
    print(f"{', '.join(cluster.nodes)} are up, with torch in {node_python.PLACE}/bin/python")
    print(f'for the shells and notebooks that shall know them: export PATH="{cluster.bin}:$PATH"')


def down(directory: Path) -> None:
    try:
        Cluster.load(directory).down()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    asked = arguments().parse_args()
    directory: Path = asked.directory
    if asked.verb == "up":
        up(directory, asked.nodes, asked.share)
    elif asked.verb == "down":
        down(directory)
    elif asked.verb == "ssh":
        program = Cluster.load(directory).bin / "ssh"
        os.execv(program, [str(program), *asked.words])
    elif asked.verb == "exec":
        command = Cluster.load(directory).command(asked.node, *(asked.command or ["bash"]))
        os.execvpe(command[0], command, {**ENVIRON, "TERM": os.environ.get("TERM", "dumb")})
    else:
        FAULTS[asked.verb][2](Cluster.load(directory), asked)


if __name__ == "__main__":
    try:
        main()
    except BedError as error:
        sys.exit(str(error))
