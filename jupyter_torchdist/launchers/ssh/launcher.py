"""``--hosts``: one channel per host. Those of a notebook stay open, so that its hosts stay warm for the next cell."""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...protocol.errors import ChannelError, LaunchError
from ...protocol.hosts import Host
from ...protocol.plan import Inventory, NodePlan
from ...protocol.process import ProcessId
from ...protocol.wire import messages
from ...protocol.wire.channel import Channel
from ..base import ChannelPerNode
from .connection import SshChannel

PROBE_SECONDS = 60.0
"""How long a probe waits for all hosts: the first connection sends our code and starts the agent."""

ANSWER_SECONDS = 5.0
"""A connection of an earlier probe that does not answer for this time is opened anew."""


class SshLauncher(ChannelPerNode):
    """The nodes are hosts by the names that ``ssh`` knows. None of them sees the driver's disk."""

    def probe(self, hosts: Sequence[Host], environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        if not hosts:
            raise LaunchError("--launcher ssh needs hosts", "write --hosts HOST,HOST")
        return probe(hosts)

    def connect(self, node: NodePlan) -> Channel:
        return SshChannel(node.host, node.reach)

    def shared(self, node: NodePlan) -> bool:
        return False


class _Probe:
    """The question to one host. ``answer`` is its inventory, ``error`` why there is none."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.answer: Inventory | None = None
        self.error: LaunchError | ChannelError | None = None
        kept = _kept.pop(host, None)
        self.kept_until = time.monotonic() + ANSWER_SECONDS if kept else None
        self.channel = kept or self._connect()
        self._ask()

    def _connect(self) -> SshChannel:
        return SshChannel(self.host.name, self.host.reach)

    def _ask(self) -> None:
        with contextlib.suppress(ChannelError):  # ``listen`` sees the end
            self.channel.send({"type": "hello", "process": ProcessId.mine().to_json()})
            self.channel.send({"type": "warm"})

    def again(self) -> None:
        """Over a new connection: the kept one has died unseen."""
        self.channel.close()
        self.kept_until = None
        self.channel = self._connect()
        self._ask()

    def listen(self) -> None:
        try:
            for message, _ in self.channel.receive():
                said = messages.understood(messages.AGENT_SAYS, message)
                if isinstance(said, messages.Welcome):
                    self.answer = self._inventory(said)
        except (EOFError, ChannelError, LaunchError) as error:
            if self.kept_until is not None:
                self.again()
            else:
                self.error = error if not isinstance(error, EOFError) else ChannelError(f"{self.host.name} is gone")

    def _inventory(self, said: messages.Welcome) -> Inventory:
        found = Inventory.from_json(said.inventory)
        host = self.host
        return replace(
            found,
            host=host.name,
            addresses=said.addresses,
            reach=replace(host.reach, python=said.interpreter),
            slots=host.slots,
        )


_kept: dict[Host, SshChannel] = {}


@atexit.register
def let_go() -> None:
    """Close the kept channels."""
    while _kept:
        _kept.popitem()[1].close()


def probe(hosts: Sequence[Host]) -> tuple[Inventory, ...]:
    """The inventories, in order; all hosts are asked at once. Raises ``LaunchError`` that names each silent host."""
    asked: list[_Probe] = []
    try:
        asked += [_Probe(host) for host in hosts]
        for answer in _answers(asked):
            _kept[answer.host] = answer.channel
    finally:
        for one in asked:
            if one.host not in _kept:
                one.channel.close()
    failed = [one for one in asked if one.answer is None]
    if failed:
        silent = f"did not answer within {PROBE_SECONDS:g} s"
        lines = [one.error.message if one.error else f"{one.host.name} {silent}" for one in failed]
        hints = [one.error.hint for one in failed if one.error and one.error.hint]
        raise LaunchError("\n".join(lines), (hints or ["look with `ssh HOST true` in a terminal"])[0])
    return tuple(one.answer for one in asked if one.answer)


def _answers(asked: Sequence[_Probe]) -> Iterator[_Probe]:
    """Each probe whose host has answered, as soon as it has."""
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
            if one.answer is None and one.kept_until is not None and time.monotonic() > one.kept_until:
                one.again()
            if one.answer is not None:
                yield one
        open_ones = [one for one in open_ones if one.answer is None and one.error is None]


def _forget_in_child() -> None:
    _kept.clear()


os.register_at_fork(after_in_child=_forget_in_child)
