"""The files of a bed: who has which address, the keys, what is mounted on a host, and the settings of ``ssh``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster import node_python

VISIBLE = ("etc", "usr", "var")
"""Folders of this machine that a host sees, each with changes of its own. ``host.sh`` has them, too."""
EMPTIED = {"run": 755, "tmp": 1777, "var/tmp": 1777, "dev/shm": 1777}
"""Folders that are empty when a host starts, and their modes."""
CALLER = "caller"
"""The name of this machine on the bed's network."""

SSHD = """\
Port 22
HostKey /etc/ssh/hostkey
AuthorizedKeysFile /etc/ssh/authorized_keys .ssh/authorized_keys
PidFile none
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
StrictModes no
MaxStartups 200
UseDNS no
PrintMotd no
Subsystem sftp internal-sftp
Match User bob
  PubkeyAuthentication no
  PasswordAuthentication yes
"""
# The key exchange is the fastest of OpenSSH's: 60 ms less a connection.
SSH = """\
Host *
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  UserKnownHostsFile {known_hosts}
  StrictHostKeyChecking yes
  KexAlgorithms curve25519-sha256
  BatchMode yes
  LogLevel ERROR
"""


class BedError(Exception):
    """A bed, or a host of it, could not do what it was told."""


@dataclass(frozen=True)
class Folders:
    """Of this machine, as ``Cluster.up`` tells them."""

    python: Path
    shared: Sequence[Path]
    read_only: Sequence[Path]
    hidden: Sequence[Path]


@dataclass(frozen=True)
class Layout:
    directory: Path
    number: int
    """Of the bed among those of this machine."""
    nodes: tuple[str, ...]

    @property
    def interface(self) -> str:
        """This machine's on the bed's network. There is one of the name, so no two beds have the same number."""
        return f"torchdist{self.number}"

    def check(self, name: str) -> None:
        """Raises ``BedError`` when no host has this name."""
        if name not in (*self.nodes, CALLER):
            raise BedError(f"no host {name}: there are {', '.join(self.nodes)}")

    def index(self, name: str) -> int:
        self.check(name)
        return 254 if name == CALLER else 11 + self.nodes.index(name)

    def address(self, name: str) -> str:
        return f"10.77.{self.number}.{self.index(name)}"

    def mac(self, name: str) -> str:
        """The same after each start: with a new one, peers would send to the old one for a minute."""
        return f"02:77:{self.number:02x}:00:00:{self.index(name):02x}"

    def port(self, name: str) -> str:
        """The host's on the switch."""
        return CALLER if name == CALLER else f"port{self.index(name)}"

    @property
    def key(self) -> Path:
        return self.directory / "id_ed25519"

    @property
    def ssh_config(self) -> Path:
        return self.directory / "ssh_config"

    @property
    def bin(self) -> Path:
        """A folder with an ``ssh`` that knows the hosts; to be the first of ``PATH``."""
        return self.directory / "bin"

    @property
    def orders(self) -> Path:
        """The pipe by which the bed is told what to start."""
        return self.directory / "orders"

    def write(self, folders: Folders) -> None:
        """All files; the folder is there."""
        self._write_switch()
        _make_key(self.key)
        mounts = _mounts(folders)
        for name in self.nodes:
            self._write_host(name, mounts)
        self._write_client()

    def _write_switch(self) -> None:
        (self.directory / "plug").write_text(f"link set {self.interface}p netns 1 name {CALLER}\n")
        (self.directory / "switch").write_text(
            f"link set lo up\nlink add switch type bridge\nlink set switch up\nlink set {CALLER} master switch up\n"
        )
        (self.directory / "firewall").write_text(
            "table bridge bed { chain faults { type filter hook forward priority 0; policy accept; }; }\n"
        )

    def _write_host(self, name: str, mounts: str) -> None:
        place = self.directory / name
        etc = place / "files/etc"
        (etc / "ssh").mkdir(parents=True)
        (place / "disk").mkdir()
        _make_key(etc / "ssh/hostkey")
        (etc / "ssh/sshd_config").write_text(SSHD)
        (etc / "ssh/authorized_keys").write_text(self.key.with_suffix(".pub").read_text())
        (etc / "hostname").write_text(name + "\n")
        (etc / "resolv.conf").write_text("")
        names = "".join(f"{self.address(each)} {each}\n" for each in (*self.nodes, CALLER))
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + names)
        (place / "users").write_text("alice:x:1717:1717::/home/alice:/bin/bash\n")
        (place / "groups").write_text("alice:x:1717:\n")
        (place / "mounts").write_text(mounts)
        port = self.port(name)
        (place / "unplug").write_text(f"link del {port}\nlink del slow{port}\n")
        (place / "plug").write_text(
            f"link add {port} type veth peer name eth0 address {self.mac(name)} netns 1\n"
            f"link set {port} master switch up\n"
        )
        (place / "address").write_text(
            f"link set lo up\naddr add {self.address(name)}/24 dev eth0\nlink set eth0 up\n"
            f"route add default via 10.77.{self.number}.1\n"
        )

    def _write_client(self) -> None:
        known, hosts = [], []
        for name in self.nodes:
            kind, key = (self.directory / name / "files/etc/ssh/hostkey.pub").read_text().split()[:2]
            known.append(f"{name},{self.address(name)} {kind} {key}\n")
            hosts.append(f"Host {name}\n  HostName {self.address(name)}\n")
        known_hosts = self.directory / "known_hosts"
        known_hosts.write_text("".join(known))
        self.ssh_config.write_text("".join(hosts) + SSH.format(key=self.key, known_hosts=known_hosts))
        self.bin.mkdir()
        (self.bin / "ssh").write_text(f"#!/bin/sh\nexec {shutil.which('ssh')} -F '{self.ssh_config}' \"$@\"\n")
        (self.bin / "ssh").chmod(0o755)

    def save(self) -> None:
        (self.directory / "layout.json").write_text(json.dumps({**asdict(self), "directory": str(self.directory)}))

    @staticmethod
    def load(directory: Path) -> Layout:
        saved = json.loads((directory / "layout.json").read_text())
        return Layout(directory, saved["number"], tuple(saved["nodes"]))


