"""A driver, as its connection has it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ...protocol.machine import inventory
from ...protocol.paths import safe_name, scratch_dir
from ...protocol.plan import Inventory
from ...protocol.process import ProcessId
from ...protocol.wire import messages
from ...protocol.wire.channel import Channel
from .keeping import sweep, use
from .replica import Incoming, prepare, replica_blobs, replica_paths
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
    incoming: Incoming = field(default_factory=Incoming)
    synced: Synced | None = None
    login: messages.Login | None = None
    """Of a connection from another machine."""
    name: str = field(default_factory=partial(secrets.token_hex, 8))

    def prepare(self, said: messages.Prepare) -> list[str]:
        """Make room for a job, and store its files. Returns what is to come: blobs, and files of ``--sync``."""
        sweep(self.scratch, said.blobs)
        missing = prepare(self.scratch, said.job, said.files, said.blobs, said.store)
        for digest in set(said.blobs).difference(missing):
            use(replica_blobs(self.scratch) / safe_name(digest))
        if self.synced:
            self.synced.close()
        self.synced = Synced(self.scratch, replica_paths(self.scratch, said.job), said.trees, said.cwd)
        return missing + self.synced.missing()

    def close(self) -> None:
        """Remove what has come only in part."""
        self.incoming.close()
        if self.synced:
            self.synced.close()

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

    def inventory(self, software: bool) -> Inventory:
        """As the login sees this machine: its packages may be others than ours."""
        found = inventory.local_inventory(self.environ)
        if self.login is None:
            return found
        packages = inventory.software(self.login.path) if software else None
        return replace(found, python=self.login.release, torch=self.login.torch, software=packages)
