"""Ranks connect to the store when all of them exist: a thread of the launcher's answers, and forks lose its locks."""

from __future__ import annotations

import os
import time

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from jupyter_torchdist.node.rendezvous import StaticRendezvous


def node(number: int, store: HashStore) -> StaticRendezvous:
    handler = StaticRendezvous(
        "job.1", number, ("node1", "node2"), ("127.0.0.1", 0), ("127.0.0.1", 1) if number else None, lambda *_: None
    )
    handler._store = store
    return handler


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_waits_until_all_are_forked(number: int) -> None:
    store = HashStore()
    first = node(0, store)
    handler = node(1, store) if number else first
    ranks = [os.fork(), 0]
    if ranks[0]:
        ranks[1] = os.fork()
    if 0 in ranks:  # a rank: nothing of the test's is run in it
        try:
            handler.step_in()
            handler.wait_for_all()
        finally:
            os._exit(7)
    time.sleep(0.1)
    assert [os.waitpid(rank, os.WNOHANG)[0] for rank in ranks] == [0, 0]
    first.all_forked()
    if handler is not first:
        handler.all_forked()
    assert [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks] == [7, 7]
    for one in {handler, first}:
        os.close(one._gate[0])
