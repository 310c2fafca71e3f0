"""Events and the state they fold to; the golden journal that every fold must agree on."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol import events as events_module
from jupyter_torchdist.protocol.eventreader import EventReader
from jupyter_torchdist.protocol.events import (
    AGENT,
    FINAL_STATES,
    KINDS,
    LAUNCHER,
    RANK,
    ErrorRecord,
    Event,
    Parsed,
    Source,
    parse_lines,
)
from jupyter_torchdist.protocol.process import ProcessId
from jupyter_torchdist.protocol.state import JobState, RankState, Waiting, apply, fold
from jupyter_torchdist.views import failure_text

FEW = settings(max_examples=50, deadline=None)

GOLDEN = Path(__file__).parent / "golden"

PROCESS = ProcessId.mine().to_json()

WORDS = st.text(max_size=12)
DATA = st.dictionaries(
    WORDS.filter(lambda key: key not in ("kind", "t", "node", "rank", "seq")),
    st.none() | st.integers() | st.floats(allow_nan=False) | WORDS,
    max_size=4,
)
EVENTS = st.builds(
    Event,
    kind=st.sampled_from(["job.note", "rank.ready", "rank.done", "a.kind.of.tomorrow"]) | WORDS.filter(bool),
    t=st.floats(0, 1e12),
    node=st.none() | WORDS,
    rank=st.none() | st.integers(0, 5),
    seq=st.integers(0, 2**60),
    data=DATA,
)


@FEW
@given(st.lists(EVENTS, max_size=8), st.integers(0, 2000))
def test_lines_come_back_as_far_as_they_are_whole(events: list[Event], cut: int) -> None:
    lines = [event.to_line() for event in events]
    data = b"".join(lines)
    assert parse_lines(data) == Parsed(events, len(data))
    parsed = parse_lines(data[:cut])
    found, used = parsed.events, parsed.taken
    assert found == events[: len(found)]
    assert used == sum(map(len, lines[: len(found)]))


@FEW
@given(st.lists(EVENTS, max_size=5), st.binary(max_size=40).filter(lambda data: b"\n" not in data), st.integers(0, 5))
def test_garbage_between_lines_costs_nothing_else(events: list[Event], garbage: bytes, at: int) -> None:
    lines = [event.to_line() for event in events]
    lines.insert(at, garbage + b"\n")
    parsed = parse_lines(b"".join(lines))
    found, used = parsed.events, parsed.taken
    assert [event for event in found if event in events] == events
    assert used == len(b"".join(lines))


@pytest.mark.parametrize(
    "line",
    [b"null", b"[]", b"3", b"{}", b'{"kind":"x","seq":[1]}', b'{"kind":"x","t":"soon"}', b'{"kind":"x","t":{"a":1}}'],
)
def test_json_that_is_no_event_is_skipped(line: bytes) -> None:
    assert parse_lines(line + b"\n") == Parsed([], len(line) + 1, 1)


def test_what_a_later_start_of_the_ranks_wrote_is_left_for_later() -> None:
    up = [Event("node.up", float(number), data={"restarts": number}) for number in range(3)]
    ends = [Event("node.ended", float(number), data={"attempt": number + 1}) for number in range(3)]
    lines = [event.to_line() for pair in zip(up, ends, strict=True) for event in pair]
    data = b"".join([*lines[:2], b"nonsense\n", *lines[2:]])
    first = len(b"".join(lines[:2])) + len(b"nonsense\n")
    assert parse_lines(data, None, 0) == Parsed([up[0], ends[0]], first, 1, up[1])
    assert parse_lines(data[first:], None, 0) == Parsed([], 0, 0, up[1])
    assert parse_lines(data[first:], None, 1).events == [up[1], ends[1]]
    assert parse_lines(data, None, 2).taken == len(data)


def test_a_reader_waits_before_a_later_start_of_the_ranks(tmp_path: Path) -> None:
    up = [Event("rank.started", 1.0, rank=0, data={"process": PROCESS, "restarts": number}) for number in range(2)]
    path = tmp_path / "rank-00000.events"
    path.write_bytes(up[0].to_line() + up[1].to_line())
    reader = EventReader(path, Source(RANK, frozenset([0])), restarts=0)
    assert [reader.read(), reader.read(), reader.read()] == [[up[0]], [], []]
    assert reader.ahead == up[1]
    reader.restarts = 1
    assert [reader.read(), reader.ahead] == [[up[1]], None]


Row = tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], int]


def a_fold(*rows: Row, start: JobState | None = None) -> JobState:
    """The state after rows of (kind, data) or (kind, data, rank): the n-th has number n and time 100 + n."""
    events = [
        Event(row[0], 100.0 + number, "node0", row[2] if len(row) == 3 else None, number, row[1])
        for number, row in enumerate(rows, 1)
    ]
    return fold(events, start)


def test_a_job_that_succeeds() -> None:
    state = a_fold(
        ("job.submitted", {"job": "j", "name": "n", "label": "Cell In[1]", "world_size": 1}),
        ("job.driver", {"process": {"pid": 7}}),
        ("job.starting", {"attempt": 1}),
        ("rank.started", {"process": {"host": "h", "pid": 8}}, 0),
        ("rank.ready", {}, 0),
        ("job.running", {}),
        ("job.note", {"text": "one"}),
        ("rank.result", {"names": ["model"], "left": [["loader", "a generator"]]}, 0),
        ("rank.done", {}, 0),
        ("rank.exited", {"code": 0}, 0),
        ("job.ended", {"state": "succeeded", "reason": "", "first_failure": None}),
    )
    assert (state.job, state.name, state.state, state.submitted, state.ended, state.seq) == (
        "j",
        "n",
        "succeeded",
        101.0,
        111.0,
        11,
    )
    assert state.notes == ("one",)
    assert state.final
    assert state.failures() == []
    assert state.ranks[0] == RankState(
        0, "node0", "h", 8, "done", 104.0, 105.0, 109.0, None, 0, "", ("model",), (("loader", "a generator"),)
    )


def test_the_first_failure_comes_first_and_stopped_ranks_are_none() -> None:
    late = ErrorRecord("ValueError", "builtins", "late", "text", t=9.0)
    early = replace(late, message="early", t=3.0)
    state = a_fold(
        ("job.starting", {}),
        ("rank.failed", {"error": late.to_json()}, 0),
        ("rank.interrupted", {}, 1),
        ("rank.failed", {"error": early.to_json()}, 2),
        ("rank.exited", {"code": -9, "why": "was killed (SIGKILL)"}, 3),
        ("rank.exited", {"code": 1}, 2),
    )
    assert [rank.rank for rank in state.failures()] == [2, 0, 3]
    assert state.ranks[2].state == "failed"
    assert state.ranks[2].code == 1
    assert state.ranks[3].why == "was killed (SIGKILL)"


def test_a_rank_that_has_ended_may_be_seen_before_it_has_said_so() -> None:
    exited: Row = ("rank.exited", {"code": 0, "why": "exited before its end", "state": "done"}, 0)
    assert failure_text.left_early(a_fold(exited)) == ["rank 0 exited before its end"]
    assert failure_text.left_early(a_fold(exited, ("rank.done", {}, 0))) == []
    assert a_fold(exited, ("rank.done", {}, 0)).ranks[0].state == "done"


ERROR = ErrorRecord("ValueError", "builtins", "text", "text", t=3.0).to_json()


@pytest.mark.parametrize(
    ("said", "seen", "state"),
    [
        ([], {"code": -9, "state": "killed"}, "killed"),
        ([], {"code": -15, "state": "stopped"}, "stopped"),
        ([], {"code": 1, "state": "failed"}, "failed"),
        ([("rank.failed", {"error": ERROR})], {"code": 1, "state": "failed"}, "failed"),
        ([("rank.failed", {"error": ERROR})], {"code": -15, "state": "stopped"}, "failed"),
        ([("rank.interrupted", {})], {"code": 1, "state": "failed"}, "interrupted"),
        ([("rank.done", {})], {"code": 0, "state": "done"}, "done"),
        ([("rank.done", {})], {"code": -9, "state": "killed"}, "done"),
    ],
)
def test_the_order_in_which_a_rank_and_its_agent_are_read_makes_no_difference(
    said: list[tuple[str, dict[str, Any]]], seen: dict[str, Any], state: str
) -> None:
    words = [("rank.started", {"process": {"host": "h", "pid": 8}}), ("rank.ready", {}), *said]
    own = [Event(kind, 100.0 + number, "node0", 0, data=data) for number, (kind, data) in enumerate(words)]
    exited = Event("rank.exited", 110.0, "node0", 0, data={**seen, "why": "ended"})
    folded = [fold([*own[:place], exited, *own[place:]]) for place in range(len(own) + 1)]
    assert folded[0].ranks[0].state == state
    assert [replace(other, ranks={}) for other in folded[1:]] == [replace(folded[0], ranks={})] * len(own)
    assert [other.ranks for other in folded[1:]] == [folded[0].ranks] * len(own)


def test_a_collective_waits_for_those_that_are_behind_as_far_as_they_said_since_it_began() -> None:
    waiting = Waiting("all_reduce", "gloo:0", 17, since=103.5)
    state = a_fold(
        ("job.submitted", {"world_size": 5}),
        ("rank.done", {}, 4),
        ("rank.entered", {"counts": {"gloo:0": 16}}, 2),
        ("rank.entered", {"counts": {"gloo:0": 17}}, 0),
        ("rank.entered", {"counts": {"gloo:0": 16}}, 1),
        ("rank.entered", {"counts": {}}, 3),
    )
    assert state.awaited(waiting) == [1, 3, 4]
    assert state.awaited(replace(waiting, members=(0, 1, 2))) == [1]
    assert state.awaited(replace(waiting, members=())) == []
    assert state.awaited(replace(waiting, group="gloo:1", members=(0,))) == [0]


def test_a_rank_waits_until_it_goes_on() -> None:
    data = {"operation": "all_reduce", "group": "gloo:0", "number": 17, "since": 99.0, "counts": {"gloo:0": 17}}
    state = a_fold(("rank.waiting", data, 0))
    assert state.ranks[0].waiting == Waiting("all_reduce", "gloo:0", 17, 99.0)
    assert state.ranks[0].entered == {"gloo:0": 17}
    assert JobState.from_json(codec.loads(codec.dumps(state.to_json()))) == state
    assert a_fold(("rank.resumed", {}, 0), start=state).ranks[0].waiting is None


def test_a_state_from_before_ranks_waited_is_read() -> None:
    old = a_fold(("rank.ready", {}, 0)).to_json()
    for name in ("waiting", "entered", "counted"):
        del old["ranks"][0][name]
    assert JobState.from_json(old).ranks[0] == RankState(0, state="running", ready=101.0)


def test_a_second_attempt_forgets_the_first_ones_ranks() -> None:
    state = a_fold(("job.starting", {"attempt": 1}), ("rank.ready", {}, 0), ("job.starting", {"attempt": 2}))
    assert (state.attempt, state.ranks) == (2, {})


@pytest.mark.parametrize("final", FINAL_STATES)
def test_a_final_state_is_final(final: str) -> None:
    state = a_fold(("job.ended", {"state": final}))
    after = a_fold(
        ("job.running", {}), ("rank.failed", {"error": {}}, 0), ("job.ended", {"state": "lost"}), start=state
    )
    assert replace(after, seq=state.seq) == state


@FEW
@given(st.lists(EVENTS, max_size=10))
def test_unknown_kinds_pass_through(events: list[Event]) -> None:
    known = [event for event in events if event.kind.startswith(("job.", "rank."))]
    assert replace(fold(events), seq=0) == replace(fold(known), seq=0)


@FEW
@given(st.lists(EVENTS, max_size=10), st.integers(0, 10))
def test_a_fold_can_be_taken_up_anywhere(events: list[Event], at: int) -> None:
    assert fold(events[at:], fold(events[:at])) == fold(events)
    assert JobState.from_json(codec.loads(codec.dumps(fold(events).to_json()))) == fold(events)


def test_a_state_of_another_version_is_read_as_far_as_it_goes() -> None:
    state = a_fold(("job.starting", {}), ("rank.failed", {"error": ErrorRecord("E", "m", "x", "t").to_json()}, 0))
    assert JobState.from_json(codec.loads(codec.dumps(state.to_json()))) == state


@FEW
@given(
    st.builds(
        ErrorRecord,
        type=WORDS,
        module=WORDS,
        message=st.text(st.characters(), max_size=20),
        text=st.text(st.characters(), max_size=20),
        frames=st.lists(st.tuples(WORDS, st.integers(0, 10**6), WORDS, WORDS), max_size=3).map(tuple),
        t=st.floats(0, 1e12),
    )
)
def test_error_records_come_back(record: ErrorRecord) -> None:
    assert ErrorRecord.from_json(codec.loads(codec.dumps(record.to_json()))) == record


def test_an_errors_title() -> None:
    assert ErrorRecord("ValueError", "builtins", "no good", "").title == "ValueError: no good"
    assert ErrorRecord("KeyboardInterrupt", "builtins", "", "").title == "KeyboardInterrupt"


def test_the_golden_journal_folds_to_the_golden_state() -> None:
    """``labextension`` folds the same file: a change of either golden file is a change of the protocol."""
    parsed = parse_lines((GOLDEN / "journal.jsonl").read_bytes())
    assert parsed.taken == (GOLDEN / "journal.jsonl").stat().st_size
    state = fold(parsed.events)
    expected = codec.loads((GOLDEN / "state.json").read_text())
    assert json.loads(codec.dumps(state.to_json())) == json.loads(codec.dumps(expected))
    assert JobState.from_json(expected).final


def test_the_golden_journal_has_the_hard_cases() -> None:
    data = (GOLDEN / "journal.jsonl").read_bytes()
    events = parse_lines(data).events
    values = [value for event in events for value in event.data.values()]
    assert any(isinstance(value, float) and math.isnan(value) for value in values)
    assert any(type(value) is int and abs(value) > 2**53 for value in values)
    assert any(isinstance(value, str) and "\udc80" in value for value in values)
    assert any(isinstance(value, str) and value.startswith("@") for value in values)
    assert len(data.splitlines()) > len(events)


@pytest.mark.parametrize(
    "data", [{}, {"error": 3}, {"error": {"type": 1}}, {"process": 5}, {"left": [1]}, {"names": 4}, {"lines": 1.5}]
)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_known_kind_with_damaged_data_never_stops_a_reader(kind: str, data: dict[str, Any]) -> None:
    lines = [("job.starting", None, {}), (kind, 0, data), ("job.note", None, {"text": "after"})]
    text = b"".join(Event(name, 1.0, rank=rank, data=words).to_line() for name, rank, words in lines)
    state = fold(parse_lines(text).events)
    assert state.final or state.notes[-1] == "after"


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"x","seq":1e999}',
        b'{"kind":"x","t":1' + b"0" * 400 + b"}",
        b'{"kind":"rank.dropped","rank":0,"lines":1e999}',
        b'{"kind":"rank.ready","rank":"zz"}',
        b'{"kind":"rank.ready","rank":true}',
        b'{"kind":"rank.ready","rank":0,"t":' + b"[" * 600 + b"]" * 600 + b"}",
        b'{"kind":"rank.ready","rank":0,"t":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"kind":"x","seq":' + b"9" * 5000 + b"}",
        b'{"kind":"rank.waiting","rank":0,"operation":"all_reduce","group":"g","number":1,"since":1e999,"counts":{}}',
        b'{"kind":"rank.waiting","rank":0,"operation":"a","group":"g","number":1,"since":1,"counts":{"g":1e999}}',
        b'{"kind":"rank.failed","rank":0,"error":{"type":"a","module":"b","message":"c","text":"d","frames":[1]}}',
        b"",
        b"\x00\xff",
    ],
)
def test_what_is_malformed_is_passed_over_and_counted(line: bytes) -> None:
    good = Event("rank.ready", 1.0, rank=0).to_line()
    parsed = parse_lines(good + line + b"\n" + good, Source(RANK, frozenset([0])))
    assert len(parsed.events) == 2 and parsed.refused == 1
    assert parsed.taken == 2 * len(good) + len(line) + 1
    fold(parsed.events)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_rank_says_what_a_rank_may_say_of_itself(kind: str) -> None:
    rank, agent, launcher = Source(RANK, frozenset([1])), Source(AGENT, frozenset([0, 1])), Source(LAUNCHER)
    assert rank.may_say(Event(kind, 1.0, rank=1)) == (RANK in KINDS[kind].by)
    assert not rank.may_say(Event(kind, 1.0, rank=0)), "of another rank"
    assert not rank.may_say(Event(kind, 1.0)), "of the job"
    assert agent.may_say(Event(kind, 1.0, rank=1)) == (AGENT in KINDS[kind].by)
    assert not agent.may_say(Event(kind, 1.0, rank=2)), "a rank of another node"
    assert launcher.may_say(Event(kind, 1.0)) == (LAUNCHER in KINDS[kind].by)


def test_every_kind_of_the_table_is_declared() -> None:
    text = (Path(events_module.__file__)).read_text()
    table = {line.split()[0] for line in text.splitlines() if re.match(r"(job|node|launcher|rank)\.\w+ ", line)}
    assert table == KINDS.keys()


def test_apply_is_pure() -> None:
    before = fold([Event("job.starting", 1.0, seq=1)])
    ranks = dict(before.ranks)
    apply(before, Event("rank.ready", 2.0, rank=0, seq=2))
    assert before.ranks == ranks
