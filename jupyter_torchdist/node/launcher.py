"""Starts one node's ranks of one job through torchrun's own engine.

Warm: a fork of the zygote calls ``launch_agent`` with ``start_method="fork"``. Fresh: a new interpreter calls
``torch.distributed.run.run``, whose ranks are new interpreters too. Both use our rendezvous handler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Set
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from ..protocol import releases
from ..protocol.disk import FULL, in_words
from ..protocol.errors import TorchDistError
from ..protocol.plan import NodePlan, Plan
from ..protocol.process import ProcessId, exit_in_words
from ..protocol.wire.assignment import Assignment
from ..ranks.eventfile import EventFile
from . import asking
from . import assignment as world

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext
    from torch.distributed.launcher.api import LaunchConfig

MONITOR_INTERVAL = 0.01
"""Seconds between two polls of the ranks by the elastic agent (its default, 0.1, is most of a warm launch's time)."""

LONGEST_SLEEP = 1.0
"""Longest sleep of the elastic agent in seconds while its forked ranks are alive. The exit of a rank wakes it."""


def main(assignment: Assignment) -> int:
    """Run the ranks until all have exited. Returns the exit code of the launcher. Never raises."""
    events = EventFile(assignment.node_paths.launcher_events)
    events.write("launcher.started", process=ProcessId.mine().to_json(), **assignment.start)
    ranks = assignment.node_plan().ranks
    watch = RankWatch(events, assignment.plan.grace, partial(asking.ask, assignment.node_paths, ranks))
    error = ""
    try:
        import torch

        releases.check(torch.__version__)  # older versions would fail here with an unclear message
        (_run_fresh if assignment.fresh else _run_forked)(assignment, events, watch)
    except BaseException as failure:  # noqa: BLE001  # top level of this process
        watch.note_failures(failure)
        if type(failure).__name__ not in ("ChildFailedError", "SignalException"):
            trace = "".join(traceback.format_exception(failure))
            error = failure.message if isinstance(failure, TorchDistError) else trace + _about_shared_memory(failure)
    codes = {str(pid): code for pid, code in watch.codes.items()}
    events.write("launcher.ended", codes=codes, error=error, attempt=assignment.attempt)
    return 1 if error or any(watch.codes.values()) else 0


def _about_shared_memory(failure: BaseException) -> str:
    """What the user reads of semaphores for which there is no room: the system's words do not say where."""
    no_room = isinstance(failure, OSError) and failure.errno in FULL
    if not no_room or not os.path.isdir("/dev/shm") or os.statvfs("/dev/shm").f_bavail:
        return ""
    return "/dev/shm is full: remove files there, or start the container with --shm-size=1g or more\n"


class RankWatch:
    """Records how each rank's process ended. The engine itself reports only the first failure."""

    def __init__(
        self, events: EventFile, grace: float, ask: Callable[[Mapping[int, int], Callable[[], Set[int]]], None]
    ) -> None:
        """``grace``: seconds from the engine's SIGTERM to its SIGKILL. ``ask`` is called before (``asking.ask``)."""
        self._events, self._grace = events, max(1, round(grace))
        self.ask = ask
        self._forked: list[Popen] = []
        """In the order of the ranks."""
        self._asked = False
        self.codes: dict[int, int] = {}
        self._living: dict[int, int] = {}
        """Pidfd of each forked rank that was not reaped."""
        self._returns: list[Connection] = []
        """Pipes on which ranks tell the engine that they returned. Ranks exit after the engine has read all of them."""
        self._closing = False
        """Whether the engine is ending the living ranks: from then on a SIGTERM comes from the engine."""
        self._kills_at = math.inf
        """When the engine starts to send SIGKILL to ranks that SIGTERM has not ended."""
        self._signalled: set[tuple[int, int]] = set()
        """(pid, signal) of ranks that multiprocessing signalled before that, because another rank had failed."""

    def note(self, pid: int, code: int) -> None:
        """Record the exit of a process when it is reaped. Called once per process.

        When somebody else kills a rank, its peers lose their connections and may fail. The engine may then have
        signalled all other ranks before the kernel has finished the exit of the killed rank.
        """
        closed = self._closing if code == -signal.SIGTERM else time.monotonic() >= self._kills_at
        sent = (pid, -code) in self._signalled
        self._note(pid, code, code in (-signal.SIGTERM, -signal.SIGKILL) and (closed or sent))

    def close_within(self, seconds: float) -> None:
        """From now on the engine ends the living ranks: by SIGTERM, and after ``seconds`` by SIGKILL."""
        self._closing, self._kills_at = True, min(self._kills_at, time.monotonic() + seconds)

    def note_failures(self, error: BaseException) -> None:
        """Record the exit codes in torch's ``ChildFailedError``. It does not tell which ranks torch killed itself."""
        for failure in getattr(error, "failures", {}).values():
            self._note(failure.pid, failure.exitcode, None)

    def _note(self, pid: int, code: int, stopped: bool | None) -> None:
        self._living.pop(pid, None)
        if pid not in self.codes:
            self.codes[pid] = code
            self._events.write("launcher.child", pid=pid, code=code, why=exit_in_words(code), stopped=stopped)

    def ask_first(self) -> None:
        """Ask the living forked ranks once, before any of them is signalled."""
        if not self._asked:
            self._asked = True
            self.ask(
                {place: process.pid for place, process in enumerate(self._forked)},
                lambda: {process.pid for process in self._forked if process.poll() is None},
            )

    def sleep(self, seconds: float) -> None:
        """``time.sleep`` that ends early when a rank exits or returns, since polling would take CPU time from ranks."""
        if self._living:
            wait([*self._living.values(), *self._returns], LONGEST_SLEEP)
        else:
            time.sleep(seconds)

    def context_class(self, started: Callable[[], None]) -> type[MultiprocessContext]:
        """The engine's class of rank processes, extended to watch for returns. Calls ``started`` when all exist."""
        from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

        watch = self

        class Ranks(MultiprocessContext):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                self._worker_finished_event = _AllReturned()  # type: ignore[assignment]

            def _start(self) -> None:
                super()._start()  # type: ignore[no-untyped-call]
                watch._returns = [queue._reader for queue in self._ret_vals.values()]  # type: ignore[attr-defined]
                started()

            def _is_done(self) -> bool:
                """A rank that exited with code 0 (``os._exit(0)``) returns nothing: the others must not wait for it."""
                assert self._pc is not None
                for number, process in enumerate(self._pc.processes):
                    if process.exitcode == 0:
                        self._return_values.setdefault(number, None)
                return len(self._return_values) == self.nprocs

            def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
                """Reap ranks that have exited already first: the engine did not end those.

                Our own timeout is used, because the engine's ``timeout`` can be set only from torch 2.12 on.
                """
                for process in self._pc.processes if self._pc else ():
                    process.is_alive()
                if not self._is_done():
                    watch.ask_first()
                watch.close_within(watch._grace)
                self._worker_finished_event.set()  # the engine stops waiting for returns here
                super()._close(death_sig, watch._grace)

        return Ranks

    def fresh_context_class(self) -> type[SubprocessContext]:
        """The engine's class of ranks that are new interpreters, extended to ask them before they are ended."""
        from torch.distributed.elastic.multiprocessing.api import SubprocessContext

        watch = self

        class Ranks(SubprocessContext):
            def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
                processes = [handler.proc for handler in (self.subprocess_handlers or {}).values()]
                watch.ask(self.pids(), lambda: {process.pid for process in processes if process.poll() is None})
                super()._close(death_sig, timeout)

        return Ranks

    def process_class(self) -> type[Popen]:
        """multiprocessing's class of a forked child, extended to call ``note`` when the child is reaped.

        multiprocessing's own sentinel is a pipe. Children of a rank keep it open after the rank's exit.
        """
        watch = self

        class RankProcess(Popen):
            def _launch(self, process_obj: BaseProcess) -> None:
                super()._launch(process_obj)  # type: ignore[misc]
                watch._forked.append(self)
                if hasattr(os, "pidfd_open"):
                    self.sentinel: int = os.pidfd_open(self.pid)
                    watch._living[self.pid] = self.sentinel

            def poll(self, flag: int = os.WNOHANG) -> int | None:
                code: int | None = super().poll(flag)
                if code is not None:
                    watch.note(self.pid, code)
                return code

            def _send_signal(self, sig: int) -> None:
                """The engine calls this only for a process that is alive."""
                watch.ask_first()
                watch._signalled.add((self.pid, sig))
                super()._send_signal(sig)  # type: ignore[misc]

        return RankProcess


class _AllReturned:
    """The event that ranks wait for after they have returned.

    ``set`` of multiprocessing's own event waits until every sleeper is awake: forever, if a sleeper was killed.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def set(self) -> None:
        os.write(self._write, b".")

    def wait(self) -> None:
        wait([self._read])  # nobody reads the byte, so it wakes all ranks


class _Clock:
    """Replaces the module ``time`` in the engine's loop, which sleeps between two polls of its ranks."""

    def __init__(self, watch: RankWatch) -> None:
        self.sleep = watch.sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def _rendezvous(assignment: Assignment, events: EventFile) -> Any:
    from .rendezvous import StaticRendezvous

    plan = assignment.plan
    return StaticRendezvous(
        run_id=plan.run_id or f"{assignment.job}.{assignment.attempt}",
        node_rank=[node.name for node in plan.nodes].index(assignment.node),
        names=[node.called for node in plan.nodes],
        own=(assignment.node_plan().address, plan.port),
        endpoint=assignment.rendezvous,
        announce=lambda address, port: events.write("launcher.rendezvous", address=address, port=port),
    )


def _run_forked(assignment: Assignment, events: EventFile, watch: RankWatch) -> None:
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.agent.server import api as engine
    from torch.distributed.launcher.api import launch_agent

    from . import rendezvous

    _log_plainly()
    handler = _rendezvous(assignment, events)
    rendezvous.register(lambda parameters: handler)
    ForkProcess._Popen = staticmethod(watch.process_class())  # type: ignore[method-assign, assignment]
    multiprocessing.MultiprocessContext = watch.context_class(handler.all_forked)  # type: ignore[misc]
    engine.time = _Clock(watch)  # type: ignore[assignment, attr-defined]
    config = launch_config(assignment.plan, assignment.node_plan(), handler.get_run_id())
    launch_agent(config, rank_entry, [assignment.job_root, assignment.blobs, assignment.node, handler])


def launch_config(plan: Plan, node: NodePlan, run_id: str) -> LaunchConfig:
    """torchrun's configuration for the ranks of ``node``, without fields that this version of torch does not have."""
    from torch.distributed.launcher import api

    from . import rendezvous

    chosen: dict[str, Any] = {
        "min_nodes": len(plan.nodes),
        "max_nodes": len(plan.nodes),
        "nproc_per_node": len(node.ranks),
        "run_id": run_id,
        "role": plan.role,
        "rdzv_backend": rendezvous.BACKEND,
        "rdzv_endpoint": "",
        "max_restarts": 0,
        "monitor_interval": MONITOR_INTERVAL,
        "start_method": "fork",
        "logs_specs": rendezvous.NoLogs(),
        "local_addr": node.address,
        "numa_options": _numa_options(plan.numa_binding),
    }
    known = {field.name for field in dataclasses.fields(api.LaunchConfig)}
    return api.LaunchConfig(**{name: value for name, value in chosen.items() if name in known})


_torch_formatters: list[tuple[logging.Handler, logging.Formatter | None]] = []


def _log_plainly() -> None:
    """torch's own formatter imports ``torch._dynamo`` at the first warning: that takes seconds during a failure."""
    plain = logging.Formatter("%(levelname).1s %(asctime)s %(name)s] %(message)s")
    for name in ("torch", "torch.distributed"):
        for handler in logging.getLogger(name).handlers:
            _torch_formatters.append((handler, handler.formatter))
            handler.setFormatter(plain)


def _log_as_torch() -> None:
    """In a rank the user sees torch's messages in torch's own format."""
    for handler, formatter in _torch_formatters:
        handler.setFormatter(formatter)


def _numa_options(mode: str | None) -> Any:
    if mode is None:
        return None
    from torch.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode(mode))


