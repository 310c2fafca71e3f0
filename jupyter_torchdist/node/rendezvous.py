"""A static rendezvous whose store listens only on the address that the plan chose, never on all addresses.

Registered with torch elastic as the backend ``torchdist``. The first node binds a free port, or the port of
``--master-port``, and passes the descriptor to ``TCPStore`` (``master_listen_fd``). The other nodes receive address
and port.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from ..protocol.errors import LaunchError

BACKEND = "torchdist"

TIMEOUT = timedelta(minutes=10)

REACH_SECONDS = 5.0
"""How long another node tries to connect to the store, which listens: a firewall that drops packets says nothing."""

_FORKED = "torchdist-forked"
"""Key of the store. It is set once all ranks exist on the node where the store listens."""


class StaticRendezvous(RendezvousHandler):
    """``names`` are what the user calls the nodes.

    ``endpoint`` is the (address, port) of the first node. It is None on the first node, which listens at ``own``.

    Port 0 of ``own`` stands for a free port. ``announce(address, port)`` is called once the store listens.

    The store has a thread in the first node's launcher. The thread asks the C library for the host name of each peer
    that connects, and the C library holds a lock meanwhile. A rank forked at that moment inherits the locked lock and
    hangs at its own first look-up. So ranks connect only when all of them exist (``step_in``, ``wait_for_all``,
    ``all_forked``).
    """

    def __init__(
        self,
        run_id: str,
        node_rank: int,
        names: Sequence[str],
        own: tuple[str, int],
        endpoint: tuple[str, int] | None,
        announce: Callable[[str, int], None],
    ) -> None:
        self._run_id = run_id
        self._node_rank = node_rank
        self._names = names
        self._address, self._port = own
        self._endpoint = endpoint
        self._announce = announce
        self._store: Store | None = None
        self.listen_fd = -1
        """Descriptor of the store's listening socket. Forked ranks inherit it and close it."""
        self._is_first = endpoint is None
        self._gate = os.pipe()

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = self._listen() if self._endpoint is None else self._connect(*self._endpoint)
        assert self._endpoint is not None
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, self._node_rank, len(self._names), RendezvousStoreInfo(*self._endpoint))

    def step_in(self) -> None:
        """Called first in a forked rank: close the descriptors that belong to the launcher."""
        os.close(self._gate[1])
        if self.listen_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.listen_fd)

    def wait_for_all(self) -> None:
        """Wait until a forked rank may connect to the store."""
        os.read(self._gate[0], 1)
        os.close(self._gate[0])

    def all_forked(self) -> None:
        """Call when the ranks of this node exist. Waits for the ranks of the first node, then lets ours connect."""
        assert self._store is not None
        if self._is_first:
            self._store.set(_FORKED, "")
        else:
            self._store.wait([_FORKED], TIMEOUT)
        os.close(self._gate[1])

    def _listen(self) -> Store:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(self._port > 0))
            listener.bind((self._address, self._port))
            listener.listen(1024)
            port = int(listener.getsockname()[1])
            # The store closes its descriptor, so it gets a duplicate.
            self.listen_fd = os.dup(listener.fileno())
        store = TCPStore(
            self._address,
            port,
            None,
            True,
            TIMEOUT,
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=self.listen_fd,
        )
        self._endpoint = (self._address, port)
        self._announce(self._address, port)
        return store

    def _connect(self, address: str, port: int) -> Store:
        try:
            socket.create_connection((address, port), REACH_SECONDS).close()
        except OSError as error:
            raise LaunchError(
                f"{self._names[self._node_rank]} cannot reach {self._names[0]}'s store at {address}:{port}: "
                f"{error.strerror or error}; a firewall between them must let the hosts' ports through, "
                "or name another order of --hosts"
            ) from None
        return TCPStore(address, port, None, False, TIMEOUT, wait_for_workers=False)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """A static rendezvous has nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register(make: Callable[[RendezvousParameters], RendezvousHandler]) -> None:
    """Register ``make`` as the factory of the backend ``torchdist`` in this process. A second call replaces it."""
    registry: Any = rendezvous_handler_registry
    registry._registry.pop(BACKEND, None)
    registry.register(BACKEND, make)


class NoLogs(LogsSpecs):
    """Ranks open their own log files: torch neither redirects nor tails output.

    By default torch tails even ``/dev/null``, with threads that take 0.1 s to end and that already run at the fork.
    """

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=dict(nowhere), stderrs=dict(nowhere), error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return os.devnull
