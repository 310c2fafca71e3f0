"""What the Communication tab asks: transports from NCCL's lines, and when ranks entered collectives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.diagnosis import transports
from jupyter_torchdist.feed import Feed
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.store import files, jobdir
from jupyter_torchdist.testing import FakeJob
from tests.unit.test_recorder import call, dump

T = 1_790_000_000.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    with FakeJob(Home(tmp_path / "home"), ranks=4, nodes=2) as job:
        yield job.running()


def entered(number: int, at: float, *, ended: bool = True, **more: Any) -> dict[str, Any]:
    return {
        **call("all_reduce", number, backend="gloo", ended=ended, **more),
        "time_created_ns": round((T + at) * 1e9),
    }


def recorded(job: FakeJob, rank: int, *calls: dict[str, Any], at: float = 10.0, end: str = "") -> None:
    """What the rank writes at ``T + at``."""
    value = {"rank": rank, "t": T + at, "end": end, "place": "", "groups": {"0": [0, 1, 2, 3]}}
    path = job.paths.node(job.plan.node_of(rank).name).recorder(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps({**value, "recorders": [dump(calls)]}) + "\n")


def ask(job: FakeJob, *, may_cancel: bool = True, **question: Any) -> dict[str, Any]:
    feed = Feed(job.paths, job.home, may_cancel)
    feed.receive({"type": "open"})
    said = feed.receive({"type": "ask", "id": 1, "what": "communication", **question})
    now = 1.0
    while not (found := [message for message in said if message["type"] == "answer"]):
        now += 0.05
        said = feed.poll(now)
    return found[0]


def test_a_job_that_has_recorded_nothing(job: FakeJob) -> None:
    told = ask(job)
    assert (told["transports"], told["calls"], told["time"], told["silent"]) == ([], [], None, [0, 1, 2, 3])


def test_when_each_rank_entered_on_one_clock(job: FakeJob) -> None:
    files.publish_json(job.paths.clock("node1"), {"ahead": 100.0})
    for rank in range(4):
        ahead = 100.0 if rank > 1 else 0.0
        recorded(job, rank, entered(1, 1 + rank / 10 + ahead), entered(2, 2 + ahead), at=10 + ahead)
    told = ask(job)
    (first, second) = told["calls"]
    assert first["name"] == "all_reduce #1 of 4 float32"
    assert (first["group"], first["ranks"], first["missing"], first["ended"]) == ("", [0, 1, 2, 3], [], True)
    assert first["at"] == pytest.approx([T + 1, T + 1.1, T + 1.2, T + 1.3], abs=1e-4)
    assert second["at"] == pytest.approx([T + 2] * 4, abs=1e-4)
    assert told["time"] == pytest.approx(T + 10, abs=1e-4)
    assert told["silent"] == []


def test_who_is_missing_and_who_has_told_nothing(job: FakeJob) -> None:
    recorded(job, 0, entered(1, 1), entered(2, 2, ended=False))
    recorded(job, 1, entered(1, 1.5))
    recorded(job, 2, entered(1, 1), entered(2, 2.5, ended=False))
    told = ask(job)
    assert [(one["ranks"], one["missing"], one["ended"]) for one in told["calls"]] == [
        ([0, 1, 2], [], True),
        ([0, 2], [1], False),
    ]
    assert told["silent"] == [3]


def test_collectives_that_are_not_in_every_ring_are_left_out(job: FakeJob) -> None:
    recorded(job, 0, entered(1, 1), entered(2, 2), entered(3, 3))
    recorded(job, 1, entered(3, 3.5))
    assert [one["name"] for one in ask(job)["calls"]] == ["all_reduce #3 of 4 float32"]


def test_the_last_whole_dump_of_a_moment_counts(job: FakeJob) -> None:
    recorded(job, 0, entered(1, 1))
    recorded(job, 0, entered(2, 2), at=100.0)
    recorded(job, 1, entered(1, 1), at=10.0)
    recorded(job, 2, entered(2, 2.5), at=20.0, end="done")
    with open(job.paths.node("node0").recorder(0), "a") as file:
        file.write('{"rank": 0, "t": 1')
    told = ask(job)
    assert [one["ranks"] for one in told["calls"]] == [[0, 2]], "what a rank has done at its end stays true"
    assert told["silent"] == [1, 3]


@pytest.mark.parametrize("text", ["", "\n\n", "{}\n", "[" * 100_000 + "\n", "\xff", '{"rank": 1, "recorders": []}\n'])
def test_a_file_that_user_code_wrote(job: FakeJob, text: str) -> None:
    recorded(job, 1, entered(1, 1))
    job.paths.node("node0").recorder(0).write_text(text, "latin-1")
    told = ask(job)
    assert told["silent"] == [0, 2, 3]


def test_fresh_asks_the_ranks(job: FakeJob) -> None:
    ask(job, fresh=True)
    assert [request.kind for request in jobdir.taken_requests(job.paths)] == ["stacks"]
    ask(job)
    assert jobdir.taken_requests(job.paths) == []


def test_a_guest_sees_what_is_there_and_asks_no_rank(job: FakeJob) -> None:
    recorded(job, 0, entered(1, 1))
    assert len(ask(job, may_cancel=False)["calls"]) == 1
    told = ask(job, may_cancel=False, fresh=True)
    assert told["error"] == "this job is not yours to ask its ranks; ask its owner"
    assert jobdir.taken_requests(job.paths) == []


def test_a_question_that_is_malformed(job: FakeJob) -> None:
    assert "cannot be answered" in ask(job, fresh="yes")["error"]


LINE = "box:41:99 [0] NCCL INFO Channel {} via {}\n"


def test_transports_of_each_node(job: FakeJob) -> None:
    files.publish_json(job.paths.plan, replace(job.plan, backend="nccl").to_json())
    job.rank(0).prints("hello\n" + 2 * LINE.format("00/0 : 0[0] -> 1[1]", "P2P/CUMEM/read"))
    job.rank(2).prints(LINE.format("00/0 : 1[1] -> 2[0] [receive]", "NET/IB/0(1)/GDRDMA/Shared"), "err")
    log = job.paths.node("node1").nccl(3)
    log.with_name(log.name + ".4711").write_text(LINE.format("01 : 2[0] -> 3[1]", "SHM/direct/direct"))
    assert ask(job)["transports"] == [
        {"node": "node0", "inside": ["P2P/CUMEM"], "outside": []},
        {"node": "node1", "inside": ["SHM"], "outside": ["NET/IB/0/GDRDMA"]},
    ]


@pytest.mark.parametrize(
    ("line", "via"),
    [
        ("Channel 00 : 0[1a000] -> 1[1b000] via P2P/IPC comm 0x7f08 nRanks 08", "P2P/IPC"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer", "P2P/direct pointer"),
        ("Channel 00/0 : 1[1] -> 0[0] via P2P/indirect/3[3]/read", "P2P/indirect"),
        ("Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/0/GDRDMA", "NET/AWS Libfabric/0/GDRDMA"),
        ("Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0/Shared", "NET/Socket/0"),
    ],
)
def test_the_wordings_of_releases(line: str, via: str) -> None:
    assert transports.of([f"box:41:99 [0] NCCL INFO {line}"], alone=True) == ([via], [])


def test_the_most_frequent_come_first_and_other_lines_say_nothing() -> None:
    lines = [LINE.format("00/0 : 0[0] -> 1[1]", f"NET/IB/{port}") for port in (0, 1, 1, 2, 3, 4)]
    inside, outside = transports.of([*lines, "loss 3 via P2P/IPC", ""], alone=False)
    assert (inside, len(outside), outside[0]) == ([], 4, "NET/IB/1")
