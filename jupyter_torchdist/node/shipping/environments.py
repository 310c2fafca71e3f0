"""``--env-sync`` on a node: an environment on top of the login's Python, made of wheels that came as blobs.

It has a directory named by its content, and is made there once, whoever asks: a lock keeps others waiting. What was
made in part has no mark, and is made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...protocol import codec
from ...protocol.disk import size_of
from ...protocol.machine.packages import KEPT_SECONDS
from ...protocol.paths import make_private, safe_name
from ...protocol.typed import Record
from ...protocol.wire.messages import Login
from ...protocol.world import World
from .replica import replica_blobs, write_private

MARK = "whole"
"""The file that says that an environment is whole. Its text is the environment's size in bytes."""


@dataclass(frozen=True)
class Environment(Record):
    """What an environment is made of, and where it is."""

    place: str
    base: str
    """The interpreter below it."""
    path: tuple[str, ...]
    """The directories of that one's packages, which count after those of the wheels."""
    wheels: dict[str, str]
    """Digests by file name; one of them is the installer, which stays outside."""
    blobs: str

    @staticmethod
    def of(scratch: Path, login: Login, wheels: Mapping[str, str]) -> Environment:
        path = tuple(entry for entry in login.path if entry.endswith("-packages") and os.path.isdir(entry))
        content = [login.python, login.release, *path, *sorted(wheels.values())]
        digest = hashlib.sha256(codec.dumps(content).encode("ascii")).hexdigest()[:16]
        place = make_private(scratch / "envs") / digest
        return Environment(str(place), login.python, path, dict(wheels), str(replica_blobs(scratch)))

    @property
    def python(self) -> str:
        return os.path.join(self.place, "bin", "python")

    @property
    def whole(self) -> bool:
        return os.path.exists(os.path.join(self.place, MARK))

    def use(self, job_root: Path) -> None:
        """Note that the job needs it."""
        write_private(job_root / "environment", os.path.basename(self.place).encode("ascii"))
        with contextlib.suppress(OSError):
            os.utime(os.path.join(self.place, MARK))

    def world(self, world: World) -> World:
        """The world of a rank in it: its programs are found first, as after its ``activate``."""
        path = os.pathsep.join(filter(None, [os.path.dirname(self.python), world.environ.get("PATH")]))
        environ = {**world.environ, "VIRTUAL_ENV": self.place, "PATH": path}
        return replace(world, environ=environ, python=self.python)


# -- the agent's side


@dataclass
class Build:
    """A process that makes an environment, and whom to tell: ``tell`` is called with the reason, empty for none."""

    process: subprocess.Popen[bytes]
    said: Path
    waiting: dict[int, Callable[[str], None]] = field(default_factory=dict)


class Builds:
    """The environments that are being made."""

    def __init__(self) -> None:
        self._builds: dict[str, Build] = {}

    def want(self, environment: Environment, who: int, tell: Callable[[str], None]) -> None:
        """Have it made, unless it is there, and ``tell``. ``who`` is a number for ``forget``."""
        if environment.whole:
            tell("")
            return
        build = self._builds.get(environment.place)
        if build is None:
            said = Path(f"{environment.place}.log")
            with open(said, "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "jupyter_torchdist.node", "environment"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                )
            assert process.stdin is not None
            process.stdin.write(codec.dumps(environment.to_json()).encode("ascii"))
            process.stdin.close()
            build = self._builds[environment.place] = Build(process, said)
        build.waiting[who] = tell

    def forget(self, who: int) -> None:
        """Tell it nothing more. What nobody waits for any more is ended."""
        for build in self._builds.values():
            if build.waiting.pop(who, None) and not build.waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(build.process.pid, signal.SIGKILL)

    @property
    def pids(self) -> set[int]:
        return {build.process.pid for build in self._builds.values()}

    def turn(self) -> None:
        for place, build in list(self._builds.items()):
            code = build.process.poll()
            if code is not None:
                del self._builds[place]
                lines = build.said.read_text("utf-8", "replace").strip().splitlines() if code else []
                why = (lines or [f"its process ended with code {code}"])[-1] if code else ""
                for tell in list(build.waiting.values()):
                    tell(f"its environment cannot be made: {why}" if code else "")


# -- the process


def main() -> None:
    """Make the environment that standard input describes. The last line that is printed says why it failed."""
    environment = Environment.from_json(codec.loads(sys.stdin.buffer.read()))
    place = Path(environment.place)
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if environment.whole:
            return
        shutil.rmtree(place, ignore_errors=True)
        try:
            _make(environment, place)
        except (OSError, subprocess.CalledProcessError) as error:
            shutil.rmtree(place, ignore_errors=True)
            said = error.output if isinstance(error, subprocess.CalledProcessError) else str(error)
            print(said, _in_words(said), sep="\n")
            sys.exit(1)


def _make(environment: Environment, place: Path) -> None:
    _run(environment.base, "-I", "-m", "venv", "--without-pip", str(place))
    site = next(place.glob("lib/python*/site-packages"))
    below = "".join(f"site.addsitedir({entry!r}); " for entry in environment.path)
    (site / "_below.pth").write_text(f"import site; {below}\n")
    named = place / "wheels"
    named.mkdir()
    for name, digest in environment.wheels.items():
        (named / Path(name).name).symlink_to(Path(environment.blobs, safe_name(digest)))
    installer = next(named.glob("pip-*.whl"))
    wheels = [str(wheel) for wheel in named.iterdir() if wheel != installer]
    options = ("--no-index", "--no-deps", "--ignore-installed", "--no-cache-dir", "--disable-pip-version-check")
    _run(environment.python, "-I", f"{installer}/pip", "install", "--quiet", *options, *wheels)
    shutil.rmtree(named)
    size = sum(size_of(os.path.join(folder, name)) for folder, _, names in os.walk(place) for name in names)
    write_private(place / MARK, str(size).encode("ascii"))


def _run(*command: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)


def _in_words(said: str) -> str:
    """The line of a program's output that says why it failed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if "rror" in line]
    return (errors or lines or ["no reason is known"])[-1]


# -- what is kept


def sweep(scratch: Path) -> None:
    """Delete environments that were not used for long, and that no job here needs."""
    needed = {path.read_text() for path in scratch.glob("jobs/*/environment")}
    for mark in scratch.glob(f"envs/*/{MARK}"):
        with contextlib.suppress(OSError):
            if time.time() - mark.stat().st_mtime > KEPT_SECONDS and mark.parent.name not in needed:
                mark.unlink()
                shutil.rmtree(mark.parent, ignore_errors=True)


def kept(scratch: Path) -> tuple[int, int]:
    """How many environments there are, and their bytes."""
    sizes = [int(mark.read_text() or 0) for mark in scratch.glob(f"envs/*/{MARK}")]
    return len(sizes), sum(sizes)
