"""A driver's connection, as the agent has it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..protocol.paths import scratch_dir
from ..protocol.process import ProcessId
from ..protocol.wire import messages
from ..protocol.wire.channel import Channel
from .replica import Incoming
from .tail import Shipment


@dataclass
class Peer:
    """One driver's connection."""

    channel: Channel
    process: ProcessId | None = None
    job: str | None = None
    shipments: dict[str, Shipment] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    incoming: Incoming = field(default_factory=Incoming)
    login: messages.Login | None = None
    """Of a connection from another machine."""
    name: str = field(default_factory=partial(secrets.token_hex, 8))

    @property
    def environ(self) -> Mapping[str, str]:
        return self.login.environ if self.login else os.environ

    @property
    def scratch(self) -> Path:
        return scratch_dir(self.environ)
