"""What a node without the driver's disk gets before its part starts: files, blobs, directories, an environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...protocol.errors import ChannelError
from ...protocol.wire import messages
from .environments import Builds
from .incoming import Incoming
from .passing import Fetching, Passing
from .peer import Peer
from .replica import replica_blobs
from .synced import MARK


class Receiving:
    """For all drivers of an agent. ``peers`` are its connections at any time. ``warm`` has a warm process made.

    ``addresses`` finds the node's own for a login's environment.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        warm: Callable[[str, dict[str, str]], object],
        addresses: Callable[[Mapping[str, str]], Sequence[str]],
    ) -> None:
        self._peers, self._warm, self._addresses = peers, warm, addresses
        self._incoming: dict[Path, Incoming] = {}
        self._builds = Builds()
        self._passing = Passing()

    def fileno(self) -> int:
        """Ready when something has come from another node, or can be sent to it."""
        return self._passing.fileno()

    @property
    def pids(self) -> set[int]:
        """Processes that make environments."""
        return self._builds.pids

    @property
    def busy(self) -> bool:
        """Whether anything is on its way, or being made."""
        return self.moving or bool(self._builds.pids)

    @property
    def moving(self) -> bool:
        """Whether the next turn may have work."""
        return self._passing.busy or any(one.busy for one in self._incoming.values())

    def _of(self, peer: Peer) -> Incoming:
        blobs = replica_blobs(peer.scratch)
        return self._incoming.setdefault(blobs, Incoming(blobs))

    def prepare(self, peer: Peer, said: messages.Prepare) -> messages.Missing:
        """Store the job's files. The answer says what is to come."""
        missing = peer.prepare(said)
        incoming, blobs = self._of(peer), [name for name in missing if not name.startswith(MARK)]
        have = {name: size for name in blobs if (size := incoming.have(name))}
        have |= peer.synced.parts() if peer.synced else {}
        peer.asked, peer.awaited = frozenset(blobs), set(blobs)
        place = None
        if said.secret:
            digests, own = {*said.blobs, *said.wheels.values()}, [said.address] if said.address else []
            where = next(iter([*own, *self._addresses(peer.environ)]), "")
            place = self._passing.listen(said.job, where, replica_blobs(peer.scratch), said.secret, digests)
        built = peer.environment is not None and peer.environment.whole
        return messages.Missing(said.job, tuple(missing), built, have, place)

    def take(self, peer: Peer, said: messages.BlobPiece, body: bytes) -> None:
        """A piece from a driver. Raises ``OSError``: no room; ``ChannelError`` for what it was not asked for."""
        if said.digest in peer.asked:
            self._of(peer).take(said.digest, said.offset, body, said.last)
        elif not (peer.synced and said.digest.startswith(MARK)):
            raise ChannelError(f"a piece of {said.digest!r}, which nobody asked for")
        elif peer.synced.take(said.digest, said.offset, body, said.last):
            peer.channel.send({"type": "stored", "digest": said.digest, "right": True})

    def fetch(self, peer: Peer, said: messages.Fetch) -> None:
        """Get blobs from another node."""

        def tell(size: int, left: dict[str, int]) -> None:
            _say(peer, {"type": "fetched", **messages.Fetched(said.job, size, left).to_json()})

        place = (said.address, said.port)
        self._passing.fetch(id(peer), Fetching(place, said.secret, said.blobs, self._of(peer), tell))

    def build(self, peer: Peer, job: str) -> None:
        """Make the environment of the job's wheels, which are there."""
        if peer.environment:
            self._builds.want(peer.environment, id(peer), partial(self._built, peer, job))

    def _built(self, peer: Peer, job: str, why: str) -> None:
        _say(peer, {"type": "refused", "job": job, "reason": why} if why else {"type": "built", "job": job})
        if peer.environment and peer.login and not why:
            self._warm(peer.environment.python, peer.login.environ)

    def forget(self, peer: Peer) -> None:
        """Its job ends, or it is gone: nothing more is got or made for it."""
        if peer.synced:
            peer.synced.close()
        self._passing.forget(id(peer))
        if peer.asked:
            self._of(peer).release(peer.asked)
        self._builds.forget(id(peer))

    def turn(self, now: float) -> None:
        self._builds.turn()
        self._passing.turn(now)
        for blobs, incoming in self._incoming.items():
            for digest, right in incoming.turn():
                self._tell(blobs, digest, right)

    def _tell(self, blobs: Path, digest: str, right: bool) -> None:
        for peer in self._peers:
            if digest in peer.awaited and replica_blobs(peer.scratch) == blobs:
                peer.awaited -= {digest} if right else set()
                _say(peer, {"type": "stored", "digest": digest, "right": right})

    def close(self) -> None:
        self._passing.close()


def _say(peer: Peer, message: dict[str, Any]) -> None:
    """The agent looks itself whether the channel is broken."""
    with contextlib.suppress(ChannelError):
        peer.channel.send(message)
