"""What dumps of the flight recorder tell: Gloo's as they were seen, NCCL's by hand in the format of its source."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_torchdist.cli import main
from jupyter_torchdist.diagnosis import dumps, logs, reading
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.events import Finding

Calls = Sequence[dict[str, Any]]


def call(
    operation: str,
    number: int,
    size: int = 4,
    dtype: str = "Float",
    *,
    ended: bool = False,
    backend: str = "nccl",
    group: tuple[str, str] = ("0", "default_pg"),
    line: int = 0,
) -> dict[str, Any]:
    """One entry. NCCL says how far it is; Gloo only retires what has ended."""
    tensors = [] if operation == "barrier" else [[size]]
    frames = [
        {"name": "all_reduce", "filename": "/v/lib/python3.11/site-packages/torch/distributed/c10d.py", "line": 7},
        {"name": "step", "filename": "/home/me/train.py", "line": line},
    ]
    return {
        "record_id": number,
        "pg_id": int(group[0]),
        "process_group": list(group),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"{backend}:{operation}",
        "time_created_ns": 1_790_000_000_000_000_000 + number * 1_000_000,
        "input_sizes": tensors,
        "input_dtypes": [dtype] * len(tensors),
        "output_sizes": tensors,
        "output_dtypes": [dtype] * len(tensors),
        "state": ("completed" if ended else "started") if backend == "nccl" else "scheduled",
        "retired": ended,
        "is_p2p": False,
        "timeout_ms": 600000,
        "frames": frames if line else [],
    }


def dump(entries: Calls, ranks: str = "[0, 1]", groups: dict[str, str] | None = None) -> dict[str, Any]:
    configured = {"0": ranks, **(groups or {})}
    numbers: dict[str, int] = {}
    for one in entries:
        numbers[str(one["pg_id"])] = max(numbers.get(str(one["pg_id"]), 0), one["collective_seq_id"])
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "entries": list(entries),
        "nccl_comm_state": {},
        "pg_config": {name: {"name": name, "desc": "", "ranks": told} for name, told in configured.items()},
        "pg_status": {
            name: {"last_enqueued_collective": str(last), "last_started_collective": "-1"}
            for name, last in numbers.items()
        },
    }


def found(*recorded: dict[str, Any], text: str = "", first: int = 0) -> list[Finding]:
    read = [dumps.read(f"nccl_trace_rank_{rank}", json.dumps(one).encode()) for rank, one in enumerate(recorded, first)]
    return logs.diagnose([reading.of_text("job.log", text)], dumps=read)


BEFORE = call("all_reduce", 1, ended=True)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_rank_that_never_came(backend: str) -> None:
    before = call("all_reduce", 1, ended=True, backend=backend)
    waits = dump([before, call("all_reduce", 2, backend=backend, line=14)], "[0, 1, 2]")
    [one] = found(waits, dump([before], "[0, 1, 2]"), waits)
    assert (one.code, one.rank, one.severity) == ("rank-stuck", 1, "fault")
    assert one.sentence == (
        "Rank 1 never came to all_reduce #2 of 4 float32 (/home/me/train.py, line 14), in which ranks 0 and 2 wait."
    )
    assert [(line.file, line.number) for line in one.evidence] == [("nccl_trace_rank_0", 2), ("nccl_trace_rank_2", 2)]
    assert one.evidence[0].text == "rank 0: all_reduce #2 of 4 float32, not ended, /home/me/train.py, line 14"


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (call("broadcast", 2, line=9), "operations differ"),
        (call("all_reduce", 2, 8, line=9), "sizes differ"),
        (call("all_reduce", 2, dtype="BFloat16", line=9), "types differ"),
    ],
)
def test_something_else_at_the_same_point(theirs: dict[str, Any], said: str) -> None:
    usual = dump([BEFORE, call("all_reduce", 2, line=7)], "[0, 1, 2]")
    [one] = found(usual, usual, dump([BEFORE, theirs], "[0, 1, 2]"))
    assert (one.code, one.rank) == ("collective-mismatch", 2)
    assert f"at the same point: {said}: ranks 0 and 1 call all_reduce #2 of 4 float32" in one.sentence
    assert one.sentence.endswith("(/home/me/train.py, line 9).")


def test_sizes_that_may_differ() -> None:
    """A scatter has an input on its source alone; an all-to-all sends as much as each rank likes."""
    for operation in ("scatter", "all_to_all"):
        first, second = ([call(operation, 1, size, ended=True)] for size in (0, 8))
        assert found(dump(first), dump(second)) == []


def test_the_same_calls_in_another_order() -> None:
    ours = [call("all_reduce", 1), call("broadcast", 2)]
    theirs = [call("broadcast", 1), call("all_reduce", 2)]
    [one] = found(dump(ours), dump(theirs))
    assert (one.code, one.rank) == ("collective-mismatch", None)
    assert "orders differ: rank 0 calls all_reduce #1 of 4 float32, rank 1 calls broadcast #1" in one.sentence


LEFT, RIGHT = ("1", "left"), ("2", "right")
PAIRS = {"1": "[0, 1]", "2": "[0, 1]"}


def test_two_groups_that_wait_for_each_other() -> None:
    ours, theirs = call("all_reduce", 1, group=LEFT, line=3), call("all_reduce", 1, group=RIGHT, line=5)
    known = [call("barrier", 1, ended=True, group=group) for group in (LEFT, RIGHT)]
    del known  # the groups are known by one call each, on one rank
    [one] = found(dump([BEFORE, ours], groups=PAIRS), dump([BEFORE, theirs], groups=PAIRS))
    assert one.code == "collective-mismatch"
    assert one.sentence == (
        "Ranks call different collectives at the same point: orders differ: "
        "rank 0 waits in all_reduce #1 of 4 float32 of group left (/home/me/train.py, line 3) for rank 1; "
        "rank 1 waits in all_reduce #1 of 4 float32 of group right (/home/me/train.py, line 5) for rank 0."
    )


def test_a_chain_of_groups_ends_at_the_rank_that_waits_for_nobody() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 in another group."""
    pairs = {"1": "[0, 1]", "2": "[1, 2]"}
    world = "[0, 1, 2]"
    [one] = found(
        dump([BEFORE, call("all_reduce", 1, group=LEFT)], world, pairs),
        dump([BEFORE, call("all_reduce", 1, group=RIGHT, line=8)], world, pairs),
        dump([BEFORE], world, pairs),
    )
    assert (one.code, one.rank) == ("rank-stuck", 2)
    assert "of group right (/home/me/train.py, line 8), in which rank 1 waits" in one.sentence


