"""One connection to a host's agent: the OpenSSH client as a process, so that the user's whole configuration counts."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...protocol.errors import ChannelError, LaunchError
from ...protocol.paths import make_private, runtime_dir
from ...protocol.plan import Reach
from ...protocol.wire.channel import Channel
from ...protocol.wire.frames import Message
from .code import code

PERSIST_SECONDS = 60
"""How long the shared connection to a host stays open after its last use."""

_BANNER_LIMIT = 1024 * 1024
"""Bytes that a login may print before the relay answers."""

_LOOK = 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'
_RUN = "import base64, sys, zlib; exec(zlib.decompress(base64.b64decode(sys.argv[1])))"

_SEARCHED = (
    '"$VIRTUAL_ENV"/bin/python',
    '"$CONDA_PREFIX"/bin/python',
    '"$HOME"/.venv/bin/python',
    "python3",
    "python",
    '"$HOME"/miniconda3/bin/python',
    '"$HOME"/miniforge3/bin/python',
    '"$HOME"/anaconda3/bin/python',
)
"""Words of sh: where a Python with torch is searched for, after the path of the notebook's own."""

_FATAL = {
    "host key verification failed": "run `ssh {host}` once in a terminal, and accept its key",
    "permission denied": "ssh must log in without a question: `ssh-add` your key, or open a connection in a terminal "
    "with `ssh -fNM -S {control} {host}`; it is then used",
    "could not resolve hostname": "check the name, or add it to ~/.ssh/config",
}
"""Words of ssh after which another try is of no use, and what to do."""


class SshChannel(Channel):
    """Frames over an ssh process, with ``verb`` of ``jupyter_torchdist.node`` at the other end.

    What is sent before that answers is held back.

    ``receive`` raises ``LaunchError`` when the connection could not be made and another try would end alike.
    """

    def __init__(self, host: str, reach: Reach, verb: str = "relay") -> None:
        self._host = host
        self._mark = f"torchdist-{secrets.token_hex(8)}"
        self._banner: bytearray | None = bytearray()
        """What was printed before the mark; None once the relay has answered."""
        self._may_send = False
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``close``
        try:
            self._process = subprocess.Popen(
                [*ssh_words(host), remote_command(self._mark, reach, verb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                start_new_session=True,  # an interrupt of the kernel must not reach it
            )
        except FileNotFoundError:
            raise LaunchError("there is no program ssh here", "install OpenSSH's client") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()
        self._process.stdout.close()

    @property
    def answered(self) -> bool:
        """Whether the host takes what is sent."""
        return self._may_send

    def flush(self) -> None:
        if self.answered or self.closed:
            super().flush()

    def receive(self) -> list[Message]:
        try:
            if self._banner is None:
                return super().receive()
            data = self.read()
        except EOFError:
            raise self._why() from None
        self._banner += data
        _, found, rest = self._banner.partition(f"\n{self._mark} ".encode())
        line, whole, rest = rest.partition(b"\n")
        if not (found and whole):
            if len(self._banner) > _BANNER_LIMIT:
                raise ChannelError(f"{self._host} prints without end at the login")
            return []
        word, _, reason = line.decode("utf-8", "replace").partition(" ")
        if word == "cannot":
            reason = reason.replace("ssh HOST", f"ssh {self._host}")
            raise LaunchError(f"{self._host} {reason}", "%dist nodes --hosts shows what each host has")
        self._may_send = True
        if word == "need":
            self._banner = bytearray(rest)
            archive = code().archive
            self.send_first(len(archive).to_bytes(8, "big") + archive)
            self.flush()
            return []
        self._banner = None
        self.flush()
        return self.decode(bytes(rest))

    def _why(self) -> Exception:
        """The reason for the end of the connection, in the words of ssh."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._words.seek(0)
        said = self._words.read().decode("utf-8", "replace").strip()
        last = said.splitlines()[-1].strip() if said else "the connection was closed"
        for words, hint in _FATAL.items():
            if words in said.lower() and self._banner is not None:
                return LaunchError(
                    f"{self._host}: {last}", hint.format(host=self._host, control=shared_connection(self._host).path)
                )
        return ChannelError(f"{self._host}: {last}")

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._words.close()
            self._process.kill()
            self._process.wait()


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
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *options, "--", host]


@dataclass(frozen=True)
class SharedConnection:
    """One connection for all sessions. ``path``: ssh's control socket, which is not ``ours`` if the user has one."""

    path: str
    directory: Path
    """Ours, for sockets: private, and with a short path."""
    ours: bool = True


@lru_cache(maxsize=1024)
def shared_connection(host: str) -> SharedConnection:
    """That of the user's configuration, else our own."""
    said = subprocess.run(["ssh", "-G", "--", host], capture_output=True, text=True, check=False).stdout
    chosen = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
    name = "ssh-" + hashlib.sha256(f"{host} {chosen.get('hostname')} {chosen.get('user')}".encode()).hexdigest()[:12]
    directory = runtime_dir()
    if len(str(directory / name)) > 80:  # ssh adds 17 characters; a socket's path has at most 107
        directory = Path("/tmp") / f"torchdist-{os.getuid()}"
    make_private(directory)
    if chosen.get("controlmaster", "false") not in ("false", "no") and chosen.get("controlpath", "none") != "none":
        return SharedConnection(chosen["controlpath"], directory, ours=False)
    return SharedConnection(str(directory / name), directory)


def remote_command(mark: str, reach: Reach, verb: str) -> str:
    """The command for the user's shell, whichever it is: packed, because bash, tcsh and fish quote differently.

    A login shell (bash or zsh if that is the user's, else sh) runs ``setup``, searches for a Python with torch, and
    becomes ``boot.py``.
    """
    candidates = [_expanded(reach.python)] if reach.python else [_expanded(sys.executable), *_SEARCHED]
    boot = base64.b64encode(zlib.compress(Path(__file__).with_name("boot.py").read_bytes(), 9)).decode()
    arguments = shlex.join([_RUN, boot, mark, code().digest, verb, reach.scratch])
    look = ":" if reach.python else f'"$p" -c {shlex.quote(_LOOK)} >/dev/null 2>&1'
    lack = f"has no Python at {reach.python}" if reach.python else "has no Python with torch"
    search = f"""{reach.setup}
tried=
for p in {" ".join(candidates)}; do
    command -v "$p" >/dev/null 2>&1 || continue
    tried="$tried $p"
    {look} && exec "$p" -c {arguments}
done
found=${{tried:- no Python}}
printf '\n%s cannot %s (found:%s); name one with --host-option python=PATH\n' {mark} {shlex.quote(lack)} "$found"
"""
    choose = f'case "$SHELL" in */bash|*/zsh) s=$SHELL;; *) s=sh;; esac; exec "$s" -lc {shlex.quote(search)}'
    return f"exec sh -c 'eval \"$(echo {base64.b64encode(choose.encode()).decode()} | base64 -d)\"'"


def _expanded(path: str) -> str:
    """The path as a word of sh; a leading ``~/`` is the home on the host."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
