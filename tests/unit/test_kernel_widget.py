"""What carries messages between a widget's views and their feeds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from jupyter_torchdist.feed import Feed
from jupyter_torchdist.kernel import pump
from jupyter_torchdist.kernel.subshell import MainShell, Subshells
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.testing import FakeJob
from tests.leaks import wait_until

OPEN = {"type": "open", "logs": {}}


class Port:
    """A widget whose browser is this test."""

    def __init__(self, job: FakeJob) -> None:
        self.job = job
        self.sent: list[tuple[str, bool, dict[str, Any]]] = []
        self.left = threading.Event()
        self.broken = False

    def feed(self) -> Feed:
        return Feed(self.job.paths, self.job.home)

    def send(self, view: str, messages: list[dict[str, Any]], binary: bool) -> None:
        self.sent += [(view, binary, message) for message in messages]

    def ended(self) -> bool:
        return self.job.paths.summary.exists()

    def abandoned(self) -> None:
        self.left.set()

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()

    def of(self, view: str, kind: str) -> list[dict[str, Any]]:
        return [message for name, _, message in self.sent if name == view and message["type"] == kind]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setattr(pump, "LINGER", 0.1)
    monkeypatch.setattr(pump, "QUIET", 0.1)
    monkeypatch.setattr(pump, "ALONE", 0.02)
    with FakeJob().running() as job:
        yield Port(job)


@pytest.fixture
def pumping(port: Port) -> Iterator[pump.Pump]:
    made = pump.Pump(port)
    yield made
    made.close()
    assert not threads()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "torchdist-view"]


def test_each_view_has_a_feed_of_its_own(port: Port, pumping: pump.Pump) -> None:
    port.job.rank(0).prints("early\n")
    pumping.hand({"view": "a", "binary": True, "message": OPEN})
    assert wait_until(lambda: bool(port.of("a", "lines")))
    pumping.hand({"view": "b", "binary": False, "message": OPEN})
    assert wait_until(lambda: bool(port.of("b", "lines")))
    assert port.of("b", "hello")[0]["n"] == 1
    assert {(view, binary) for view, binary, _ in port.sent} == {("a", True), ("b", False)}


def test_a_view_that_does_not_answer_is_forgotten(
    port: Port, pumping: pump.Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "VANISHED", 0.1)
    pumping.hand({"view": "a", "message": OPEN})
    assert wait_until(lambda: bool(port.of("a", "hello")))

    def forgotten() -> bool:
        pumping.hand({"view": "a", "message": {"type": "ask", "id": 1, "what": "older", "at": {}, "limit": 1}})
        return wait_until(lambda: bool(port.of("a", "forgotten")), 0.1)

    assert wait_until(forgotten)


def test_a_ping_is_answered_and_tells_a_forgotten_view_to_open(port: Port, pumping: pump.Pump) -> None:
    pumping.hand({"view": "a", "message": OPEN})
    pumping.hand({"view": "a", "ping": True})
    pumping.hand({"view": "b", "ping": True})
    assert wait_until(lambda: bool(port.of("b", "forgotten")))
    assert len(port.of("a", "alive")) == 1 and port.of("a", "forgotten") == []


def test_a_late_acknowledgement_of_a_view_that_is_gone_gets_no_answer(port: Port, pumping: pump.Pump) -> None:
    pumping.hand({"view": "a", "message": {"type": "ack", "n": 0}})
    pumping.hand({"view": "b", "message": {"type": "ask", "id": 1, "what": "older", "at": {}, "limit": 1}})
    assert wait_until(lambda: bool(port.of("b", "forgotten")))
    assert port.of("a", "forgotten") == []


def test_the_thread_rests_after_the_end_and_comes_back_for_a_question(port: Port, pumping: pump.Pump) -> None:
    pumping.hand({"view": "a", "message": OPEN})
    assert wait_until(lambda: bool(port.of("a", "hello")))
    port.job.ended("succeeded")

    def rests() -> bool:
        pumping.hand({"view": "a", "message": {"type": "ack", "n": port.sent[-1][2]["n"]}})
        return wait_until(lambda: not threads(), 0.5)

    assert wait_until(rests)
    assert not port.left.is_set()
    search = {"type": "ask", "id": 7, "what": "search", "pattern": "x", "regex": False, "case": True, "files": []}
    pumping.hand({"view": "a", "message": {**search, "at": None}})
    assert wait_until(lambda: bool(port.of("a", "answer")))


def test_nobody_is_waited_for_but_a_moment(port: Port, pumping: pump.Pump) -> None:
    pumping.start()
    assert not port.left.wait(0.3)
    port.job.ended("succeeded")
    assert port.left.wait(5)
    assert wait_until(lambda: not threads())


def test_a_view_that_says_good_bye_is_the_last(port: Port, pumping: pump.Pump) -> None:
    pumping.hand({"view": "a", "message": OPEN})
    assert wait_until(lambda: bool(port.of("a", "hello")))
    port.job.ended("succeeded")
    pumping.hand({"view": "a", "bye": True})
    assert port.left.wait(5)


@pytest.mark.parametrize(
    "content",
    [{}, {"view": 3}, {"view": "a"}, {"view": "a", "message": "x"}, {"view": "a", "message": {}}, {"bye": True}],
)
def test_nonsense_changes_nothing(port: Port, pumping: pump.Pump, content: dict[str, Any]) -> None:
    pumping.hand(content)
    pumping.hand({"view": "b", "message": OPEN})
    assert wait_until(lambda: bool(port.of("b", "hello")))


def test_one_views_trouble_is_not_anothers(port: Port, pumping: pump.Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    pumping.hand({"view": "b", "message": OPEN})
    assert wait_until(lambda: bool(port.of("b", "hello")))
    monkeypatch.setattr(Feed, "receive", lambda *_: 1 / 0)
    pumping.hand({"view": "a", "message": OPEN})
    assert wait_until(lambda: bool(port.of("a", "gone")))
    assert "ZeroDivisionError" in port.of("a", "gone")[0]["reason"]
    monkeypatch.undo()
    port.job.rank(0).prints("later\n")
    assert wait_until(lambda: bool(port.of("b", "lines")))


def test_a_kernel_without_subshells_is_left_alone() -> None:
    subshells = Subshells(object())
    with subshells.held():
        assert subshells.name is None
    assert not subshells.route(object())
    assert MainShell.of(object()) is None


def test_a_comm_is_routed_to_our_subshell_while_it_is_there() -> None:
    class Comm:
        def _reply_subshell_for(self, data: object, asked: str | None) -> str | None:
            raise AssertionError("replaced")

    subshells, comm = Subshells(object()), Comm()
    assert subshells.route(comm)
    assert comm._reply_subshell_for({}, "theirs") == "theirs"
    subshells.name = "ours"
    assert comm._reply_subshell_for({}, "theirs") == "ours"


def test_messages_travel_together_as_far_as_they_are_small() -> None:
    large = "x" * (pump.BUNDLE - 100)
    texts = [codec.dumps(word) for word in ("a", {"b": 1}, large, "c", 2 * large, "d")]
    bundles = list(pump.bundles(texts))
    assert [codec.loads(bundle) for bundle in bundles] == [["a", {"b": 1}, large, "c"], [2 * large], ["d"]]
    assert list(pump.bundles([])) == []
