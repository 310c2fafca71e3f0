"""``--hosts``: one channel per host. Those of a notebook stay open, so that its hosts stay warm for the next cell."""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...protocol.errors import ChannelError, LaunchError
from ...protocol.hosts import Host, hosts_of
from ...protocol.plan import Inventory, NodePlan
from ...protocol.process import ProcessId
from ...protocol.spec import Options
from ...protocol.wire import messages, reports
from ...protocol.wire.channel import Channel
from ..base import ChannelPerNode
from .connection import SshChannel
from .forward import Forward, forwarded

PROBE_SECONDS = 60.0
"""How long a probe waits for all hosts: the first connection sends our code and starts the agent."""

LOOK = "look with `ssh HOST true` in a terminal"

ANSWER_SECONDS = 5.0
"""A connection that ends before this time is opened once more, as is one of an earlier probe that says nothing."""


class SshLauncher(ChannelPerNode):
    """The nodes are hosts by the names that ``ssh`` knows. None of them sees the driver's disk."""

    def __init__(self) -> None:
        self._connected: set[str] = set()
        """Nodes that ``connect`` was called for."""

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        hosts = hosts_of(options.hosts, options.host_option)
        if not hosts:
            raise LaunchError("--launcher ssh needs hosts", "write --hosts HOST,HOST")
        return probe(hosts, warm=not options.env_sync)

    def connect(self, node: NodePlan) -> Channel:
        """Through the forwarded socket at first; later, when that has broken or was closed at once, by a session."""
        first = node.name not in self._connected
        self._connected.add(node.name)
        if first and node.reach.forward:
            with contextlib.suppress(OSError, ChannelError):
                return forwarded(node.reach)
        return SshChannel(node.host, node.reach)

    def shared(self, node: NodePlan) -> bool:
        return False


class Asked:
    """The question to one host. Afterwards it has either ``said`` something, or there is an ``error``."""

    def __init__(self, host: Host, verb: str, questions: Sequence[dict[str, Any]]) -> None:
        self.host = host
        self.said: messages.Welcome | reports.Removed | reports.Examined | messages.Copied | None = None
        self.error: LaunchError | ChannelError | None = None
        self.clock = 0.0
        """How many seconds its clock is ahead of ours, less the way of the answer."""
        self._verb = verb
        self._questions = questions
        kept = _kept.pop(host, None) if verb == "relay" else None
        self.kept = kept is not None
        self._again_until = time.monotonic() + ANSWER_SECONDS
        self.channel = kept or self._connect()

    @property
    def inventory(self) -> Inventory:
        """Of a host that has said ``Welcome``."""
        assert isinstance(self.said, messages.Welcome)
        return replace(
            Inventory.from_json(self.said.inventory),
            host=self.host.name,
            addresses=self.said.addresses,
            reach=replace(self.host.reach, python=self.said.interpreter),
            slots=self.host.slots,
        )

    def forwarded(self) -> Inventory:
        """The inventory, with a way to the agent for drivers."""
        assert isinstance(self.said, messages.Welcome)
        if self.host not in _forwards:
            _forwards[self.host] = Forward(self.host.name, self.said.socket)
        forward, found = _forwards[self.host], self.inventory
        if not forward.ready():
            return found
        return replace(found, reach=replace(found.reach, forward=str(forward.path), login=self.said.login))

    def _connect(self) -> SshChannel:
        if self._verb == "relay":
            _forwards.pop(self.host, None)  # of a connection that may have ended
        return SshChannel(self.host.name, self.host.reach, self._verb)

    def ask(self) -> None:
        with contextlib.suppress(ChannelError):  # ``listen`` sees the end
            for question in self._questions:
                self.channel.send(question)

    def silent(self) -> bool:
        """Whether the connection of an earlier probe has died unseen."""
        return self.said is None and self.kept and time.monotonic() > self._again_until

    def again(self) -> None:
        """Over a new connection, once."""
        self.channel.close()
        self.kept, self._again_until = False, 0.0
        self.channel = self._connect()
        self.ask()

    def listen(self) -> None:
        try:
            for message, _ in self.channel.receive():
                said = messages.understood(messages.AGENT_SAYS, message)
                if isinstance(said, (messages.Welcome, reports.Removed, reports.Examined, messages.Copied)):
                    self.said = said
                if isinstance(said, messages.Welcome):
                    self.clock = said.clock - time.time()
        except LaunchError as error:
            self.error = error
        except (EOFError, ChannelError) as error:
            if self.said is not None:
                return
            if self.kept or time.monotonic() < self._again_until:
                self.again()
            else:
                self.error = error if isinstance(error, ChannelError) else ChannelError(f"{self.host.name} is gone")


