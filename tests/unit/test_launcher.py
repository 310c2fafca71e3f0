"""What the launcher tells torchrun's engine, and what it puts in the place of its parts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run

from jupyter_torchdist.node.launcher import RankWatch, _AllReturned, launch_config, torchrun_words
from jupyter_torchdist.protocol.events import parse_lines
from jupyter_torchdist.protocol.plan import NodePlan, Plan
from jupyter_torchdist.protocol.spec import OPTIONS
from jupyter_torchdist.ranks.eventfile import EventFile

NODES = (NodePlan("node0", (0, 1), address="10.0.0.1"), NodePlan("node1", (2, 3, 4), address="10.0.0.2"))
PLAN = Plan("j", 5, "nccl", NODES, fresh=False, numa_binding=None, timeout=None, grace=7.0)


def sleeper(event: _AllReturned) -> int:
    pid = os.fork()
    if pid == 0:
        event.wait()
        os._exit(0)
    return pid


def ended(tmp_path: Path, end: Callable[[BaseProcess, RankWatch], object]) -> Any:
    """What the watch wrote of a forked rank that SIGTERM does not end, after ``end``."""
    watch = RankWatch(EventFile(tmp_path / "launcher.events"), PLAN.grace, lambda processes, alive: None)

    class Rank(ForkProcess):
        _Popen = staticmethod(watch.process_class())  # type: ignore[var-annotated, assignment]

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # inherited
    try:
        rank = Rank(target=signal.pause)
        rank.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    end(rank, watch)
    rank.join()
    (event,) = parse_lines((tmp_path / "launcher.events").read_bytes()).events
    return event.data["stopped"]


def killed(rank: BaseProcess) -> None:
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGKILL)


def test_a_rank_that_somebody_kills_was_not_stopped_by_the_engine(tmp_path: Path) -> None:
    """Though the engine sent it SIGTERM meanwhile, because a peer that lost its connection was out before."""

    def end(rank: BaseProcess, watch: RankWatch) -> None:
        rank.terminate()
        killed(rank)

    assert ended(tmp_path, end) is False


def test_a_rank_that_the_engine_kills_was_stopped(tmp_path: Path) -> None:
    assert ended(tmp_path, lambda rank, watch: rank.kill()) is True


@pytest.mark.parametrize(("timeout", "stopped"), [(60, False), (0, True)])
def test_the_engine_kills_when_its_patience_is_over(tmp_path: Path, timeout: int, stopped: bool) -> None:
    def end(rank: BaseProcess, watch: RankWatch) -> None:
        watch.close_within(timeout)
        killed(rank)

    assert ended(tmp_path, end) is stopped


def test_a_rank_that_was_killed_while_it_waited_for_the_others_holds_up_nobody() -> None:
    """multiprocessing's own event waits for ever for a sleeper that was killed."""
    event = _AllReturned()
    killed, others = sleeper(event), [sleeper(event), sleeper(event)]
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    event.set()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others] == [0, 0]
    os.close(event._read)
    os.close(event._write)


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("binding", [None, *next(one for one in OPTIONS if one.flag == "--numa-binding").choices])
def test_a_forked_and_a_fresh_launch_are_told_the_same(
    monkeypatch: pytest.MonkeyPatch, node: NodePlan, binding: str | None
) -> None:
    """Ranks are bound by torch itself (since 2.9); what it does needs a GPU."""
    mode = pytest.importorskip("torch.numa.binding").AffinityMode if binding else None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun sets it where it is not
    plan = replace(PLAN, numa_binding=binding)
    forked = launch_config(plan, node, "j.1")
    fresh, _command, _words = run.config_from_args(run.parse_args([*torchrun_words(plan, node, "j.1"), "script.py"]))
    for name in ("min_nodes", "max_nodes", "nproc_per_node", "run_id", "rdzv_backend", "max_restarts", "local_addr"):
        assert getattr(forked, name) == getattr(fresh, name), name
    assert (forked.min_nodes, forked.nproc_per_node, forked.local_addr) == (2, len(node.ranks), node.address)
    assert forked.start_method == "fork"
    for config in (forked, fresh):
        options = getattr(config, "numa_options", None)
        assert (options and options.affinity_mode) == (mode and mode(binding))
