"""A Ray cluster on the nodes of a job: rank 0 runs the user's function as its driver; it ends with the function."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..protocol.errors import UserError
from . import api

START_SECONDS = 90.0
"""How long the nodes may take to join."""
STOP_SECONDS = 10.0
PAUSE = 0.2


def drive(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Called by every rank. The value of ``function`` on rank 0, None elsewhere.

    The first rank of each node starts Ray there. ``RAY_ADDRESS`` is set while the function runs. Raises ``UserError``
    where Ray is not installed or does not start.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"ray is not installed on {socket.gethostname()}", f"{sys.executable} -m pip install ray")
    address = api.gather(_free_address() if api.rank == 0 else "")[0]
    nodes = len(set(api.gather(api.node_rank)))
    board = _Board()
    with ExitStack() as stack:
        stack.callback(board.end)
        if api.local_rank == 0:
            stack.enter_context(current_cluster_kept(address))
            stack.enter_context(closing(_Node(address)))
        if api.rank != 0:
            board.wait()
            return None
        os.environ["RAY_ADDRESS"] = address
        stack.callback(os.environ.pop, "RAY_ADDRESS", None)
        ray: Any = importlib.import_module("ray")
        stack.callback(ray.shutdown)
        _wait_for_nodes(ray, address, nodes)
        return function(*args, **kwargs)


@contextmanager
def current_cluster_kept(address: str) -> Iterator[None]:
    """Put back what Ray's file of this machine said: ``ray start`` writes its address there, and leaves it at its end.

    Without, the next ``ray.init()`` of the user would look for a cluster that is gone.
    """
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray 2.60 chooses it
    file = Path(folder, "ray", "ray_current_cluster")
    before = _content(file)
    try:
        yield
    finally:
        port = address.rpartition(":")[2]  # Ray may write another address of the same host
        with suppress(OSError):
            if _content(file).endswith(f":{port}"):
                file.write_text(before) if before else file.unlink()


def _content(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


class _Node:
    """Ray's processes of this node, as children of this rank."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        place = ["--head", f"--node-ip-address={host}", f"--port={port}"] if api.rank == 0 else [f"--address={address}"]
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        words = [
            *("start", "--block", "--disable-usage-stats", "--include-dashboard=false"),
            *place,
            f"--num-gpus={len(gpus.split(',')) if gpus else 0}",
        ]
        if api.rank:
            words.remove("--include-dashboard=false")
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *words],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class _Board:
    """Where rank 0 tells the others, through torchrun's store, that the function has ended."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self._key = f"torchdist/ray/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def end(self) -> None:
        if api.rank == 0:
            self._store.set(self._key, "ended")

    def wait(self) -> None:
        while not self._store.check([self._key]):
            time.sleep(PAUSE)


def _free_address() -> str:
    host = os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def _wait_for_nodes(ray: Any, address: str, nodes: int) -> None:
    """Until every node is part of the cluster. This process then stays connected to it."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            alive = sum(bool(node["Alive"]) for node in ray.nodes())
        except ConnectionError:
            alive = 0
        if alive >= nodes:
            ray.init = functools.partial(ray.init, ignore_reinit_error=True)  # the user's own call joins, too
            return
        ray.shutdown()
        if time.monotonic() > deadline:
            raise UserError(
                f"{alive} of {nodes} nodes have joined Ray at {address} within {START_SECONDS:g} s",
                "look at the log of the first rank of each node, and whether the nodes reach each other",
            )
        time.sleep(PAUSE)
