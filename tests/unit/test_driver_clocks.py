"""The clocks of nodes, from the answers to pings."""

from __future__ import annotations

import json
from pathlib import Path

from jupyter_torchdist.driver.clocks import Clock, NodeClock, compared
from jupyter_torchdist.protocol.wire.messages import Ping


def test_half_of_the_way_is_the_error() -> None:
    assert compared(None, Ping(t=10.0, clock=1005.0), now=10.5, wall=1000.25) == Clock(5.0, 0.25)


def test_a_slower_answer_tells_less() -> None:
    known = Clock(5.0, 0.01)
    assert compared(known, Ping(t=10.0, clock=1009.0), now=10.1, wall=1000.0) is known
    newer = compared(known, Ping(t=10.0, clock=1005.5), now=10.03, wall=1000.0)
    assert newer is not None and abs(newer.ahead - 5.515) < 1e-9, "clocks drift"


def test_an_agent_that_does_not_tell_its_clock() -> None:
    assert compared(None, Ping(t=1.0), now=1.1, wall=1000.0) is None


def heard(path: Path | None, ahead: float, way: float = 0.01) -> NodeClock:
    clock = NodeClock(path)
    clock.hear(Ping(t=10.0, clock=1000.0 + ahead - way / 2), now=10.0 + way, wall=1000.0)
    return clock


def test_a_clock_that_is_wrong_is_told_once_and_written(tmp_path: Path) -> None:
    early, late = heard(tmp_path / "early", 37.2), heard(tmp_path / "late", -5.0)
    assert early.news("gpu2").startswith("warning: the clock of gpu2 is 37 s ahead of this machine's. ")
    assert early.news("gpu2") == ""
    assert late.news("gpu3").startswith("warning: the clock of gpu3 is 5 s behind this machine's. ")
    assert abs(json.loads((tmp_path / "early").read_text())["ahead"] - 37.2) < 0.01


def test_nothing_is_said_of_small_differences_nor_of_this_disk(tmp_path: Path) -> None:
    assert NodeClock(tmp_path / "new").news("gpu2") == ""
    assert heard(tmp_path / "small", 1.0).news("gpu2") == ""
    assert heard(tmp_path / "slow", 2.5, way=2.0).news("gpu2") == "", "it may be the way of the message"
    assert heard(None, 60.0).news("gpu2") == ""
    assert heard(tmp_path / "none" / "there", 60.0).known is not None, "the disk is full"


def test_a_clock_is_asked_for_often_until_it_is_known(tmp_path: Path) -> None:
    assert NodeClock(None).sure, "it is this machine's"
    assert not NodeClock(tmp_path / "new").sure
    assert heard(tmp_path / "good", 37.2).sure
    slow = heard(tmp_path / "slow", 37.2, way=2.0)
    assert not slow.sure
    for _ in range(9):
        slow.hear(Ping(t=10.0, clock=1037.0), now=12.0, wall=1000.0)
    assert slow.sure, "a line as slow as that will not become better"
