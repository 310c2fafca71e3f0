"""Slurm's commands, of this machine or of a login node, and what they say."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass

from ...protocol.errors import LaunchError
from ..booted import in_login_shell
from ..ssh.connection import fatal, ssh_words

NEEDED = ("sinfo", "sbatch", "srun", "squeue", "scancel", "scontrol")

PATIENCE = 30.0
"""Seconds that a command may take; Slurm's own patience with its controller is 10 s for each try."""

LOOK = "look with `sinfo` and `squeue` in a terminal; -O login=HOST gives Slurm's commands on another machine"

MARK = "\ntorchdist: here Slurm begins\n"
"""What a login prints stands before it."""


def environ() -> dict[str, str]:
    """For Slurm's commands, and so for what they start: without what an allocation says of itself, and without ours."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "TORCHDIST_", "JPY_")) or name == "SLURM_CONF"
    }


@dataclass(frozen=True)
class Commands:
    """``login``: the host on which they run, over SSH; empty: this machine."""

    login: str = ""

    def started(self, *command: str) -> list[str]:
        """The words that start a command of Slurm here."""
        if not self.login:
            return list(command)
        mark = f"printf %s {shlex.quote(MARK)}"
        return [*ssh_words(self.login), in_login_shell(f"cd /; {mark}; {mark} >&2; exec {shlex.join(command)}")]

    def check(self) -> None:
        """Raises ``LaunchError`` that names the missing commands."""
        if self.login:
            look = 'for name do command -v "$name" >/dev/null || echo "$name"; done'
            missing = self.run("sh", "-c", look, "sh", *NEEDED).split()
        else:
            missing = [name for name in NEEDED if shutil.which(name) is None]
        if missing:
            where = f"on {self.login}" if self.login else "here"
            raise LaunchError(
                f"--launcher slurm needs Slurm's commands, and there is no {', '.join(missing)} {where}",
                "-O login=HOST names a login node that ssh reaches; or run the notebook there",
            )

    def run(self, *command: str, text: str = "") -> str:
        """What a command prints. Raises ``LaunchError`` with its words."""
        try:
            done = subprocess.run(
                self.started(*command),
                input=text,
                env=environ(),
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
                cwd="/",
            )
        except FileNotFoundError:
            self.check()
            raise
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{command[0]} did not answer within {PATIENCE:g} s", LOOK) from None
        if self.login and MARK not in done.stdout:
            raise self._unreached(done.stderr)
        if done.returncode:
            said = words(done.stderr.rpartition(MARK)[2])
            raise LaunchError(said or f"{command[0]} ended with code {done.returncode}", LOOK)
        return done.stdout.rpartition(MARK)[2].strip()

    def _unreached(self, said: str) -> LaunchError:
        last = said.strip().rpartition("\n")[2] or "ssh has ended without a word"
        look = f"`ssh {self.login}` in a terminal says more; -O login=HOST names another login node"
        return fatal(self.login, said) or LaunchError(f"{self.login}: {last}", look)


def words(said: str) -> str:
    """Messages of a command without its name: ``sbatch: error: invalid partition`` → ``invalid partition``."""
    lines = (line.strip() for line in said.splitlines())
    return "; ".join(dict.fromkeys(line.partition(" error: ")[2] or line for line in lines if line))


class Question:
    """A command that is asked again and again, without waiting for it."""

    def __init__(self, commands: Commands, *command: str) -> None:
        self._command = commands.started(*command)
        self._asked: subprocess.Popen[bytes] | None = None
        self._due = 0.0

    def answer(self, pause: float) -> tuple[int, str] | None:
        """Exit code and words of an answer that has come since the last call; None if none has.

        After an answer the next question waits for ``pause`` seconds.
        """
        if self._asked is None:
            if time.monotonic() < self._due:
                return None
            self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the answer
            self._asked = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=environ(),
                cwd="/",
                start_new_session=True,
            )
        code = self._asked.poll()
        if code is None:
            return None
        self._asked, self._due = None, time.monotonic() + pause
        self._said.seek(0)
        said = self._said.read().decode("utf-8", "replace")
        self._said.close()
        return code, said.rpartition(MARK)[2]

    def hurry(self) -> None:
        """Ask again now."""
        self._due = 0.0

    def close(self) -> None:
        if self._asked is not None:
            self._asked.kill()
            self._asked.wait()
            self._asked = None
            self._said.close()
