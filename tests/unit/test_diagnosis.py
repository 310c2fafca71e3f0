"""What is said of a job's logs. The logs with a known cause are in ``tests/diagnosis/cases``."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_torchdist.cli import main
from jupyter_torchdist.diagnosis import logs, reading
from jupyter_torchdist.diagnosis.catalogue import KINDS, Kind, kinds_by_word
from jupyter_torchdist.diagnosis.prefixes import read
from jupyter_torchdist.protocol.events import Finding

from ..diagnosis.score import Case, cases

UNDECIDED = {"nccl-2079", "pytorch-141069"}
"""Cases whose log does not tell their cause: a hang without a word, and rank 0's missing time-out."""

KNOWN = [case for folder in ("recorded", "seen") for case in cases(folder) if case.path.stem not in UNDECIDED]


def findings(text: str) -> list[Finding]:
    return logs.diagnose([reading.of_text("job.log", text)])


@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.path.stem)
def test_the_cause_comes_first(case: Case) -> None:
    found = case.findings()
    assert case.is_right(found), f"{case.told['cause']}: {[one.code for one in found]}"
    for one in found:
        assert one.evidence
        assert all(case.path.read_text("utf-8").find(line.text[:80]) >= 0 for line in one.evidence)


def test_logs_that_nobody_looked_at() -> None:
    """Most of them; and no healthy log holds a fault."""
    held_out = list(cases("held-out"))
    right = [case for case in held_out if case.is_right(case.findings())]
    assert len(right) >= 0.85 * len(held_out)
    assert all(case in right for case in held_out if case.healthy)


def test_a_first_collective_that_ends_nowhere_between_gpus_that_are_connected_directly() -> None:
    """It is known by what NCCL said before."""
    direct = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
    late = "".join(WATCHDOG.format(rank=rank, seq=1, op="ALLREDUCE", numel=8) for rank in (0, 1))
    [found] = findings(direct + late)
    assert (found.code, found.rank) == ("p2p-acs-hang", None)
    assert [line.number for line in found.evidence] == [1, 2, 3]
    for other in (
        late,
        direct.replace("P2P/CUMEM", "SHM/direct") + late,
        direct + late.replace("SeqNum=1,", "SeqNum=2,"),
    ):
        assert [one.code for one in findings(other)] == ["watchdog-same-op"]


TORCHRUN = """\
[default{rank}]:Traceback (most recent call last):
[default{rank}]:  File "/home/user/train.py", line 7, in <module>
[default{rank}]:    main()
[default{rank}]:  File "/venv/lib/python3.11/site-packages/x/y.py", line 3, in f
[default{rank}]:ValueError: bad batch
"""


def test_an_exception_names_rank_and_line() -> None:
    [found] = findings(TORCHRUN.format(rank=3))
    assert (found.code, found.rank) == ("user-exception", 3)
    assert found.sentence == "Rank 3 raised ValueError: bad batch (/home/user/train.py, line 7)."
    assert [line.number for line in found.evidence] == [5]


def test_a_traceback_among_lines_of_other_ranks() -> None:
    """Each line has its rank; those between belong to others."""
    lines = TORCHRUN.format(rank=1).splitlines()
    others = [f"[default0]:RuntimeError: step {number}" for number in range(len(lines))]
    mixed = [line for pair in zip(lines, others, strict=True) for line in pair]
    [found] = findings("\n".join(mixed))
    assert (found.code, found.rank) == ("user-exception", 1)


def test_consequences_are_no_causes() -> None:
    reset = "[rank0]: RuntimeError: Connection closed by peer [10.0.0.2]:4711\n"
    alone = findings(reset)
    assert [one.code for one in alone] == ["remote-exit"]
    assert [one.code for one in findings(reset + "[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n")] == [
        "cuda-oom"
    ]


WATCHDOG = (
    "[rank{rank}]:[E1129 11:56:57.204 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for "
    "600021 milliseconds before timing out.\n"
)