def test_all_ranks_came_and_nothing_moves() -> None:
    stuck = dump([BEFORE, call("all_reduce", 2)])
    [one] = found(stuck, stuck)
    assert (one.code, one.rank) == ("collective-hangs", None)
    ended = dump([BEFORE, call("all_reduce", 2, ended=True)])
    [one] = found(ended, stuck)
    assert (one.code, one.rank) == ("collective-hangs", 1)


def test_a_dump_that_is_missing_is_not_guessed() -> None:
    waits = dump([BEFORE, call("all_reduce", 2)], "[0, 1, 2]")
    [one] = found(waits, waits)
    assert (one.code, one.rank) == ("watchdog-same-op", None)


def test_nobody_waits() -> None:
    assert found(dump([BEFORE]), dump([BEFORE, call("all_reduce", 2, ended=True)])) == []
    assert found(dump([]), dump([])) == []


def test_a_collective_that_timed_out_has_not_ended() -> None:
    """NCCL's watchdog retires it."""
    timed_out = {**call("all_reduce", 2), "retired": True}
    [one] = found(dump([BEFORE, timed_out]), dump([BEFORE]))
    assert (one.code, one.rank) == ("rank-stuck", 1)


def test_the_order_of_judgement() -> None:
    """A rank's own exception comes first; the recorder comes before the time-outs of the others, and in their place."""
    recorded = dump([BEFORE, call("all_reduce", 2)]), dump([BEFORE])
    late = "[rank0]: RuntimeError: Timed out waiting 2000ms for recv operation to complete\n"
    assert [one.code for one in found(*recorded, text=late)] == ["rank-stuck"]
    own = "[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n"
    assert [one.code for one in found(*recorded, text=late + own)] == ["cuda-oom"]


def ours(rank: int, t: float, end: str, entries: Calls, **more: Any) -> dumps.Dump:
    """As our ranks write it, after an older dump and before a piece of a next one."""
    line = {"rank": rank, "t": t, "end": end, "groups": {"0": [0, 1]}, "recorders": [dump(entries)], **more}
    text = json.dumps({**line, "recorders": []}, separators=(",", ":")) + "\n"
    text += json.dumps(line, separators=(",", ":")) + '\n{"rank":'
    return dumps.read("x", text.encode())


