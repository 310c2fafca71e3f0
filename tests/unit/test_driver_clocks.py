"""The clocks of nodes, from the answers to pings."""

from __future__ import annotations

from jupyter_torchdist.driver.clocks import Clock, compared
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
