"""Verbs with ``--hosts``: ``nodes``, ``doctor``, ``stop``, ``attach``. The hosts that the user has written down."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ..client.job import Job, attach
from ..client.takeover import take_over
from ..diagnosis.hosts import FAULT, FINE, WARNING, Check, Facts, checks
from ..launchers.ssh import launcher
from ..protocol.errors import LaunchError, OptionError
from ..protocol.hosts import Host, hosts_of
from ..protocol.spec import Options
from ..protocol.wire import messages, reports
from ..views import host_text
from . import defaults
from .all_reduce import all_reduce
from .schema import Agent, Node, Problem, StoppedNode

DEPTH = 16
"""How deep files of ssh may include one another; ``ssh`` has the same limit."""


def nodes(arguments: argparse.Namespace) -> Iterator[Node]:
    """What each host has. A host that fails has its error."""
    for one in launcher.ask(_hosts(arguments)):
        if one.error is not None:
            yield Node(one.host.name, None, error=Problem.of(one.error))
        else:
            assert isinstance(one.said, messages.Welcome)
            agent = Agent.of(one.said.process.pid, one.said.jobs, one.said.warm)
            inventory = replace(one.inventory, software=None)
            yield Node(inventory.host, inventory, (agent,), one.clock, kept=one.said.kept)


def examine(arguments: argparse.Namespace) -> Iterator[Check]:
    """Facts about all hosts, judged; then an all-reduce over them. Hosts that fail are told, and left out of it."""
    hosts = _hosts(arguments)
    asked = list(zip(launcher.ask(hosts, software=True, warm=True), launcher.examine(hosts), strict=True))
    found: list[Facts] = []
    for one, answer in asked:
        error = one.error or answer.error
        if error is not None:
            why = host_text.why(one.host.name, error.message)
            yield Check("reached", FAULT, f"{one.host.name}: {why}", error.hint or launcher.LOOK)
        elif isinstance(answer.said, reports.Examined):
            found.append(Facts(one.inventory, answer.said, one.clock))
    if found:
        yield Check("reached", FINE, ", ".join(host.host for host in found))
    yield from checks(found)
    if len({host.build for host in found}) > 1:
        yield Check("all-reduce", WARNING, "not tried, as torch differs", "install one release, and ask again")
    elif found:
        yield all_reduce(found, arguments.host_option)


def stop(arguments: argparse.Namespace) -> Iterator[StoppedNode]:
    """What was ended and removed on each host, or why nothing was."""
    for one in launcher.remove(_hosts(arguments)):
        name = one.host.name
        if isinstance(one.said, reports.Removed) and not one.said.jobs:
            yield StoppedNode(name, one.said.warm, (), one.said.paths, one.said.kept)
        elif isinstance(one.said, reports.Removed):
            jobs = ", ".join(one.said.jobs)
            error = LaunchError(f"{name} runs job {jobs}; nothing was removed there", "cancel it, or wait")
            yield StoppedNode(name, jobs=one.said.jobs, error=Problem.of(error))
        elif one.error is not None:
            yield StoppedNode(name, error=Problem.of(one.error))


def attached(arguments: argparse.Namespace) -> Job:
    """The job of ``attach`` and ``rerun``. With ``--hosts`` it is fetched from there, if it is not here."""
    if not getattr(arguments, "hosts", None):
        return attach(arguments.job)
    options = _options(arguments)
    return take_over(arguments.job, hosts_of(options.hosts, options.host_option), options.host_option)


def raise_for(nodes: Iterable[StoppedNode]) -> None:
    """Raises ``LaunchError`` that names the hosts on which nothing was removed."""
    if failed := [node.error for node in nodes if node.error is not None]:
        hint = next((error.hint for error in failed if error.hint), launcher.LOOK)
        raise LaunchError("\n".join(error.message for error in failed), hint)


def _options(arguments: argparse.Namespace) -> Options:
    words = [f"--host-option={setting}" for setting in arguments.host_option]
    return defaults.options([f"--hosts={arguments.hosts}", *words], Path.cwd())


def _hosts(arguments: argparse.Namespace) -> tuple[Host, ...]:
    options = _options(arguments)
    return hosts_of(options.hosts, options.host_option)


def known(directory: Path) -> list[str]:
    """Hosts of ``~/.ssh/config`` and of the option files; then their groups, as ``@name``."""
    try:
        settings = defaults.load(directory).host_option
    except OptionError:
        settings = ()
    places = [text.partition("=")[0] for text in settings]
    groups = [place for place in places if place.startswith("@")]
    named = [place.rpartition(".")[0] for place in places if place not in groups]
    ssh = Path.home() / ".ssh"
    return list(dict.fromkeys([*filter(None, named), *_hosts_of_ssh(ssh / "config", ssh), *groups]))


def _hosts_of_ssh(path: Path, base: Path, depth: int = DEPTH) -> Iterator[str]:
    """The names after ``Host`` that are no patterns, in the file and in those that it includes (ssh_config(5))."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    except OSError:
        return
    for line in lines:
        try:
            keyword, *words = shlex.split(line.replace("=", " ", 1), comments=True) or [""]
        except ValueError:  # a quotation mark that nothing closes
            continue
        if keyword.lower() == "host":
            yield from (word for word in words if not set(word) & set("*?!"))
        elif keyword.lower() == "include" and depth:
            for word in words:
                pattern = (base / Path(word).expanduser()).relative_to("/")
                for file in sorted(Path("/").glob(str(pattern))):
                    yield from _hosts_of_ssh(file, base, depth - 1)