def gloo(number: int, *, ended: bool = False) -> dict[str, Any]:
    return call("all_reduce", number, ended=ended, backend="gloo")


def test_a_rank_whose_code_had_ended_had_fewer_batches() -> None:
    waits, done = ours(0, 100.0, "", [gloo(1, ended=True), gloo(2)]), ours(1, 10.0, "done", [gloo(1, ended=True)])
    [one] = logs.diagnose([], dumps=[waits, done])
    assert (one.code, one.rank) == ("uneven-inputs", 1)
    assert one.sentence == (
        "Rank 1 ended its loop before the others, with fewer batches: rank 0 waits in all_reduce #2 of 4 float32."
    )


def test_the_last_call_of_a_rank_that_failed_in_it() -> None:
    """Gloo retires it like one that has ended."""
    failed, busy = ours(0, 100.0, "failed", [gloo(1, ended=True), gloo(2, ended=True)]), [gloo(1, ended=True)]
    [one] = logs.diagnose([], dumps=[failed, ours(1, 101.0, "", busy)], places={1: "Cell In[3], line 9"})
    assert (one.code, one.rank) == ("rank-stuck", 1)
    assert one.sentence.endswith("in which rank 0 waits; rank 1 is at Cell In[3], line 9.")
    assert logs.diagnose([], dumps=[failed, ours(1, 101.0, "failed", [*busy, gloo(2, ended=True)])]) == []


def test_a_rank_that_does_not_answer_cannot_run_python() -> None:
    [one] = logs.diagnose([], dumps=[ours(0, 100.0, "", [gloo(1)])], places={1: "Cell In[3], line 9, in re.match"})
    assert (one.code, one.rank) == ("rank-stuck", 1)
    assert "rank 1 is at Cell In[3], line 9, in re.match" in one.sentence


def test_a_dump_whose_time_is_not_known() -> None:
    """As NCCL's watchdog writes it."""
    nccl = json.dumps(dump([call("all_reduce", 2)])).encode()
    [one] = logs.diagnose([], dumps=[dumps.read("nccl-dump-0", nccl), ours(1, 100.0, "", [gloo(1, ended=True)])])
    assert (one.code, one.rank) == ("rank-stuck", 1)


def test_where_a_rank_was_is_known_of_the_call_that_it_waits_in() -> None:
    waits = ours(0, 100.0, "", [gloo(1, ended=True), gloo(2)], place="Cell In[3], line 6")
    [one] = logs.diagnose([], dumps=[waits, ours(1, 100.0, "", [gloo(1, ended=True)])])
    assert (
        one.sentence == "Rank 1 never came to all_reduce #2 of 4 float32 (Cell In[3], line 6), in which rank 0 waits."
    )


def test_an_old_dump_tells_of_an_earlier_wait() -> None:
    assert logs.diagnose([], dumps=[ours(0, 100.0, "", [gloo(1)]), ours(1, 10.0, "", [gloo(1)])])[0].rank == 1


# -- files


def written(directory: Path, *recorded: dict[str, Any]) -> list[str]:
    paths = [directory / f"fr_trace_rank_{rank}.json" for rank in range(len(recorded))]
    for path, one in zip(paths, recorded, strict=True):
        path.write_text(json.dumps(one))
    return [str(path) for path in paths]


STUCK = dump([BEFORE, call("all_reduce", 2)]), dump([BEFORE])


def test_dumps_logs_and_directories_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, *STUCK)
    for words in (files, [str(tmp_path)]):
        assert main(["diagnose", *words, "--json"]) == 0
        [one] = json.loads(capsys.readouterr().out)["findings"]
        assert (one["code"], one["rank"]) == ("rank-stuck", 1)
    below = tmp_path / "attempt_0" / "1"
    below.mkdir(parents=True)
    (below / "stderr.log").write_text("[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n")
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "fault cuda-oom: Rank 1" in capsys.readouterr().out


def test_pickled_and_packed_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As NCCL's watchdog writes them: tuples, and numbers as numbers."""
    for rank, one in enumerate(STUCK):
        value = {**one, "entries": [{**entry, "process_group": ("0", "default_pg")} for entry in one["entries"]]}
        value["pg_status"] = {"0": {"last_enqueued_collective": 2 - rank}}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(gzip.compress(pickle.dumps(value, 2)))
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "fault rank-stuck: Rank 1" in capsys.readouterr().out


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('it ran')",)