@pytest.mark.parametrize(
    ("works", "code", "rank"),
    [
        ([(0, 7, "ALLREDUCE", 8), (1, 7, "ALLREDUCE", 8)], "watchdog-same-op", None),
        ([(0, 7, "ALLREDUCE", 8), (1, 7, "BROADCAST", 8)], "collective-mismatch", None),
        ([(0, 7, "ALLREDUCE", 8), (1, 7, "ALLREDUCE", 9)], "collective-mismatch", None),
        ([(0, 7, "ALLREDUCE", 8), (1, 6, "ALLREDUCE", 8), (2, 7, "ALLREDUCE", 8)], "desync", 1),
        ([(0, 9, "ALLREDUCE", 8), (1, 7, "ALLREDUCE", 8), (2, 7, "ALLREDUCE", 8)], "desync", 0),
        ([(0, 9, "ALLREDUCE", 8), (1, 8, "ALLREDUCE", 8), (2, 8, "ALLREDUCE", 8), (3, 9, "X", 8)], "desync", None),
        ([(1, 7, "ALLREDUCE", 1), (2, 7, "ALLREDUCE", 1)], "rank0-only-work", 0),
        ([(0, 7, "ALLREDUCE", 8), (2, 7, "ALLREDUCE", 8)], "rank-stuck", 1),
    ],
)
def test_time_outs_are_compared_over_ranks(works: list[tuple[int, int, str, int]], code: str, rank: int | None) -> None:
    text = "".join(WATCHDOG.format(rank=r, seq=seq, op=op, numel=numel) for r, seq, op, numel in works)
    [found] = findings(text)
    assert (found.code, found.rank) == (code, rank)


def test_sizes_that_gloo_compares_are_said_in_words() -> None:
    [found] = findings("[rank1]: [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 20 vs 12. Received\n")
    assert found.sentence == (
        "Ranks call different collectives at the same point: rank 1 was sent 20 bytes and expected 12."
    )


@pytest.mark.parametrize(
    ("line", "rank", "node", "text"),
    [
        ("[1,3]<stderr>:boom", 3, None, "boom"),
        ("[rank12]: boom", 12, None, "boom"),
        ("[default2]:[rank10]: boom", 10, None, "boom"),
        ("7: boom", 7, None, "boom"),
        ("(RayTrainWorker pid=77, ip=10.0.0.7) boom", None, "10.0.0.7", "boom"),
        ("2024-05-06T07:08:09.123456Z stderr F [rank1]: boom", 1, None, "boom"),
        ("[pod/train-worker-1/main] boom", None, "train-worker-1", "boom"),
        ("worker-2: boom", None, "worker-2", "boom"),
        ("\x1b[31m[rank4]: boom\x1b[0m", 4, None, "boom"),
        ("urllib3.exceptions.http2error: boom", None, None, "urllib3.exceptions.http2error: boom"),
    ],
)
def test_who_printed_a_line(line: str, rank: int | None, node: str | None, text: str) -> None:
    found = read("x", 1, line)
    assert (found.rank, found.node, found.text) == (rank, node, text)


SPAWNED = """\
NCCL WARN Bootstrap : no socket interface found

-- Process 2 terminated with the following error:
Traceback (most recent call last):
  File "/home/user/train.py", line 7, in worker
RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:400, internal error, NCCL version 2.4.8
"""


def test_a_line_without_a_rank_is_of_the_only_rank_that_failed() -> None:
    assert findings(SPAWNED)[0].rank == 2
    assert findings(SPAWNED + SPAWNED.replace("Process 2", "Process 3"))[0].rank is None
    failed = "E failed (exitcode: 1) local_rank: {rank} (pid: 5) of binary: python\n"
    full = "RuntimeError: DataLoader worker (pid 262) is killed by signal: Killed.\n"
    assert findings(full + failed.format(rank=1))[0].rank == 1