def rank_entry(job_root: str, blobs: str, node: str, handler: Any) -> None:
    """First function of a forked rank: close what belongs to the launcher, then run the worker.

    A rank that has returned stays alive until all have returned: a peer may still be connecting to it.
    """
    handler.step_in()
    _log_as_torch()
    from ..ranks import worker

    worker.main(job_root, blobs, node, may_connect=handler.wait_for_all)


def _run_fresh(assignment: Assignment, events: EventFile, watch: RankWatch) -> None:
    from torch.distributed import run
    from torch.distributed.elastic import multiprocessing

    from . import rendezvous

    # New interpreters do not inherit sys.path, which comes from the notebook.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, assignment.world.sys_path))
    handler = _rendezvous(assignment, events)
    rendezvous.register(lambda parameters: handler)
    multiprocessing.SubprocessContext = watch.fresh_context_class()  # type: ignore[misc]
    words = torchrun_words(assignment.plan, assignment.node_plan(), handler.get_run_id())
    worker = ["-m", "jupyter_torchdist.node", "worker", assignment.job_root, assignment.blobs, assignment.node]
    run.run(run.parse_args([*words, *worker]))


def torchrun_words(plan: Plan, node: NodePlan, run_id: str) -> list[str]:
    """The same settings as ``launch_config``, as command-line options of torchrun."""
    from . import rendezvous

    return [
        f"--nnodes={len(plan.nodes)}",
        f"--nproc-per-node={len(node.ranks)}",
        f"--rdzv-id={run_id}",
        f"--role={plan.role}",
        f"--rdzv-backend={rendezvous.BACKEND}",
        "--rdzv-endpoint=",
        f"--local-addr={node.address}",
        "--max-restarts=0",
        f"--monitor-interval={MONITOR_INTERVAL}",
        f"--log-dir={os.devnull}",
        *([f"--numa-binding={plan.numa_binding}"] if plan.numa_binding else []),
    ]


def start(assignment: Assignment) -> None:
    """Turn this process into the launcher of a job. Never returns."""
    code = 1
    try:
        os.setsid()
        world.stamp_job_token(assignment.token)
        with open(os.devnull) as null, open(assignment.node_paths.launcher_log, "ab") as log:
            for source, target in ((null.fileno(), 0), (log.fileno(), 1), (log.fileno(), 2)):
                os.dup2(source, target)
        world.enter(assignment)
        code = main(assignment)
    except BaseException as error:  # noqa: BLE001  # top level of this process
        traceback.print_exc()
        if isinstance(error, OSError) and error.errno in FULL:
            print(in_words(error), file=sys.stderr)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