def nested(levels: int) -> Any:
    """A few bytes for ever more values: each level has the one below ten times."""
    value: Any = []
    for _ in range(levels):
        value = [value] * 10
    return value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"pg_config": {}}', "version is missing"),
        (b'{"pg_config": {}, "version": "1.5"}', "its version is 1.5, and 2.x is read"),
        (b'{"pg_config": {}, "version": "2.1", "entries": [{}]}', "entries: 0: process_group is missing"),
        (b'{"pg_config": {}, "version": "2.1", "entries": 3}', "entries: expected a list, not 3"),
        (b'{"pg_config": {}, "version": "2.1", "entr', "no dump of the flight recorder"),
        (b'{"rank": 1, "recorders": 0, "pg_config"', "no dump of the flight recorder"),
        (pickle.dumps(Evil()), "a dump holds plain values only"),
        (pickle.dumps(nested(5)), "more than any dump does"),
        (b"\x80\x02garbage", "the pickle is damaged"),
    ],
)
def test_what_is_no_dump_is_refused(
    data: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumps, "LARGEST", 10_000)
    (tmp_path / "trace_0").write_bytes(data)
    assert main(["diagnose", str(tmp_path / "trace_0")]) != 0
    assert said in capsys.readouterr().err


def test_refusals_of_files(tmp_path: Path) -> None:
    data = json.dumps(dump([BEFORE])).encode()
    with pytest.raises(OptionError, match="does not end with the rank's number"):
        dumps.read("trace.json", data)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trace_0").write_bytes(data)
    assert main(["diagnose", str(tmp_path)]) != 0
    (tmp_path / "empty").mkdir()
    assert main(["diagnose", str(tmp_path / "empty")]) != 0


# -- whatever comes

KEYS = sorted({*call("x", 1), *dump([]), "rank", "recorders", "groups", "end", "t", "filename", "line"})
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["2.1", "0", "[0, 1]", "nccl:all_reduce"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
ENTRIES = st.builds(
    lambda operation, number, size, dtype, group, rest: {
        **call(operation, number, dtype=dtype, group=group),
        "input_sizes": size,
        **rest,
    },
    st.sampled_from(["all_reduce", "barrier", "scatter", ""]),
    st.integers(-2, 2**62),
    st.lists(st.lists(st.integers(-1, 2**62), max_size=70), max_size=3),
    st.text(max_size=4),
    st.sampled_from([("0", "default_pg"), ("1", "undefined"), ("-1", "")]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=1),
)
RECORDERS = st.builds(
    lambda entries, status, config: {
        **dump([]),
        "entries": entries,
        "pg_status": {"0": status},
        "pg_config": {"0": config},
    },
    st.lists(ENTRIES, max_size=4),
    st.dictionaries(st.just("last_enqueued_collective"), VALUES, max_size=1),
    st.dictionaries(st.sampled_from(["name", "ranks"]), VALUES, max_size=2),
)
OURS = st.builds(
    lambda rank, end, recorders, groups: {"rank": rank, "end": end, "recorders": recorders, "groups": groups},
    st.integers(-1, 3),
    st.sampled_from(["", "done", "failed"]),
    st.lists(RECORDERS, max_size=2),
    st.dictionaries(st.sampled_from(["0", "1"]), st.lists(st.integers(-1, 4), max_size=3), max_size=2),
)


@given(st.lists(VALUES | RECORDERS | OURS, max_size=4))
def test_whatever_json_comes_it_ends_in_findings(values: list[Any]) -> None:
    read = []
    for number, value in enumerate(values):
        try:
            read.append(dumps.read(f"trace_{number}", json.dumps(value).encode() + b"\n"))
        except OptionError:
            continue
    for finding in logs.diagnose([], dumps=read):
        assert finding.sentence.endswith(".")
        assert finding.evidence


@given(st.binary(max_size=200).map(b"\x80\x02".__add__) | VALUES.map(pickle.dumps))
def test_whatever_pickle_comes_it_is_refused_or_read(data: bytes) -> None:
    try:
        dumps.read("trace_0", data)
    except OptionError as error:
        assert "is no dump" in error.message
