"""Slurm's commands, and what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time

from ...protocol.errors import LaunchError

NEEDED = ("sinfo", "sbatch", "srun", "squeue", "scancel", "scontrol")

PATIENCE = 30.0
"""Seconds that a command may take; Slurm's own patience with its controller is 10 s for each try."""

LOOK = "look with `sinfo` and `squeue` in a terminal"


def check() -> None:
    """Raises ``LaunchError`` that names the missing commands."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        raise LaunchError(
            f"--launcher slurm needs Slurm's commands, and there is no {', '.join(missing)} here",
            "run the notebook on a login node, or install Slurm's client (Debian: slurm-client)",
        )


def environ() -> dict[str, str]:
    """For Slurm's commands, and so for what they start: without what an allocation says of itself, and without ours."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "TORCHDIST_", "JPY_")) or name == "SLURM_CONF"
    }


def run(*command: str, text: str = "") -> str:
    """What a command prints. Raises ``LaunchError`` with its words."""
    try:
        done = subprocess.run(
            command, input=text, env=environ(), capture_output=True, text=True, timeout=PATIENCE, check=False, cwd="/"
        )
    except FileNotFoundError:
        check()
        raise
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not answer within {PATIENCE:g} s", LOOK) from None
    if done.returncode:
        raise LaunchError(words(done.stderr) or f"{command[0]} ended with code {done.returncode}", LOOK)
    return done.stdout.strip()


def words(said: str) -> str:
    """Messages of a command without its name: ``sbatch: error: invalid partition`` → ``invalid partition``."""
    lines = (line.strip() for line in said.splitlines())
    return "; ".join(dict.fromkeys(line.partition(" error: ")[2] or line for line in lines if line))


class Question:
    """A command that is asked again and again, without waiting for it."""

    def __init__(self, *command: str) -> None:
        self._command = command
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
        return code, said

    def hurry(self) -> None:
        """Ask again now."""
        self._due = 0.0

    def close(self) -> None:
        if self._asked is not None:
            self._asked.kill()
            self._asked.wait()
            self._asked = None
            self._said.close()
