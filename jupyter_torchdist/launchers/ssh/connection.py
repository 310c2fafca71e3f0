"""One connection to a host's agent: the OpenSSH client as a process, so that the user's whole configuration counts."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...protocol.errors import LaunchError
from ...protocol.paths import make_private, runtime_dir
from ..booted import ProcessChannel

PERSIST_SECONDS = 60
"""How long the shared connection to a host stays open after its last use."""

CIPHER = "aes128-gcm@openssh.com"
"""It needs a fifth of the processor time of ssh's own first choice where the processor has AES instructions."""

_FATAL = {
    "host key verification failed": "run `ssh {host}` once in a terminal, and accept its key",
    "permission denied": "ssh must log in without a question: `ssh-add` your key, or open a connection in a terminal "
    "with `ssh -fNM -S {control} {host}`; it is then used",
    "could not resolve hostname": "check the name, or add it to ~/.ssh/config",
}
"""Words of ssh after which another try is of no use, and what to do."""


class SshChannel(ProcessChannel):
    """Frames over an ssh process."""

    program = "OpenSSH's client"
    remedy = "%dist nodes --hosts shows what each host has"

    def way(self, command: str) -> list[str]:
        return [*ssh_words(self.host), command]

    @property
    def shell(self) -> str:
        return f"ssh {self.host}"

    def fatal(self, said: str) -> LaunchError | None:
        return fatal(self.host, said)


def fatal(host: str, said: str) -> LaunchError | None:
    """The error for words of ssh after which another try is of no use."""
    for words, hint in _FATAL.items():
        if words in said.lower():
            last = said.splitlines()[-1].strip()
            return LaunchError(f"{host}: {last}", hint.format(host=host, control=shared_connection(host).path))
    return None


def ssh_words(host: str) -> list[str]:
    """The command without the remote part. The user's own shared connection is used where one is configured."""
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "2",
        "ServerAliveCountMax": "2",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
        "LogLevel": "ERROR",
    }
    shared = shared_connection(host)
    if shared.ours:
        settings |= {"ControlMaster": "auto", "ControlPath": shared.path, "ControlPersist": str(PERSIST_SECONDS)}
        if shared.ciphers:
            settings["Ciphers"] = shared.ciphers
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *options, "--", host]


@dataclass(frozen=True)
class SharedConnection:
    """One connection for all sessions. ``path``: ssh's control socket, which is not ``ours`` if the user has one."""

    path: str
    directory: Path
    """Ours, for sockets: private, and with a short path."""
    ciphers: str = ""
    """Asked for, in this order; empty leaves the choice to the user's configuration."""
    ours: bool = True


@lru_cache(maxsize=1024)
def shared_connection(host: str) -> SharedConnection:
    """That of the user's configuration, else our own."""
    chosen = _configuration("--", host)
    name = "ssh-" + hashlib.sha256(f"{host} {chosen.get('hostname')} {chosen.get('user')}".encode()).hexdigest()[:12]
    directory = runtime_dir()
    if len(str(directory / name)) > 80:  # ssh adds 17 characters; a socket's path has at most 103 on macOS
        directory = Path("/tmp") / f"torchdist-{os.getuid()}"
    make_private(directory)
    if chosen.get("controlmaster", "false") not in ("false", "no") and chosen.get("controlpath", "none") != "none":
        return SharedConnection(chosen["controlpath"], directory, ours=False)
    return SharedConnection(str(directory / name), directory, _ciphers(chosen.get("ciphers", "")))


def _configuration(*words: str) -> dict[str, str]:
    """What ssh would use."""
    said = subprocess.run(["ssh", "-G", *words], capture_output=True, text=True, check=False).stdout
    return dict(line.split(" ", 1) for line in said.splitlines() if " " in line)


def _ciphers(chosen: str) -> str:
    """``CIPHER`` first, if ``chosen`` is ssh's own list."""
    rest = chosen.split(",")
    if CIPHER not in rest or chosen != _configuration("-F", "none", "--", "host").get("ciphers"):
        return ""
    return ",".join([CIPHER, *(one for one in rest if one != CIPHER)])
