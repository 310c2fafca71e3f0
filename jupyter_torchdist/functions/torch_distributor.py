"""``TorchDistributor`` with the signature of PySpark's class."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from ..client.failures import add_note
from ..client.job import Job
from ..protocol.errors import LaunchError, OptionError
from ..protocol.machine.inventory import local_inventory
from ..protocol.spec import Options
from ..verbs import programs
from . import following
from .decorated import call_of
from .keywords import options_of

LINES = 100
"""The last lines of each stream of a failed rank that the error repeats."""


class TorchDistributor:
    """Runs a function or a program on ranks, as ``pyspark.ml.torch.distributor.TorchDistributor`` does.

    ``local_mode``: on this machine; else on the Spark session's executors if there is a session, else on the hosts of
    ``torchdist.toml``. ``use_gpu``: one GPU a process; more processes than this machine has GPUs become as many as it
    has, with a warning. Other options come from ``torchdist.toml``.

    Raises ``ValueError`` for less than one process, ``RuntimeError`` for GPUs where there are none.
    """

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True) -> None:
        if num_processes <= 0:
            raise ValueError(f"num_processes has to be a positive integer, not {num_processes}")
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu
        if use_gpu and local_mode:
            self._take_at_most(len(local_inventory(os.environ).gpus))

    def _take_at_most(self, gpus: int) -> None:
        if not gpus:
            raise RuntimeError(
                "this machine has no GPU that this process can use\n  → use_gpu=False runs the processes on its CPUs"
            )
        if self.num_processes > gpus:
            logging.getLogger(__name__).warning(
                "num_processes=%d: this machine has %d GPUs, so %d processes run", self.num_processes, gpus, gpus
            )
            self.num_processes = gpus

    def run(self, main: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run ``main`` on every process. Returns rank 0's value of a function; None for a program.

        A ``str`` is the path of a Python script, or any command; ``args`` are its arguments. Raises the exception of
        the first rank that failed, with the last lines of its output in a note; of a program ``RuntimeError`` with
        these lines.
        """
        if callable(main):
            request = call_of(main, args, kwargs, self._options())
            return self._value(request, main)
        if kwargs:
            raise ValueError(f"a program takes no keyword arguments: {', '.join(kwargs)}")
        words = [str(main), *map(str, args)]
        command = not programs.is_python(words[0])
        return self._value(following.placed(programs.request(self._options(), words, command=command)), main)

    def _options(self) -> Options:
        count = {"gpus" if self.use_gpu else "ranks": self.num_processes}
        if self.local_mode:
            return options_of(**count, remote=False)
        if _spark_session() is not None:
            return options_of(**count, launcher="spark")
        return options_of(**count, remote=True)

    def _value(self, request: Any, main: Any) -> Any:
        jobs: list[Job] = []
        try:
            return following.values(request, jobs.append)[0]
        except (OptionError, LaunchError):
            raise
        except Exception as error:
            lines = _last_lines(jobs)
            if not isinstance(main, str):
                add_note(error, lines)
                raise
            raise RuntimeError(f"{main} failed: {type(error).__name__}: {error}\n{lines}") from error


def _last_lines(jobs: list[Job]) -> str:
    """The output of the rank that failed first; empty if no job was started."""
    if not jobs:
        return ""
    rank = jobs[0].state.first_failure or 0
    return f"the last lines of rank {rank}:\n{jobs[0].logs(rank, tail=LINES)}"


def _spark_session() -> Any:
    """The active session of PySpark in this process, or None."""
    module = sys.modules.get("pyspark.sql")
    return None if module is None else module.SparkSession.getActiveSession()