_kept: dict[Host, SshChannel] = {}
_forwards: dict[Host, Forward] = {}


@atexit.register
def let_go() -> None:
    """Close the kept channels."""
    for kept in (_kept, _forwards):
        while kept:
            kept.popitem()[1].close()


def probe(hosts: Sequence[Host], *, warm: bool = True) -> tuple[Inventory, ...]:
    """The inventories, in order, with software. Raises ``LaunchError`` that names all that failed."""
    return tuple(one.forwarded() for one in _all_well(ask(hosts, software=True, warm=warm)))


def _all_well(asked: list[Asked]) -> list[Asked]:
    errors = [one.error for one in asked if one.error]
    if errors:
        hints = [error.hint for error in errors if error.hint]
        raise LaunchError("\n".join(error.message for error in errors), (hints or [LOOK])[0])
    return asked


def ask(hosts: Sequence[Host], *, software: bool = False, warm: bool = False) -> list[Asked]:
    """What each host has, in order. ``warm``: it also has a warm process ready soon."""
    questions: list[dict[str, Any]] = [{"type": "hello", "process": ProcessId.mine().to_json(), "software": software}]
    return _ask_all(hosts, "relay", [*questions, {"type": "warm"}] if warm else questions)


def copies(hosts: Sequence[Host], job: str) -> list[tuple[Inventory, messages.Copied]]:
    """What each host has, and has of the job. Raises ``LaunchError`` that names all that failed."""
    found = [one.forwarded() for one in _all_well(ask(hosts))]
    copied = [one.said for one in _all_well(_ask_all(hosts, "relay", [{"type": "copy", "job": job}]))]
    return [(one, said) for one, said in zip(found, copied, strict=True) if isinstance(said, messages.Copied)]


def remove(hosts: Sequence[Host]) -> list[Asked]:
    """End the agents of each host and delete what is ours there (``node/removal.py``)."""
    let_go()
    return _ask_all(hosts, "remove", [])


def examine(hosts: Sequence[Host]) -> list[Asked]:
    """Facts about each host (``node/examine.py``)."""
    return _ask_all(hosts, "examine", [])


def _ask_all(hosts: Sequence[Host], verb: str, questions: Sequence[dict[str, Any]]) -> list[Asked]:
    """Ask all hosts at once."""
    asked: list[Asked] = []
    try:
        asked += [Asked(host, verb, questions) for host in hosts]
        for one in asked:
            one.ask()
        for answer in _answers(asked):
            if verb == "relay":
                _kept[answer.host] = answer.channel
    finally:
        for one in asked:
            if one.channel is not _kept.get(one.host):
                one.channel.close()
    for one in asked:
        if one.said is None and one.error is None:
            one.error = LaunchError(f"{one.host.name} did not answer within {PROBE_SECONDS:g} s", LOOK)
    return asked


def _answers(asked: Sequence[Asked]) -> Iterator[Asked]:
    """Each question whose host has answered, as soon as it has."""
    open_ones = list(asked)
    deadline = time.monotonic() + PROBE_SECONDS
    while open_ones and time.monotonic() < deadline:
        with selectors.DefaultSelector() as selector:
            for one in open_ones:
                selector.register(one.channel.read_fd, selectors.EVENT_READ, one)
                if one.channel.pending and one.channel.answered:
                    selector.register(one.channel.write_fd, selectors.EVENT_WRITE, one)
            for key, mask in selector.select(0.5):
                if mask & selectors.EVENT_READ:
                    key.data.listen()
                else:
                    with contextlib.suppress(ChannelError):
                        key.data.channel.flush()
        for one in open_ones:
            if one.silent():
                one.again()
            if one.said is not None:
                yield one
        open_ones = [one for one in open_ones if one.said is None and one.error is None]


def _forget_in_child() -> None:
    _kept.clear()
    _forwards.clear()


os.register_at_fork(after_in_child=_forget_in_child)
