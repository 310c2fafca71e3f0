"""A channel to a node on which nothing is installed: the shell at its other end becomes ``boot.py``."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from ..protocol.errors import ChannelError, LaunchError
from ..protocol.plan import Reach
from ..protocol.wire.channel import Channel
from ..protocol.wire.frames import Message
from .code import code

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


class BootedChannel(Channel):
    """Frames to ``verb`` of ``jupyter_torchdist.node`` at the other end.

    What is sent before that answers is held back.

    ``receive`` raises ``LaunchError`` when the connection could not be made and another try would end alike.
    """

    remedy: ClassVar[str]
    """What to do when the node cannot run our code."""

    def __init__(self, host: str, reach: Reach, verb: str = "relay") -> None:
        self.host = host
        self._mark = f"torchdist-{secrets.token_hex(8)}"
        self._banner: bytearray | None = bytearray()
        """What was printed before the mark; None once the relay has answered."""
        self._may_send = False
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``close``
        super().__init__(*self.start(remote_command(self._mark, reach, verb), self._words.fileno()))

    def start(self, command: str, words: int) -> tuple[int, int]:
        """Run a text for the shell of the node. Returns descriptors of its output and its input.

        ``words``: a descriptor for what it says of errors. Raises ``LaunchError``, ``ChannelError``.
        """
        raise NotImplementedError

    def end(self) -> None:
        """End the connection, whose descriptors are closed."""

    @property
    def answered(self) -> bool:
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
                raise ChannelError(f"{self.host} prints without end at the login")
            return []
        word, _, reason = line.decode("utf-8", "replace").strip().partition(" ")
        if word == "cannot":
            raise LaunchError(f"{self.host} {reason}".replace("ssh HOST", self.shell), self.remedy)
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

    @property
    def shell(self) -> str:
        """The words before a command that the user runs there."""
        raise NotImplementedError

    def fatal(self, said: str) -> LaunchError | None:
        """The error for words of the process after which another try is of no use."""
        return None

    def _why(self) -> Exception:
        """The reason for the end of the connection, in the words of the process."""
        self._words.seek(0)
        said = self._words.read().decode("utf-8", "replace").strip()
        last = said.splitlines()[-1].strip() if said else "the connection was closed"
        return (self._banner is not None and self.fatal(said)) or ChannelError(f"{self.host}: {last}")

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._words.close()
            self.end()


class ProcessChannel(BootedChannel):
    """Over the pipes of a process here."""

    program: ClassVar[str]
    """What the user calls the way there."""
    environ: Mapping[str, str] | None = None
    """Of the process; None: that of this one."""

    def way(self, command: str) -> Sequence[str]:
        """The words of the process. ``command``: a text for the shell of the node."""
        raise NotImplementedError

    def start(self, command: str, words: int) -> tuple[int, int]:
        way = self.way(command)
        try:
            self.process = subprocess.Popen(
                way,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env=self.environ,
                start_new_session=True,  # an interrupt of the kernel must not reach it
            )
        except FileNotFoundError:
            raise LaunchError(f"there is no program {way[0]} here", f"install {self.program}") from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        ends = os.dup(self.process.stdout.fileno()), os.dup(self.process.stdin.fileno())
        self.process.stdin.close()
        self.process.stdout.close()
        return ends

    def _why(self) -> Exception:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        return super()._why()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def remote_command(mark: str, reach: Reach, verb: str) -> str:
    """A login shell runs ``setup``, searches for a Python with torch, and becomes ``boot.py``."""
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
    return in_login_shell(search)


def in_login_shell(text: str) -> str:
    """A command for the user's shell, whichever it is: packed, because bash, tcsh and fish quote differently.

    ``text`` is run by a login shell: bash or zsh if that is the user's, else sh.
    """
    choose = f'case "$SHELL" in */bash|*/zsh) s=$SHELL;; *) s=sh;; esac; exec "$s" -lc {shlex.quote(text)}'
    return f"exec sh -c 'eval \"$(echo {base64.b64encode(choose.encode()).decode()} | base64 -d)\"'"


def _expanded(path: str) -> str:
    """The path as a word of sh; a leading ``~/`` is the home on the host."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
