"""``--env-sync``: gets the wheels of packages that hosts lack, for the Python of the hosts, with this Python's pip.

What was got once is kept in ``Home.wheels``, with the list of it: the next job that wants the same asks no index.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from ..protocol import codec
from ..protocol.errors import LaunchError
from ..protocol.machine.inventory import normalised
from ..protocol.machine.packages import platforms
from ..protocol.plan import Wanted
from ..protocol.typed import Record
from ..store.blobs import digest_of

LIST = "list.json"
"""The file beside the wheels that says what they are."""

INSTALLER = "pip"

_NO_NETWORK = re.compile(r"connection broken|Max retries|NewConnectionError|Temporary failure in name resolution")
_NONE_FITS = re.compile(r"No matching distribution found for (\S+)")


@dataclass(frozen=True)
class Wheels(Record):
    """The files from which an environment is made; the installer is one of them."""

    files: dict[str, str]
    """The SHA-256 of each, by its name."""
    left: tuple[str, ...] = ()
    """What is not among them, because no wheel fits the host."""


class Getting(threading.Thread):
    """Gets the wheels for all hosts that want the same. ``found`` or ``error`` is there when it has ended.

    ``needed``: names of distributions without which the job cannot run. ``hosts``: for the messages. Raises
    ``LaunchError`` when one of these is known to be not to be had.
    """

    def __init__(self, wanted: Wanted, place: Path, needed: frozenset[str], hosts: str) -> None:
        super().__init__(daemon=True)
        self.wanted, self.place, self.hosts = wanted, place, hosts
        self._needed = needed
        self.found: Wheels | None = None
        self.error: Exception | None = None
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        if kept := _kept(place):
            self._take(kept)
        else:
            self.start()

    def path(self, digest: str) -> Path | None:
        """The file with this digest, if it is one of them."""
        names = (name for name, one in self.found.files.items() if one == digest) if self.found else ()
        return next((self.place / name for name in names), None)

    def close(self) -> None:
        """End pip, if it runs."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def run(self) -> None:
        try:
            self.place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=".", dir=self.place.parent))
            try:
                (aside / LIST).write_text(codec.dumps(self._get(aside).to_json()))
                with contextlib.suppress(OSError):  # another driver was faster
                    aside.rename(self.place)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            self._take(_kept(self.place))
        except Exception as error:  # noqa: BLE001  # the driver raises it
            self.error = error

    def _take(self, found: Wheels | None) -> None:
        for lacking in found.left if found else ():
            self._check(lacking)
        self.found = found

    def _get(self, folder: Path) -> Wheels:
        todo = [*self.wanted.pins, INSTALLER]
        left: list[str] = []
        while todo:
            lacking = self._download(folder, todo)
            if lacking == INSTALLER:
                raise LaunchError("--env-sync: the index has no pip for the hosts", "add it to the index")
            if lacking:
                todo.remove(lacking)
                if not self._build(folder, lacking):
                    left.append(lacking)
            else:
                todo = sorted(self._required(folder, {_name(one) for one in left}))
        return Wheels({path.name: digest_of(path) for path in folder.glob("*.whl")}, tuple(left))

    def _check(self, lacking: str) -> None:
        if _name(lacking) in self._needed:
            release = ".".join(self.wanted.release.split(".")[:2])
            raise LaunchError(
                f"--env-sync: {lacking}, which the cell needs, has no wheel for {self.hosts} "
                f"(Python {release}, {self.wanted.platform}), and cannot be built for it here",
                "install another version here, or install it there by hand and leave --env-sync out",
            )

    def _download(self, folder: Path, todo: list[str]) -> str:
        """Returns a requirement that no wheel fits; empty when all are there."""
        release = ".".join(self.wanted.release.split(".")[:2])
        fits = [word for name in platforms(self.wanted.platform) for word in ("--platform", name)]
        done = self._pip(
            "download", "--only-binary=:all:", "--implementation", "cp", "--python-version", release, *fits,
            "--dest", str(folder), *todo,
        )  # fmt: skip
        if not done:
            return ""
        if _NO_NETWORK.search(done):
            raise LaunchError("--env-sync: no package index can be reached from here", "look at the network, and try")
        if (said := _NONE_FITS.search(done)) and said[1] in todo:
            return said[1]
        raise LaunchError(f"--env-sync: pip cannot get the packages: {_last(done)}", "try `pip download` in a terminal")

    def _build(self, folder: Path, requirement: str) -> bool:
        """Whether a wheel for every machine could be made of the source."""
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as built:
            self._pip("wheel", "--wheel-dir", built, requirement)
            made = list(Path(built).glob("*-none-any.whl"))
            for wheel in made:
                shutil.move(str(wheel), folder / wheel.name)
            return bool(made)

    def _pip(self, verb: str, *words: str) -> str:
        """What pip says of its failure; empty if it does not fail. Raises ``LaunchError``."""
        if self._stopped:
            raise LaunchError("--env-sync: the job was ended")
        command = [sys.executable, "-m", "pip", verb, "--no-deps", "--no-input", "--disable-pip-version-check", *words]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        said = self._process.communicate()[1]
        if "No module named pip" in said:
            raise LaunchError("--env-sync needs pip here", f"`uv pip install -p {sys.executable} pip`")
        return (said or "no reason is known") if self._process.returncode else ""

    def _required(self, folder: Path, left: set[str]) -> set[str]:
        """What the wheels need on the hosts, and neither they nor the hosts have."""
        wheels = list(folder.glob("*.whl"))
        here = left | {_name(wheel.name.replace("-", "=", 1)) for wheel in wheels}
        found = set()
        for need in (need for wheel in wheels for need in _needs(wheel, self.wanted)):
            version = self.wanted.present.get(normalised(need.name), "")
            if normalised(need.name) not in here and not (version and need.specifier.contains(version, True)):
                found.add(f"{need.name}{need.specifier}")
        return found


def _kept(place: Path) -> Wheels | None:
    try:
        os.utime(place / LIST)  # it is used, so not old
        return Wheels.from_json(codec.loads((place / LIST).read_text()))
    except (OSError, ValueError):
        return None


def _name(requirement: str) -> str:
    """``Foo_bar==1.2`` → ``foo-bar``."""
    return normalised(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def _needs(wheel: Path, wanted: Wanted) -> Iterator[Requirement]:
    """The requirements of a wheel that count on the host."""
    for text in _metadata(wheel).get_all("Requires-Dist") or ():
        with contextlib.suppress(InvalidRequirement):
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate(dict(_world(wanted))):
                yield need


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode("utf-8", "replace"))


def _world(wanted: Wanted) -> Mapping[str, str]:
    """The variables of markers (PEP 508) on the host."""
    return {
        "python_version": ".".join(wanted.release.split(".")[:2]),
        "python_full_version": wanted.release,
        "implementation_version": wanted.release,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": wanted.platform.rpartition("linux_")[2].lstrip("0123456789_"),
        "extra": "",
    }


def _last(said: str) -> str:
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    return (lines or said.splitlines() or [""])[-1]
