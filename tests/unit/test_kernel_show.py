"""How a job is shown while a cell waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_torchdist.feed import Feed
from jupyter_torchdist.kernel import show
from jupyter_torchdist.kernel.rich import RichOutput
from jupyter_torchdist.protocol.feed import MIME_TYPE
from jupyter_torchdist.protocol.state import JobState
from jupyter_torchdist.store import journal
from jupyter_torchdist.testing import FakeJob


class Frontend:
    """What a notebook's front end would have received, in order."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []

    def publish(self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False) -> None:
        ident = (transient or {}).get("display_id")
        self.messages.append(("update" if update else "display", (ident, data)))

    def clear_output(self, wait: bool = False) -> None:
        self.messages.append(("clear", wait))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.messages]


@pytest.fixture
def shell() -> Any:
    return SimpleNamespace(display_pub=Frontend(), kernel=object())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the display's clock."""
    now = [1000.0]
    monkeypatch.setattr(
        "jupyter_torchdist.kernel.show.time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1e6)
    )

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    return pass_time


def state(job: FakeJob) -> JobState:
    return journal.state(job.paths)


def picture(shell: Any, job: FakeJob) -> show.Watch:
    return show.watch(shell, job.paths, "compact", RichOutput(shell, job.paths), ("a note",))


def test_one_output_is_updated_no_more_often_than_eyes_see(shell: Any, clock: Callable[[float], None]) -> None:
    with FakeJob().running() as job:
        watch = picture(shell, job)
        for number in range(100):
            job.rank(0).prints(f"line {number}\n")
            watch.tick(state(job))
            clock(0.01)
        assert 5 <= len(shell.display_pub.messages) <= 10
        assert shell.display_pub.kinds[0] == "display"
        assert set(shell.display_pub.kinds[1:]) == {"update"}
        assert len({ident for _, (ident, _) in shell.display_pub.messages}) == 1
        watch.finish(state(job), ("done",))
        last = shell.display_pub.messages[-1][1][1]["text/plain"]
        assert "line 99" in last and "a note" in last and "done" in last


def test_a_full_view_names_the_job_and_keeps_the_picture_beside_it(shell: Any, clock: Callable[[float], None]) -> None:
    with FakeJob().running() as job:
        watch = show.watch(shell, job.paths, "full", RichOutput(shell, job.paths))
        watch.tick(state(job))
        bundle = shell.display_pub.messages[0][1][1]
        assert list(bundle) == [MIME_TYPE, "text/html", "text/plain"]
        assert bundle[MIME_TYPE]["job"] == job.paths.job and bundle[MIME_TYPE]["host"]
        job.ended("succeeded")
        watch.tick(state(job))
        assert "succeeded" in shell.display_pub.messages[-1][1][1]["text/plain"], "a turn of the job is drawn at once"


def test_behind_a_live_view_the_picture_is_drawn_seldom_but_its_turns_at_once(
    shell: Any, clock: Callable[[float], None]
) -> None:
    def drawn_in_a_minute(full: str) -> int:
        watch = show.watch(shell, job.paths, full, RichOutput(shell, job.paths))
        before = len(shell.display_pub.messages)
        for number in range(1200):
            job.rank(0).prints(f"line {number}\n")
            watch.tick(state(job))
            clock(0.05)
        return len(shell.display_pub.messages) - before

    with FakeJob().running() as job:
        assert drawn_in_a_minute("full") > 200
        with contextlib.closing(Feed(job.paths, job.home)) as feed:
            feed.receive({"type": "open", "logs": {}})
            feed.poll(0.0)
            assert drawn_in_a_minute("full") < 20
            assert drawn_in_a_minute("compact") > 200, "there the picture is what is seen"
        watch = show.watch(shell, job.paths, "full", RichOutput(shell, job.paths))
        watch.tick(state(job))
        job.rank(1).failed(ValueError("oh no"))
        watch.tick(state(job))
        assert "oh no" in shell.display_pub.messages[-1][1][1]["text/plain"]


