"""A driver, as its connection has it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...protocol.machine import inventory
from ...protocol.paths import safe_name, scratch_dir
from ...protocol.plan import Inventory
from ...protocol.process import ProcessId
from ...protocol.wire import messages
from ...protocol.wire.channel import Channel
from .environments import Environment
from .keeping import kept, sweep, use
from .replica import prepare, replica_blobs, replica_paths
from .synced import Synced
from .tail import Shipment


@dataclass
class Peer:
    """One driver's connection."""

    channel: Channel
    process: ProcessId | None = None
    job: str | None = None
    driver: int = 1
    """The number of its machine, as in ``Plan``."""
    shipments: dict[str, Shipment] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    asked: frozenset[str] = frozenset()
    """Blobs that were missing."""
    awaited: set[str] = field(default_factory=set)
    """Of these, those that are not there."""
    synced: Synced | None = None
    environment: Environment | None = None
    """Of the job's ranks, with ``--env-sync``."""
    login: messages.Login | None = None
    """Of a connection from another machine."""
    name: str = field(default_factory=partial(secrets.token_hex, 8))

    def prepare(self, said: messages.Prepare) -> list[str]:
        """Make room for a job, and store its files. Returns what is to come: blobs, and files of ``--sync``."""
        blobs = [*said.blobs]
        if said.wheels and self.login:
            self.environment = Environment.of(self.scratch, self.login, said.wheels)
            blobs += [] if self.environment.whole else said.wheels.values()
        sweep(self.scratch, blobs)
        missing = prepare(self.scratch, said.job, said.files, blobs, said.store)
        if self.environment:
            self.environment.use(replica_paths(self.scratch, said.job).root)
        for digest in set(blobs).difference(missing):
            use(replica_blobs(self.scratch) / safe_name(digest))
        self.synced = Synced(self.scratch, replica_paths(self.scratch, said.job), said.trees, said.cwd)
        return missing + self.synced.missing()

    def give_up(self, job: str) -> None:
        """Another driver has the job now."""
        self.shipments.pop(job, None)
        self.job = None

    @property
    def environ(self) -> Mapping[str, str]:
        return self.login.environ if self.login else os.environ

    @property
    def scratch(self) -> Path:
        return scratch_dir(self.environ)

    def welcome(
        self, software: bool, warm: list[dict[str, Any]], jobs: list[str], place: str, addresses: list[str]
    ) -> dict[str, Any]:
        """The answer to ``hello``. ``place``: of the agent's socket."""
        return {
            "type": "welcome",
            "process": ProcessId.mine().to_json(),
            "inventory": self.inventory(software).to_json(),
            "warm": warm,
            "jobs": jobs,
            "addresses": addresses,
            "interpreter": self.login.python if self.login else "",
            "login": self.name if self.login else "",
            "socket": place,
            "clock": time.time(),
            "kept": kept(self.scratch).to_json() if self.login else {},
        }

    def inventory(self, software: bool) -> Inventory:
        """As the login sees this machine: its packages may be others than ours."""
        found = inventory.local_inventory(self.environ)
        if self.login is None:
            return found
        packages = inventory.software(self.login.path) if software else None
        return replace(found, python=self.login.release, torch=self.login.torch, software=packages)
