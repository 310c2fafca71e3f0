"""A job that another machine takes over: the end of the driver here, or the captured data that comes from a node."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

from ..protocol.bundle import Blob
from ..protocol.errors import LaunchError, StoreError
from ..protocol.paths import Home, JobPaths, user_name
from ..protocol.plan import NodePlan, Plan
from ..protocol.wire import messages
from ..store.blobs import digest_of
from ..store.files import private
from ..store.jobdir import read_manifest


class TakenOver(LaunchError):
    """Another machine drives the job now."""


def driving(plan: Plan) -> dict[str, Any]:
    """Who drives the job, for its nodes."""
    return {"origin": f"{user_name(os.getuid())}@{socket.gethostname()}", "driver": plan.driver}


def refusal(said: messages.RefusedJob | messages.Replaced, node: NodePlan, plan: Plan) -> LaunchError:
    """Why a node does not do what it was told."""
    if isinstance(said, messages.RefusedJob):
        return LaunchError(
            f"{node.called} cannot run the job: {said.reason}", "free the resource and run the cell again"
        )
    hosts = ",".join(node.called for node in plan.nodes)
    back = f"`torchdist attach {plan.job} --hosts {hosts}` takes it back"
    return TakenOver(f"{said.by} has taken the job over, where it goes on; {back}")


class Arriving:
    """Captured data that comes from a node, where it is ``wanted``: the job was started by another machine."""

    def __init__(self, paths: JobPaths, *, wanted: bool) -> None:
        self._home = Home(paths.root.parents[1])
        self._folder = paths.root / "blobs"
        self._wanted: dict[str, Blob] = {}
        if wanted:
            with contextlib.suppress(StoreError):
                self._wanted = {blob.digest: blob for blob in read_manifest(paths).blobs}

    def missing(self) -> list[str]:
        """The digests that are to come."""
        return [digest for digest in self._wanted if not self._home.blob(digest).exists()]

    def path(self, name: str) -> Path | None:
        """Where the file ``blobs/DIGEST`` of the node is put together; None for other files."""
        folder, _, digest = name.partition("/")
        return self._folder / digest if folder == "blobs" and digest in self._wanted else None

    def look(self, path: Path) -> None:
        """Put the data in its place once all of it is here. Damaged data is removed, so that it is missing."""
        blob = self._wanted.get(path.name) if path.parent == self._folder else None
        if blob is None or path.stat().st_size < blob.size:
            return
        if digest_of(path) == blob.digest:
            private(self._home.blobs)
            path.rename(self._home.blob(blob.digest))
        else:
            path.unlink()