def test_a_widget_that_goes_while_the_picture_is_drawn_does_not_come_back(
    shell: Any, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pump's thread ends the widget in the worst moment: when its form was read, and is not yet shown."""
    going: list[threading.Thread] = []

    class Live:
        def __init__(self, _kernel: Any, _paths: Any, still: Callable[[], None]) -> None:
            self._still, self._form = still, {"widget": 1}

        def tick(self) -> None: ...

        def show(self, _snapshot: Any) -> None: ...

        def go(self) -> None:
            self._form = {}
            self._still()

        @property
        def forms(self) -> dict[str, Any]:
            form = self._form
            if form and not going:
                going.append(threading.Thread(target=self.go))
                going[0].start()
                going[0].join(0.2)  # it would end here, were it not made to wait
            return form

    monkeypatch.setattr(show, "ready", lambda _ip: SimpleNamespace(Live=Live))
    with FakeJob().running() as job:
        watch = show.watch(shell, job.paths, "full", RichOutput(shell, job.paths))
        watch.tick(state(job))
        going[0].join()
        assert ["widget" in data for _, (_, data) in shell.display_pub.messages] == [True, False]


def test_the_courses_of_curves_are_drawn(shell: Any, clock: Callable[[float], None]) -> None:
    with FakeJob().running() as job:
        watch = picture(shell, job)
        job.rank(0).records(*({"t": 1, "k": "log", "step": n, "v": {"loss": 1 / (n + 1)}} for n in range(10)))
        watch.finish(state(job), ())
        page = shell.display_pub.messages[-1][1][1]["text/html"]
        assert "<img" in page and "0.1 to 1, steps 0 to 9" in page


def test_nothing_is_drawn_while_nothing_changes_but_the_clock(shell: Any, clock: Callable[[float], None]) -> None:
    with FakeJob().running() as job:
        watch = picture(shell, job)
        for _ in range(300):
            watch.tick(state(job))
            clock(0.01)
        assert len(shell.display_pub.messages) <= 4


def test_a_failure_is_drawn_at_once(shell: Any, clock: Callable[[float], None]) -> None:
    with FakeJob().running() as job:
        watch = picture(shell, job)
        watch.tick(state(job))
        job.rank(1).failed(ValueError("oh no"))
        watch.tick(state(job))
        assert "oh no" in shell.display_pub.messages[-1][1][1]["text/plain"]


def test_curves_and_progress_are_the_last_ones(shell: Any, clock: Callable[[float], None]) -> None:
    with FakeJob().running() as job:
        watch = picture(shell, job)
        job.rank(1).records({"t": 1, "k": "log", "step": 1, "v": {"loss": 9.0, "only1": 1.0}})
        job.rank(0).records(
            {"t": 1, "k": "log", "step": 1, "v": {"loss": 2.0}},
            {"t": 2, "k": "log", "step": 2, "v": {"loss": 0.5}},
            {"t": 2, "k": "progress", "id": 0, "desc": "train", "n": 3, "total": 4},
        )
        watch.finish(state(job), ())
        text = shell.display_pub.messages[-1][1][1]["text/plain"]
        assert "loss 0.5" in text and "only1 1" in text and "train 3 of 4 (75 %)" in text


def test_rich_output_comes_in_order_under_the_picture(shell: Any, clock: Callable[[float], None]) -> None:
    with FakeJob().running() as job:
        watch = picture(shell, job)
        watch.tick(state(job))
        job.rank(0).displays(
            {"t": 1, "kind": "display", "data": {"text/plain": "one"}, "metadata": {}, "id": "x"},
            {"t": 2, "kind": "update", "data": {"text/plain": "two"}, "metadata": {}, "id": "x"},
            {"t": 3, "kind": "result", "data": {"text/plain": "42"}, "metadata": {}, "id": None},
        )
        watch.tick(state(job))
        assert [(kind, data[1]["text/plain"]) for kind, data in shell.display_pub.messages[1:]] == [
            ("display", "one"),
            ("update", "two"),
        ]
        assert shell.display_pub.messages[1][1][0] == "x"  # other cells reach the output by it


def test_rich_output_that_is_malformed_is_passed_over(shell: Any, clock: Callable[[float], None]) -> None:
    with FakeJob().running() as job:
        watch = picture(shell, job)
        watch.tick(state(job))
        good = {"data": {"text/plain": "good"}}
        job.rank(0).displays({"data": [1]}, {"data": {}, "metadata": "x"}, {"id": 3}, {"kind": "format the disk"}, good)
        path = job.paths.node(job.plan.nodes[0].name).display(0)
        with open(path, "ab") as file:
            file.write(b"[" * 100_000 + b"\n" + b'{"kind":"display","data":{"text/plain":"torn')
        watch.tick(state(job))
        with open(path, "ab") as file:
            file.write(b' and whole"}}\n')
        watch.tick(state(job))
        shown = [data["text/plain"] for kind, (_, data) in shell.display_pub.messages[1:]]
        assert shown == ["good", "torn and whole"]


def test_clear_output_does_not_take_the_picture_away(shell: Any, clock: Callable[[float], None]) -> None:
    with FakeJob().running() as job:
        watch = picture(shell, job)
        watch.tick(state(job))
        job.rank(0).displays({"t": 1, "kind": "clear", "wait": True})
        watch.tick(state(job))
        assert shell.display_pub.kinds == ["display", "clear", "display"]


def test_off_shows_nothing_and_knows_the_result(shell: Any) -> None:
    with FakeJob().running() as job:
        rich = RichOutput(shell, job.paths, visible=False)
        watch = show.watch(shell, job.paths, "off", rich)
        job.rank(0).prints("hello\n")
        job.rank(0).displays({"data": {}, "metadata": {}}, {"kind": "result", "data": {}, "metadata": {}})
        watch.tick(state(job))
        watch.finish(state(job), ("said",))
        assert shell.display_pub.messages == []
        assert rich.result is not None


def test_a_plain_terminal_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    terminal: Any = SimpleNamespace(display_pub=Frontend())
    with FakeJob().running() as job:
        watch = show.watch(terminal, job.paths, "compact", RichOutput(terminal, job.paths), ("a note",))
        job.rank(1).prints("hello\n")
        watch.tick(state(job))
        watch.finish(state(job), ("said",))
    assert capsys.readouterr().out == "note: a note\n[rank 1] hello\nsaid\n"


def test_stderr_does_not_crowd_stdout_out(shell: Any) -> None:
    with FakeJob(ranks=1).running() as job:
        tails = show.Tails(job.paths)
        job.rank(0).prints("".join(f"out {n}\n" for n in range(50)))
        job.rank(0).prints("".join(f"err {n}\n" for n in range(50)), "err")
        tails.poll()
        assert [line for _, line in tails.lines()[0]] == [
            *(f"out {n}" for n in range(45, 50)),
            *(f"err {n}" for n in range(45, 50)),
        ]
        quiet = FakeJob(ranks=1).running()
        quiet.rank(0).prints("".join(f"err {n}\n" for n in range(50)), "err")
        quiet.close()
        tails = show.Tails(quiet.paths)
        tails.poll()
        assert [line for _, line in tails.lines()[0]] == [f"err {n}" for n in range(40, 50)]
