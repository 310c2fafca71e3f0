"""Waiting for a job while somebody presses ■."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from jupyter_torchdist.protocol.state import JobState
from jupyter_torchdist.verbs import waiting
from jupyter_torchdist.verbs.waiting import ENDING, Ended, Interrupts, wait


class Asked:
    """A job that ends so many polls after it was asked to, and notes what it was asked."""

    def __init__(self, obeys: str = "interrupt", polls: int = 3) -> None:
        self.requests: list[str] = []
        self.revived = 0
        self._obeys, self._left = obeys, polls
        self._state = JobState("j", state="running")

    @property
    def state(self) -> JobState:
        if self._obeys in self.requests or self._obeys == "nothing":
            self._left -= 1
        if self._left <= 0:
            self._state = replace(self._state, state="cancelled")
        return self._state

    def interrupt(self) -> None:
        self.requests.append("interrupt")

    def terminate(self) -> None:
        self.requests.append("terminate")

    def kill(self) -> None:
        self.requests.append("kill")

    def revive(self) -> None:
        self.revived += 1


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def presser(times: int, number: signal.Signals = signal.SIGINT) -> Callable[[JobState], None]:
    """A tick that presses ■, or sends another signal, on its first calls."""
    calls = iter(range(times))

    def tick(_state: JobState) -> None:
        if next(calls, None) is not None:
            os.kill(os.getpid(), number)

    return tick


def test_a_job_that_ends_by_itself_is_asked_nothing() -> None:
    job = Asked("nothing")
    seen: list[str] = []
    with Interrupts() as interrupts:
        interrupts.hold()
        state = wait(job, interrupts, lambda state: seen.append(state.state))
    assert (state.state, job.requests) == ("cancelled", [])
    assert seen == ["running", "running", "cancelled"]
    assert job.revived == 2


@pytest.mark.parametrize(("presses", "obeys", "asked"), [(1, "interrupt", 1), (2, "kill", 2)])
def test_the_first_interrupt_asks_and_the_second_kills(presses: int, obeys: str, asked: int) -> None:
    job = Asked(obeys)
    with Interrupts() as interrupts:
        interrupts.hold()
        state = wait(job, interrupts, presser(presses))
    assert state.final
    assert job.requests == ["interrupt", "kill"][:asked]


def test_the_third_interrupt_gives_the_cell_back() -> None:
    job = Asked("never")
    with Interrupts() as interrupts:
        interrupts.hold()
        state = wait(job, interrupts, presser(3))
    assert state.state == "running"
    assert job.requests == ["interrupt", "kill"]


def test_whoever_only_looks_asks_nothing() -> None:
    job = Asked("never")
    with Interrupts() as interrupts:
        interrupts.hold()
        assert wait(job, interrupts, presser(1), detach=True).state == "running"
    assert job.requests == []


def test_interrupts_raise_until_they_are_held_and_after_they_are_released() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            press()
        interrupts.hold()
        press()
        press()
        interrupts.release()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert interrupts.count == 2


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_to_end_terminates_and_what_follows_at_once_is_the_same_one(number: signal.Signals) -> None:
    """``timeout`` signals its child, and then the group that its child is in."""
    job = Asked("terminate", polls=5)
    with Interrupts(ENDING) as interrupts:
        interrupts.hold()
        state = wait(job, interrupts, presser(3, number))
    assert state.final
    assert (job.requests, interrupts.ended_by) == (["terminate"], number)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_second_signal_to_end_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "ECHO", 0.0)
    job = Asked("kill")
    with Interrupts(ENDING) as interrupts:
        interrupts.hold()
        wait(job, interrupts, presser(2, signal.SIGTERM))
    assert job.requests == ["terminate", "kill"]


def test_what_nohup_ignores_stays_ignored_and_before_the_job_a_signal_raises() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(ENDING) as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(Ended):
                os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_handler_that_was_there_is_put_back() -> None:
    def mine(*_: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGINT, mine)
    try:
        with Interrupts():
            pass
        assert signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with Interrupts():
            pass
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_the_handler_alone_and_takes_an_exception_for_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    job = Asked("interrupt")
    raised = iter([True])
    result: list[JobState] = []

    def tick(_state: JobState) -> None:
        if next(raised, False):
            raise KeyboardInterrupt

    def body() -> None:
        with Interrupts() as interrupts:
            interrupts.hold()
            assert signal.getsignal(signal.SIGINT) is before
            result.append(wait(job, interrupts, tick))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert job.requests == ["interrupt"]
    assert result[0].final


def test_an_interrupt_that_begins_a_shut_down_leaves_the_job_alone() -> None:
    job = Asked()
    looks = iter([False, False, True])
    with Interrupts() as interrupts:
        interrupts.hold()
        state = wait(job, interrupts, presser(1), closing=lambda: next(looks))
    assert state.state == "running"
    assert job.requests == []


@pytest.mark.parametrize(("presses", "asked"), [(1, ["interrupt"]), (2, ["interrupt", "kill"])])
def test_other_interrupts_are_a_persons(presses: int, asked: list[str]) -> None:
    job = Asked(asked[-1])
    with Interrupts() as interrupts:
        interrupts.hold()
        state = wait(job, interrupts, presser(presses), closing=lambda: False)
    assert state.state == "cancelled"
    assert job.requests == asked
