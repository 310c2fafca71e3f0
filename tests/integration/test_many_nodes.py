"""The driver of a job on 64 nodes, which are simulated: it loses none, and names the right one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.driver import links
from jupyter_torchdist.store.files import private, publish_json
from tests.leaks import wait_until
from tests.simulated import Job, Simulated

NODES = 64


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Simulated]]:
    engines: list[Simulated] = []

    def made(**words: Any) -> Simulated:
        engines.append(Simulated(tmp_path, **words))
        return engines[-1]

    yield made
    for one in engines:
        one.close()


def test_all_ranks_of_all_nodes(engine: Callable[..., Simulated], tmp_path: Path) -> None:
    job, nodes = Job(tmp_path, NODES), engine()
    state = job.drive(nodes)
    assert state.state == "succeeded", state.reason
    assert len(nodes.told("start")) == NODES
    assert sorted(state.ranks) == list(range(2 * NODES))
    for rank in range(2 * NODES):
        assert job.paths.node(f"node{rank // 2}").out(rank).read_text() == f"line of rank {rank}\n"


def test_one_rank_fails(engine: Callable[..., Simulated], tmp_path: Path) -> None:
    nodes = engine(fails=[81], runs=True)
    state = Job(tmp_path, NODES).drive(nodes)
    assert state.state == "failed"
    assert state.first_failure == 81
    assert len({"node40", *nodes.told("end")}) == NODES, "all others are ended"


def test_one_node_is_lost(engine: Callable[..., Simulated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LOST_SECONDS", 1.0)
    nodes = engine(dead="node40", runs=True)
    state = Job(tmp_path, NODES).drive(nodes)
    assert state.state == "lost" and "host40" in state.reason, state.reason
    assert len(nodes.told("end")) == NODES - 1


def test_cancel_reaches_all(engine: Callable[..., Simulated], tmp_path: Path) -> None:
    job, nodes = Job(tmp_path, NODES), engine(runs=True)

    def cancel() -> None:
        wait_until(lambda: len(nodes.told("start")) == NODES, 30)
        publish_json(private(job.paths.requests) / "1.json", {"kind": "terminate"})

    thread = threading.Thread(target=cancel)
    thread.start()
    state = job.drive(nodes)
    thread.join()
    assert state.state == "cancelled"
    assert len(nodes.told("end")) == NODES
