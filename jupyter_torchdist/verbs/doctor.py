"""Checks whether this machine has what a first job needs, and says what to do about each problem."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator

from ..diagnosis.hosts import FAULT, FINE, WARNING, Check
from ..protocol import releases
from ..protocol.errors import TorchDistError
from ..protocol.machine.inventory import local_inventory
from ..protocol.paths import home, make_private, runtime_dir
from ..protocol.plan import Inventory
from ..protocol.process import PROC
from ..protocol.wire import agents
from ..protocol.wire.channel import Channel
from ..protocol.wire.connect import connect_agent
from ..views import wording

FREE = 1_000_000_000
"""With fewer free bytes the disk of the data directory counts as nearly full."""
SHARED = 256_000_000
"""With fewer bytes in /dev/shm, DataLoader workers are likely to fail; containers often have 64 MB."""
SOCKET_PATH = 100
"""Longest path of a unix socket (sun_path has 104 bytes on macOS, 108 on Linux) without its file name."""
WARM_SECONDS = 60.0


def checks() -> Iterator[Check]:
    """Run the checks one by one; they leave no files behind."""
    inventory = local_inventory()
    yield _python()
    yield _torch(inventory)
    if PROC:
        yield _gpus(inventory)
    yield _data_directory()
    yield _runtime_directory()
    if not PROC:
        remedy = "name other machines: --hosts HOST; `%dist doctor --hosts HOST` checks them"
        yield Check("ranks", WARNING, "this machine can have none, because it has no /proc", remedy)
        return
    yield _shared_memory()
    yield _loopback()
    yield _warm_start()


def line(check: Check) -> str:
    """A check, with a remedy for each problem."""
    remedy = f"         → {check.remedy}\n" if check.remedy and check.level != FINE else ""
    found = check.found.replace("\n", "\n         ")
    return f"{check.level:<8} {check.name}: {found}\n{remedy}"


def summary(levels: list[str]) -> str:
    """The last line."""
    counts = [(levels.count(level), level) for level in (FAULT, WARNING)]
    return ", ".join(wording.count(count, level) for count, level in counts if count) or "all is well"


def _judged(name: str, ok: bool, found: str, remedy: str = "", level: str = FAULT) -> Check:
    return Check(name, FINE if ok else level, found, remedy)


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    ok = sys.version_info >= (3, 10) and sys.platform != "win32"
    return _judged("python", ok, found, "use Python 3.10 or newer on Linux or macOS; on Windows use WSL 2")


def _torch(inventory: Inventory) -> Check:
    if not inventory.torch:
        return _judged("torch", False, "not installed for this Python", f"{sys.executable} -m pip install torch")
    try:
        releases.check(inventory.torch)
    except TorchDistError as error:
        return _judged("torch", False, error.message, error.hint)
    ok = not (inventory.gpus and inventory.torch.endswith("+cpu"))
    return _judged(
        "torch",
        ok,
        inventory.torch,
        "this build has no CUDA: install a build with CUDA",
    )


def _gpus(inventory: Inventory) -> Check:
    if not inventory.gpus:
        return _judged("GPUs", True, "no GPU that this process can use; `--ranks N` runs on the CPU")
    words = [f"{gpu.index} {gpu.name} ({wording.size(gpu.memory - gpu.memory_used)} free)" for gpu in inventory.gpus]
    return _judged("GPUs", True, ", ".join(words))


def _data_directory() -> Check:
    root = home().root
    remedy = "make it writable, or set $TORCHDIST_HOME to another directory"
    try:
        make_private(root)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".doctor-"):
            free = shutil.disk_usage(root).free
    except OSError as error:
        return _judged("data directory", False, f"{root}: {error.strerror or error}", remedy)
    if free < FREE:
        remedy = "remove old jobs (`%dist rm --older 7d`), or set $TORCHDIST_HOME to a directory on a larger disk"
    return _judged("data directory", free >= FREE, f"{root}, {wording.size(free)} free", remedy)


def _runtime_directory() -> Check:
    path = runtime_dir()
    remedy = "set $TORCHDIST_RUNTIME_DIR to a short path on a local disk that belongs to you"
    try:
        make_private(path)
        with tempfile.TemporaryDirectory(dir=path, prefix="d") as directory, socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.join(directory, "s"))
    except OSError as error:
        return _judged("runtime directory", False, f"{path}: {error.strerror or error}", remedy)
    return _judged("runtime directory", len(os.fsencode(path)) < SOCKET_PATH - 30, str(path), remedy)


def _shared_memory() -> Check:
    if not os.path.isdir("/dev/shm"):
        return _judged("shared memory", True, "this system has no /dev/shm")
    size = shutil.disk_usage("/dev/shm").total
    remedy = "DataLoader workers may die of SIGBUS: start the container with --shm-size=1g or more"
    return _judged("shared memory", size >= SHARED, f"/dev/shm, {wording.size(size)}", remedy, WARNING)


def _loopback() -> Check:
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
    except OSError as error:
        return _judged("loopback", False, f"127.0.0.1: {error.strerror or error}", "bring the interface lo up")
    return _judged("loopback", True, "127.0.0.1 can be bound")


def _warm_start() -> Check:
    """Imports torch in a warm process, which checks that it has no threads that a fork would lose."""
    remedy = f"use --fresh; the log is in {runtime_dir()}"
    try:
        fd = connect_agent(sys.executable).detach()
        channel = Channel(fd, fd)
        try:
            ready = agents.warm_up(channel, sys.executable, dict(os.environ), WARM_SECONDS)
        finally:
            channel.close()
    except TorchDistError as error:
        return _judged("warm start", False, error.message, error.hint or remedy)
    if ready is None:
        return _judged("warm start", False, f"no warm process after {WARM_SECONDS:.0f} s", remedy)
    return _judged("warm start", True, f"process {ready['pid']} has torch imported and is safe to fork")