def _make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _mounts(folders: Folders) -> str:
    """In the form of fstab(5), below ``disk`` of a host's folder."""
    lines = [*_system(), *((name, name, "tmpfs", f"mode={mode}") for name, mode in EMPTIED.items())]
    lines += [("hidden", str(path), "tmpfs", "mode=755") for path in folders.hidden if _is_visible(path)]
    bound = {path: path for path in (Path(sys.base_prefix), *folders.read_only) if not _is_visible(path)}
    bound |= node_python.mounts(folders.python)
    lines += [(str(source), str(place), "none", "bind,ro") for place, source in bound.items()]
    lines += [(str(path), str(path), "none", "bind") for path in folders.shared]
    return "".join(
        f"{_field(what)} {_field('disk/root/' + place.lstrip('/'))} {kind} X-mount.mkdir,{options} 0 0\n"
        for what, place, kind, options in lines
    )


def _system() -> list[tuple[str, str, str, str]]:
    """What a Linux needs: source, place, kind and options of each mount."""
    layers = "lowerdir=/{0},upperdir=disk/{0}/upper,workdir=disk/{0}/work"
    lines = [("overlay", name, "overlay", layers.format(name)) for name in VISIBLE]
    lines += [("proc", "proc", "proc", "defaults"), ("sysfs", "sys", "sysfs", "defaults")]
    if Path("/sys/fs/cgroup").is_dir():
        lines.append(("/sys/fs/cgroup", "sys/fs/cgroup", "none", "rbind"))
    return [*lines, ("/dev", "dev", "none", "bind"), ("devpts", "dev/pts", "devpts", "newinstance,ptmxmode=0666")]


def _is_visible(path: Path) -> bool:
    return path.is_dir() and path.parts[1] in VISIBLE


def _field(text: str) -> str:
    return text.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