def test_nccls_process_is_known_as_its_rank() -> None:
    start = "gpu7:11:22 [3] NCCL INFO ncclCommInitRank comm 0x1 rank 5 nranks 8 cudaDev 3 - Init START\n"
    warning = "[2026-01-02 03:04:05] gpu7:11:30 [3] misc/socket.cc:9 (f) NCCL WARN {}\n"
    route = "socketPollConnect: connect to 10.0.0.9<1> returned No route to host"
    [found] = findings(start + warning.format(route))
    assert (found.code, found.rank, found.node) == ("peer-unreachable", 5, "gpu7")
    assert "10.0.0.9<1>" in found.sentence


ANY_LINE = st.lists(
    st.one_of(
        st.sampled_from([sign for kind in KINDS for sign in kind.signs]),
        st.sampled_from([*kinds_by_word(), "Traceback (most recent call last):", '  File "x.py", line 3, in f']),
        st.sampled_from(
            ["[rank1]:", "[1,0]<stdout>:", "h:1:2 [0] NCCL WARN ", "  exitcode  : -9 (pid: 5)", "\x1b[", "\r"]
        ),
        st.sampled_from(["WorkNCCL(SeqNum=999999999999999999999, OpType=X", "Root Cause (first observed failure):"]),
        st.text(max_size=12),
    ),
    max_size=6,
).map("".join)


@given(st.lists(ANY_LINE, max_size=12))
def test_whatever_comes_it_ends_in_findings(lines: list[str]) -> None:
    for one in findings("\n".join(lines)):
        assert one.sentence
        json.dumps(one.to_json())


def test_every_line_with_a_sign_is_found_by_its_word() -> None:
    """The catalogue's own examples of words: a sign without one would never be tried."""
    words = kinds_by_word()
    assert {kind for kinds in words.values() for kind in kinds} == {kind for kind in KINDS if kind.signs}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_a_kind_is_whole(kind: Kind) -> None:
    assert kind.cause.endswith(".")
    assert kind.remedy.endswith((".", ")"))
    assert kind.said({}).endswith(".")


def test_files_packed_and_plain_and_from_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.log.gz"
    path.write_bytes(gzip.compress(TORCHRUN.format(rank=2).encode()))
    assert main(["diagnose", str(path), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["findings"]
    assert (found["code"], found["rank"], found["evidence"][0]["number"]) == ("user-exception", 2, 5)
    assert main(["diagnose", str(path)]) == 0
    assert capsys.readouterr().out.startswith("fault user-exception: Rank 2 raised ValueError: bad batch")


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe" * 1000, b"all is well\nstep 3 loss 0.1\n"])
def test_a_log_without_a_fault(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(content)
    assert main(["diagnose", str(path)]) == 0
    assert capsys.readouterr().out == "No line tells of a fault.\n"


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"x" * 10_000)[:40])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in ((tmp_path / "none.log", "No such file"), (pipe, "not a plain file"), (cut, "ended before")):
        assert main(["diagnose", str(path)]) == 2
        said = capsys.readouterr().err
        assert str(path) in said
        assert why in said
    assert main(["diagnose", "one", "two"]) == 2
    assert "there is no file one" in capsys.readouterr().err
    assert main(["diagnose"]) == 2


NOT_FINITE = (
    "step 7: the gradients of 4 of 6 parameters are not finite, in the backward first 2.bias; the loss is at "
    "Cell In[3], line 8; from rank 1: the model's outputs are not finite for sample 5 of the batch. "
)


def test_gradients_that_are_not_finite_are_a_warning() -> None:
    """What a strategy says; where the job was stopped there, its exception says it."""
    for end in ("The optimizer took them (said once)", "The step was left out: parameters and optimizer are as before"):
        [found] = findings(f"epoch 1 loss 0.3\n{NOT_FINITE}{end}\n")
        assert (found.code, found.severity, found.rank) == ("nonfinite-gradients", "warning", 1)
        assert found.sentence == "Rank 1 first had gradients that are not finite in step 7, in 2.bias."
        assert [line.number for line in found.evidence] == [2]
    assert not findings(NOT_FINITE)
    reset = "[rank0]: RuntimeError: Connection closed by peer [10.0.0.2]:4711\n"
    assert [one.severity for one in findings(f"{reset}{NOT_FINITE}The optimizer took them")] == ["fault", "warning"]
