"""What a node without the driver's disk writes, as it comes: copies in the driver's job directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..protocol.errors import ChannelError, StoreError
from ..protocol.paths import JobPaths, safe_name
from ..protocol.plan import NodePlan
from ..store.files import publish
from ..views.wording import first_few
from .crossing import Arriving


class Copies:
    """The files of one node. ``arriving``: captured data that the node may send, too."""

    def __init__(self, paths: JobPaths, node: NodePlan, arriving: Arriving) -> None:
        self._paths, self._node, self._arriving = paths, node, arriving

    def offsets(self) -> dict[str, int]:
        """Size of each of the node's files in the driver's job directory."""
        folders = [self._paths.node(self._node.name).root, self._paths.results]
        sizes = {
            str(file.relative_to(self._paths.root)): file.stat().st_size
            for folder in folders
            if folder.is_dir()
            for file in folder.iterdir()
            if not file.name.startswith(".")
        }
        work = self._paths.work / self._node.called
        written = (file for file in work.rglob("*") if file.is_file())
        return sizes | {f"{work.parent.name}/{file.relative_to(work)}": file.stat().st_size for file in written}

    def append(self, name: str, offset: int, data: bytes) -> None:
        """Append new bytes of a node's file to the driver's copy. Raises ``OSError`` when the disk is full."""
        path = self._arriving.path(name) or self._paths.root / self._place(name)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        except FileNotFoundError:
            if not self._paths.root.is_dir():  # deleted while the job runs: it is not made anew
                return
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            view = memoryview(data)
            while view and os.fstat(fd).st_size >= offset:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(fd)
        self._arriving.look(path)

    def _place(self, name: str) -> Path:
        """Where a file of the node is here, below the job's directory. Raises ``ChannelError``."""
        folder, _, file_name = name.rpartition("/")
        if folder in (f"nodes/{self._node.name}", "results"):
            return Path(folder, safe_name(file_name))
        top, *parts = name.split("/")
        if top != self._paths.work.name or not parts or {"", ".", ".."} & set(parts) or "\0" in name:
            raise ChannelError(f"{self._node.name} sent a file outside its directory")
        return Path(top, self._node.called, *parts)

    def of_the_cell(self, host: str) -> str:
        """A sentence on files that the cell wrote on the node and that are here now; empty if there are none.

        ``host``: the node's name by now. The directory keeps the plan's: an engine may give two nodes of one host.
        """
        place = self._paths.work / self._node.called
        files = sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())
        return f"files that the cell wrote on {host} are in {place}: {first_few(files)}" if files else ""

    def replace(self, name: str, data: bytes) -> None:
        """Replace the node's gauges. Nothing depends on them: when the disk is full, the old gauges remain."""
        gauges = self._paths.node(self._node.name).gauges
        if name != f"nodes/{self._node.name}/{gauges.name}":
            raise ChannelError(f"{self._node.name} sent a file that is not replaced")
        with contextlib.suppress(StoreError):
            publish(gauges, data)
