"""A feed as its view sees it: messages in, messages out, over the files of a job."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.feed import Feed, pace
from jupyter_torchdist.feed import feed as module
from jupyter_torchdist.feed.cancel import cancel
from jupyter_torchdist.feed.rerun import command
from jupyter_torchdist.node.gauges import Board
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.bundle import Captured
from jupyter_torchdist.protocol.errors import JobNotFound
from jupyter_torchdist.protocol.events import Event
from jupyter_torchdist.protocol.feed import MESSAGE_BYTES, RATE, UNSEEN, VERSION
from jupyter_torchdist.protocol.gauges import Gauges, Traffic
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.protocol.process import ProcessId
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.protocol.state import JobState, fold
from jupyter_torchdist.store import files, journal
from jupyter_torchdist.store.jobdir import taken_requests
from jupyter_torchdist.testing import FakeJob, a_spec

Message = dict[str, Any]


class View:
    """What a browser does, with a clock moved by hand."""

    def __init__(self, job: FakeJob, *, acks: bool = True) -> None:
        self.feed = Feed(job.paths, job.home)
        self.said: list[Message] = []
        self.now = 1000.0
        self._acks = acks

    def open(self, **logs: int) -> View:
        return self.send(type="open", logs={name.replace("_", ".").strip("r"): end for name, end in logs.items()})

    def send(self, **message: Any) -> View:
        self._take(self.feed.receive(message))
        return self

    def poll(self, seconds: float = 1.0) -> View:
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self._take(self.feed.poll(self.now))
        return self

    def _take(self, said: list[Message]) -> None:
        for message in said:
            assert codec.loads(codec.dumps(message)).keys() == message.keys()
        self.said += said
        if self._acks and said:
            self._take(self.feed.receive({"type": "ack", "n": said[-1]["n"]}))

    def ask(self, **question: Any) -> Message:
        self.send(type="ask", id=99, **question)
        for _ in range(1000):
            if found := [message for message in self.said if message["type"] == "answer"]:
                self.said = [message for message in self.said if message["type"] != "answer"]
                return found[0]
            self.poll(0.05)
        raise AssertionError("no answer")

    def of(self, kind: str) -> list[Message]:
        return [message for message in self.said if message["type"] == kind]

    def text(self, file: str) -> str:
        return "".join(part["text"] for said in self.of("lines") for part in said["segments"] if part["file"] == file)

    def state(self) -> JobState:
        events = [Event.from_json(event) for message in self.of("events") for event in message["events"]]
        return fold(events, JobState.from_json(self.of("hello")[-1]["state"]))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    with FakeJob(Home(tmp_path / "home"), ranks=2, now=time.time()) as job:
        yield job.running()


def test_the_first_message_says_what_the_job_is(job: FakeJob) -> None:
    job.rank(1).prints("hello\n")
    receipt = (Captured("model", "model", "Linear with 2 parameters", 100, "line 3"),)
    files.publish_json(
        job.paths.manifest, {**job.manifest.to_json(), "notes": ["a note"], "receipt": [vars(item) for item in receipt]}
    )
    (hello,) = View(job).open().said
    assert (hello["type"], hello["n"], hello["version"], hello["job"]) == ("hello", 1, VERSION, job.paths.job)
    assert hello["spec"] == job.spec.to_json()
    assert hello["plan"] == job.plan.to_json()
    assert hello["receipt"] == [vars(item) for item in receipt]
    assert hello["notes"] == ["a note"]
    assert hello["command"] == f"torchdist rerun {job.paths.job}"
    assert JobState.from_json(hello["state"]) == journal.state(job.paths)
    assert hello["sizes"] == {"1.out": 6}
    assert abs(hello["now"] - time.time()) < 10


def test_nothing_is_said_before_the_view_opens(job: FakeJob) -> None:
    assert View(job).poll().said == []


def test_a_job_that_does_not_exist(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with pytest.raises(JobNotFound):
        Feed(home.job("20260102-030405-000000"), home)


def test_what_happens_comes_as_events_and_folds_to_the_same_state(job: FakeJob) -> None:
    view = View(job).open().poll()
    job.tell("job.invented", answer=42, numbers=[1, 2])
    job.rank(1).failed(ValueError("no"))
    view.poll()
    job.ended("failed", "a rank failed", 1)
    view.poll()
    events = [event for message in view.of("events") for event in message["events"]]
    assert [event["kind"] for event in events] == ["job.invented", "rank.failed", "job.ended"]
    assert events[0]["answer"] == 42
    assert view.state() == journal.state(job.paths)
    assert view.of("status")[-1]["effective"] == "failed"


def test_a_job_that_has_ended_is_whole_in_the_first_message(job: FakeJob) -> None:
    job.rank(0).prints("last words")
    job.ended()
    view = View(job).open().poll()
    assert view.state().state == "succeeded"
    assert view.of("events") == []
    assert view.text("0.out") == "last words"


def test_a_summary_without_its_event_is_told(job: FakeJob) -> None:
    view = View(job).open().poll()
    job.close()
    journal.publish_summary(
        job.paths, fold([Event("job.ended", 5.0, data={"state": "lost"})], journal.state(job.paths))
    )
    view.poll()
    assert len(view.of("hello")) == 2
    assert view.state().state == "lost"


def test_another_attempt_is_told_with_its_plan(job: FakeJob) -> None:
    view = View(job).open().poll()
    fewer = replace(job.plan, nodes=(replace(job.plan.nodes[0], ranks=(0,)),), world_size=1)
    files.publish_json(job.paths.plan, fewer.to_json())
    job.tell("job.starting", attempt=2, fresh=False, restarts=1, world_size=1)
    view.poll()
    first, second = view.of("hello")
    assert (first["plan"], second["plan"]) == (job.plan.to_json(), fewer.to_json())
    assert (view.state().attempt, view.state().world_size) == (2, 1)
    job.rank(0).started().ready()
    assert view.poll().state().ranks[0].ready, "events go on after it"
    job.paths.plan.write_text("no plan")
    job.tell("job.starting", attempt=3, fresh=False, restarts=2, world_size=1)
    assert view.poll().of("hello")[2]["plan"] == fewer.to_json()


def test_lines_come_while_they_are_written(job: FakeJob) -> None:
    view = View(job).open().poll()
    job.rank(0).prints("a\nb").prints("oops\n", "err")
    view.poll(0.2)
    assert view.text("0.out") == "a\n"
    job.rank(0).prints("\nc")
    view.poll()
    assert view.text("0.out") == "a\nb\nc"
    assert view.text("0.err") == "oops\n"
    ends = {part["file"]: part["end"] for message in view.of("lines") for part in message["segments"]}
    assert ends == {"0.out": 5, "0.err": 5}
    again = View(job).open(r0_out=2).poll()
    assert again.text("0.out") == "b\nc"


def test_a_view_that_opens_again_is_told_anew(job: FakeJob) -> None:
    job.rank(0).prints("a\n")
    view = View(job).open().poll().open().poll()
    assert [message["n"] for message in view.said if message["type"] == "hello"] == [1, 1]
    assert view.text("0.out") == "a\na\n"


def test_messages_are_numbered_and_wait_for_a_view_that_is_slow(job: FakeJob) -> None:
    view = View(job, acks=False).open()
    for number in range(60):
        job.rank(0).prints(f"line {number}\n" * 5000)
        view.poll(0.3)
    assert [message["n"] for message in view.said] == list(range(1, UNSEEN + 1))
    assert view.ask(what="older", at={}, files=[], limit=100)["segments"]
    view.send(type="ack", n=len(view.said) + 1)
    view.poll(0.2)
    assert len(view.said) > UNSEEN
    last = view.of("lines")[-1]["segments"]
    assert last[0]["start"] > view.of("lines")[-2]["segments"][-1]["end"] or last[-1]["end"]


def test_not_too_often_and_never_too_much(job: FakeJob) -> None:
    view = View(job).open()
    for number in range(100):
        job.rank(number % 2).prints(f"line {number}\n" * 20_000)
        view.poll(0.05)
    assert len(view.said) <= RATE * 5 + 3
    for message in view.of("lines"):
        assert sum(len(part["text"]) for part in message["segments"]) <= MESSAGE_BYTES + 64 * 1024
    view.poll(3)
    sizes = {name: log.size() for name, log in view.feed._logs.items()}
    ends = {part["file"]: part["end"] for message in view.of("lines") for part in message["segments"]}
    assert ends == sizes


def test_what_goes_over_the_network_of_hosts_is_told(job: FakeJob) -> None:
    view = View(job).open().poll()
    assert view.of("status")[-1]["network"] == {}
    job.takes(rank0=Gauges(97))
    Board(job.paths, "node0").write({}, {"eth0": Traffic(5, 7)})
    view.poll()
    assert view.of("status")[-1]["network"] == {"node0": {"eth0": {"received": 5, "sent": 7}}}


def test_what_ranks_take_is_told_when_it_changes(job: FakeJob) -> None:
    view = View(job).open().poll()
    assert view.of("status")[-1]["gauges"] == {}
    job.takes(rank0=Gauges(97, 1_250_000_000, 1_250_000_000))
    view.poll()
    assert view.of("status")[-1]["gauges"] == {"0": Gauges(97, 1_250_000_000, 1_250_000_000).to_json()}
    told = len(view.of("status"))
    job.takes(rank0=Gauges(97, 1_250_000_000, 1_250_000_000))
    view.poll()
    assert len(view.of("status")) == told
    job.ended()
    assert View(job).open().poll().of("status")[-1]["gauges"]["0"]["memory_peak"] == 1_250_000_000


def test_a_deleted_job_says_so_and_ends(job: FakeJob) -> None:
    view = View(job).open().poll()
    job.close()
    shutil.rmtree(job.paths.root)
    view.poll(2)
    assert view.said[-1]["type"] == "gone"
    assert "deleted" in view.said[-1]["reason"]
    assert len(view.of("gone")) == 1
    assert view.send(type="open", logs={}).poll().said[-1]["type"] == "gone"


def test_a_job_deleted_before_the_view_opens(job: FakeJob) -> None:
    view = View(job)
    job.close()
    shutil.rmtree(job.paths.root)
    assert [message["type"] for message in view.open().poll().said] == ["gone"]


def test_a_job_whose_driver_died_is_orphaned(job: FakeJob) -> None:
    here = ProcessId.mine()
    job.drive(ProcessId(here.host, here.boot, here.namespace, 2**22 - 1, 1))
    assert View(job).open().poll().of("status")[-1]["effective"] == "orphaned"


def test_cancel_asks_and_says_what_was_done(job: FakeJob) -> None:
    view = View(job).open()
    assert "asked to stop" in view.ask(what="cancel", kill=False)["said"]
    assert "being killed" in view.ask(what="cancel", kill=True)["said"]
    assert [asked.kind for asked in taken_requests(job.paths)] == ["interrupt", "kill"]
    job.ended("cancelled")
    assert view.ask(what="cancel", kill=False)["said"] == "the job has ended already: cancelled"


class Attaching(DriverPool):
    """A pool that starts no process, and counts."""

    attached = 0

    def attach(self, paths: JobPaths) -> subprocess.Popen[bytes]:
        self.attached += 1
        with subprocess.Popen(["true"]) as ended:
            return ended


def test_cancel_gives_a_job_without_driver_a_new_one(job: FakeJob) -> None:
    job.drive(replace(ProcessId.mine(), ticks=1))
    pool = Attaching()
    assert "by a new driver" in cancel(job.paths, job.home, False, pool)
    assert pool.attached == 1
    assert [asked.kind for asked in taken_requests(job.paths)] == ["interrupt"]


def test_cancel_of_a_job_whose_host_is_silent(job: FakeJob) -> None:
    job.drive(ProcessId("elsewhere", "boot", "namespace", 1, 1), beat=time.time() - 1000)
    pool = Attaching()
    assert "once its driver answers" in cancel(job.paths, job.home, True, pool)
    assert pool.attached == 0
    assert [asked.kind for asked in taken_requests(job.paths)] == ["kill"]


def test_an_old_acknowledgement_does_not_count_for_a_new_connection(job: FakeJob) -> None:
    view = View(job, acks=False).open().send(type="ack", n=10**6)
    for number in range(40):
        job.rank(0).prints(f"line {number}\n")
        view.poll(0.2)
    assert len(view.said) == UNSEEN + 1


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"what": "nonsense"}, "the feed cannot answer 'nonsense'"),
        ({"what": "older", "at": 3, "limit": 5}, "cannot be answered"),
        ({"what": "search", "pattern": "(", "regex": True}, "not a regular expression"),
        ({"what": "curves", "mode": "band", "low": "x"}, "cannot be answered"),
        ({"what": "display", "rank": 0}, "number is missing"),
        ({"what": "display", "rank": 0, "number": 1e999}, "cannot be answered"),
        ({"what": "display", "rank": 0, "number": 7}, "rank 0 has no display 7; "),
        ({}, "the feed cannot answer"),
    ],
)
def test_questions_that_make_no_sense_get_words(job: FakeJob, question: Message, words: str) -> None:
    job.rank(0).records({"t": 1.0, "k": "log", "step": 1, "v": {"a": 1}})
    answer = View(job).open().poll().ask(**question)
    assert answer["id"] == 99
    assert words in answer["error"]


def test_messages_that_make_no_sense_are_passed_over(job: FakeJob) -> None:
    view = View(job).open()
    for message in ({"type": "what"}, {}, {"type": "ack"}, {"type": "ack", "n": "x"}, {"type": "open", "logs": [1]}):
        view.feed.receive(message)
    assert view.poll().of("status")


def test_questions_are_answered_by_their_numbers_and_bounded(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TASKS", 0)
    assert "too many" in View(job).open().ask(what="curves")["error"]


def test_samples_of_all_ranks_are_counted(job: FakeJob) -> None:
    view = View(job).open().poll()
    assert view.of("status")[-1]["samples"] is None
    job.rank(0).records({"t": 1.0, "k": "samples", "n": 64}, {"t": 2.0, "k": "samples", "n": 128})
    job.rank(1).records({"t": 1.0, "k": "samples", "n": 100}, {"t": 1.0, "k": "samples", "n": "x"})
    assert view.poll().of("status")[-1]["samples"] == 228


def test_what_a_rank_displayed_is_answered_with_its_newest_content(job: FakeJob) -> None:
    html = {"text/html": "<b>x</b>"}
    job.rank(1).displays(
        {"number": 1, "data": {"text/plain": "old"}}, {"number": 2, "data": html, "metadata": {"a": 1}}
    )
    job.rank(1).displays({"kind": "update", "number": 1, "data": {"text/plain": "new"}})
    view = View(job).open().poll()
    assert view.ask(what="display", rank=1, number=1)["data"] == {"text/plain": "new"}
    answer = view.ask(what="display", rank=1, number=2)
    assert (answer["data"], answer["metadata"]) == (html, {"a": 1})


def test_curves_fill_while_the_view_looks(job: FakeJob) -> None:
    view = View(job).open().poll()
    job.rank(0).records(*({"t": float(n), "k": "log", "step": n, "v": {"loss": n}} for n in range(100)))
    view.poll(2)
    assert view.of("status")[-1]["curves"] == {"version": 100, "names": ["loss"], "note": ""}
    question = {"what": "curves", "names": [], "mode": "rank0", "ranks": [], "x": "step"}
    answer = view.ask(**question, low=None, high=None, width=500)
    assert answer["series"][0]["y"].tolist() == list(range(100))


def test_curves_that_are_asked_for_at_once_are_answered_when_the_files_were_read(job: FakeJob) -> None:
    """A question that was open when its socket broke comes first on the new one, to a feed that knows nothing yet."""
    job.rank(0).records(*({"t": float(n), "k": "log", "step": n, "v": {"loss": n}} for n in range(100)))
    view = View(job).open()
    curves = {"what": "curves", "names": ["loss"], "mode": "band", "ranks": [], "x": "step", "width": 500}
    answer = view.ask(**curves)
    assert answer["version"] == 100
    assert answer["series"][0]["y"].tolist() == list(range(100))


def test_curves_of_a_running_job_wait_when_they_have_cost_enough(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SHARE", 0.0)
    job.rank(0).records({"t": 1.0, "k": "log", "step": 1, "v": {"a": 1}})
    view = View(job).open().poll()
    curves = {"what": "curves", "names": [], "mode": "band", "ranks": [], "x": "step", "width": 100}
    assert view.ask(**curves)["series"]
    view.feed._pace.spend(1_000_000)
    view.send(type="ask", id=1, **curves).poll()
    assert not view.of("answer")
    view.send(type="ask", id=2, what="older", at={}, files=[], limit=10).poll()
    assert [answer["id"] for answer in view.of("answer")] == [2]
    job.ended()
    view.poll()
    assert [answer["id"] for answer in view.of("answer")] == [2, 1]


def test_a_damaged_manifest_costs_the_receipt_alone(job: FakeJob) -> None:
    job.paths.manifest.write_text("{")
    (hello,) = View(job).open().said
    assert hello["receipt"] == []
    assert "the captured names cannot be read" in hello["notes"][0]


def test_sixty_four_ranks_in_bounded_time(tmp_path: Path) -> None:
    with FakeJob(Home(tmp_path), ranks=64, nodes=4, now=time.time()) as job:
        job.running()
        for rank in range(64):
            job.rank(rank).prints(b"x" * 99 + b"\n" * 10_000)
            job.rank(rank).records(*({"t": float(n), "k": "log", "step": n, "v": {"loss": n}} for n in range(100)))
        view, longest = View(job).open(), 0.0
        for _ in range(60):
            begun = time.thread_time()
            view.poll(0.05)
            longest = max(longest, time.thread_time() - begun)
        assert longest < 1.0  # 0.2 s on a quiet machine
        assert len({part["file"] for message in view.of("lines") for part in message["segments"]}) == 64


@pytest.mark.parametrize(
    ("options", "argv", "words"),
    [
        ("--ranks 2", (), "--ranks 2 FILE"),
        ("--gpus 4 --timeout 90 --fresh", ("train.py", "--lr", "1"), "--gpus 4 --timeout 90 --fresh FILE -- --lr 1"),
        ("--env A=1 --env B --name 'my job' --plan", (), "--name 'my job' --env A --env B FILE"),
        ("--ranks 1 --out a,b --background", (), "--ranks 1 --out a,b FILE"),
        ("--ranks 1 --out none", (), "--ranks 1 FILE"),
    ],
)
def test_the_command_of_a_script(options: str, argv: tuple[str, ...], words: str) -> None:
    chosen = Options.from_json(parse_options(options).to_json())
    spec = a_spec(kind="script", label="/home/a b/train.py", options=chosen, argv=argv)
    assert command(spec) == "torchdist run " + words.replace("FILE", "'/home/a b/train.py'")


def test_the_command_of_a_module() -> None:
    spec = a_spec(kind="module", source="pkg.train", label="-m pkg.train", argv=("-m", "--lr", "1"))
    assert command(spec) == "torchdist run --ranks 2 -m pkg.train -- --lr 1"


def test_who_may_only_look_cannot_cancel(job: FakeJob) -> None:
    feed = Feed(job.paths, job.home, may_cancel=False)
    feed.receive({"type": "open", "logs": {}})
    (answer,) = feed.receive({"type": "ask", "id": 1, "what": "cancel", "kill": True})
    assert "not yours to cancel" in answer["error"]
    assert taken_requests(job.paths) == []
