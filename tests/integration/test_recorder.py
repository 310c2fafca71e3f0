"""What ranks leave of their collectives tells why a job hangs or failed: real ranks, by its findings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist import client
from jupyter_torchdist.diagnosis import dumps, ours
from jupyter_torchdist.protocol.events import Finding
from jupyter_torchdist.protocol.paths import NodePaths
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.ranks.streams.recording import write_into
from jupyter_torchdist.store.logs import RECORDER, evidence, files
from tests.leaks import wait_until

PATIENCE = 90.0

START = """
import os, re, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
rank, ones = dist.get_rank(), torch.ones(4)
dist.barrier()
dist.new_group(timeout=timedelta(seconds=900))
soon = dist.new_group(timeout=timedelta(seconds=3))
def first():
    dist.all_reduce(ones, group=soon)
"""

OTHERWISE = """
if rank == 0:
    first()  # A
else:
    {}  # B
"""


def run(source: str, notebook: dict[str, Any], ranks: int = 2, **options: Any) -> tuple[client.Job, str]:
    """The job, and the source with line numbers as the notebook has them."""
    request = client.Request(START + source, "Cell In[3]", 2, Options(ranks=ranks, **options), notebook)
    return client.submit(request), "\n" + START + source


def line(source: str, text: str) -> str:
    """``Cell In[3], line 6``, of the last line with ``text``."""
    return f"Cell In[3], line {source[: source.rindex(text)].count(chr(10)) + 1}"


def findings(job: client.Job) -> list[Finding]:
    return ours.diagnose(evidence(job.paths), job.state)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("does", "code", "culprit", "said"),
    [
        (
            "dist.broadcast(ones, 0, group=soon)",
            "collective-mismatch",
            None,
            (
                "operations differ: rank 0 calls all_reduce #1 of 4 float32 of group 2 ({D}), "
                "rank 1 calls broadcast #1 of 4 float32 of group 2 ({B})"
            ),
        ),
        (
            "dist.all_reduce(ones.int(), group=soon)",
            "collective-mismatch",
            None,
            (
                "types differ: rank 0 calls all_reduce #1 of 4 float32 of group 2, "
                "rank 1 calls all_reduce #1 of 4 int32 of group 2."
            ),
        ),
        (
            "time.sleep(600)",
            "rank-stuck",
            1,
            "Rank 1 never came to all_reduce #1 of 4 float32 of group 2 ({D}), in which rank 0 waits",
        ),
        (
            "pass",
            "uneven-inputs",
            1,
            (
                "Rank 1 ended its loop before the others, with fewer batches: "
                "rank 0 waits in all_reduce #1 of 4 float32 of group 2 ({D})"
            ),
        ),
    ],
    ids=["operation", "type", "missing", "uneven"],
)
def test_a_failure_in_a_collective(
    notebook: dict[str, Any], does: str, code: str, culprit: int | None, said: str
) -> None:
    job, source = run(OTHERWISE.format(does) + "if rank == 0: dist.barrier(group=soon)\n", notebook)
    assert job.wait(PATIENCE).state == "failed"
    [found] = job.state.findings
    recorded = [file.path.read_text()[-2000:] for file in files(job.paths, None, RECORDER)]
    assert (found.code, found.rank) == (code, culprit), (found, recorded, job.logs())
    places = {"D": line(source, "dist.all_reduce(ones, group=soon)"), "B": line(source, "# B")}
    assert said.format(**places) in found.sentence


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("ends", "code"), [("os._exit(7)", "rank-exited"), ("os.kill(os.getpid(), signal.SIGKILL)", "host-oom-kill")]
)
def test_a_rank_that_is_gone_is_the_cause(notebook: dict[str, Any], ends: str, code: str) -> None:
    """Not the collective to which it never came."""
    job, _ = run(OTHERWISE.format(ends), notebook)
    assert job.wait(PATIENCE).state == "failed"
    found = findings(job)
    assert (found[0].code, found[0].rank) == (code, 1)
    told = [finding.code for finding in job.state.findings]
    assert told == ([] if code == "rank-exited" else [code]), "no consequence of it"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
def test_ranks_dump_before_they_are_ended(notebook: dict[str, Any], tmp_path: Path, fresh: bool) -> None:
    """Those that no signal would let write, because nothing of them comes back."""
    source = """
if rank == 1:
    while not os.path.exists(entered):
        time.sleep(0.01)
    raise ValueError('bad batch')
if rank == 2:
    barrier = dist.barrier(async_op=True)
    open(entered, "w").close()
    barrier.wait()
time.sleep(600)
"""
    notebook["entered"] = str(tmp_path / "entered")
    job, _ = run(source, notebook, 3, fresh=fresh, out=("none",))
    assert job.wait(PATIENCE).state == "failed"
    assert [finding.code for finding in findings(job)] == ["user-exception"]
    assert job.state.findings == ()
    recorded = {
        file.rank: dumps.read(str(file.path), file.path.read_bytes()) for file in files(job.paths, None, RECORDER)
    }
    assert {rank: one.end for rank, one in recorded.items()} == {0: "", 1: "failed", 2: recorded[2].end}
    assert {rank: one.groups["gloo:0"].entered for rank, one in recorded.items()} == {0: 1, 1: 1, 2: 2}
    assert all(one.groups["gloo:0"].members == (0, 1, 2) for one in recorded.values())


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("does", "at"),
    [("time.sleep(600)", "{B}"), ("re.match('(a+)+b', 'a' * 64)", "{B}, in re.match")],
    ids=["user code", "the GIL held"],
)
def test_a_job_that_hangs(notebook: dict[str, Any], does: str, at: str) -> None:
    """Nothing is switched on, and nobody waits for a time-out."""
    job, source = run(OTHERWISE.format(does).replace("first()", "dist.all_reduce(ones)"), notebook)
    expected = (
        f"Rank 1 never came to all_reduce #2 of 4 float32 ({line(source, '# A')}), in which rank 0 waits; "
        f"rank 1 is at {at.format(B=line(source, '# B'))}."
    )
    assert wait_until(lambda: [one.sentence for one in findings(job)] == [expected]), (
        findings(job),
        expected,
        job.state,
        job.logs(),
    )
    job.kill()
    assert job.wait(PATIENCE).state == "cancelled"


@pytest.mark.timeout(240)
def test_two_groups_in_another_order(notebook: dict[str, Any]) -> None:
    source = """
late = dist.new_group()
for group in (soon, late) if rank == 0 else (late, soon):
    dist.all_reduce(ones, group=group)
"""
    job, _ = run(source, notebook)
    assert job.wait(PATIENCE).state == "failed"
    [found] = job.state.findings
    assert found.code == "collective-mismatch"
    assert re.search(r"orders differ: rank . waits in all_reduce #1 .* of group . .* for rank .", found.sentence)


@pytest.mark.timeout(240)
def test_a_job_that_went_well_has_no_findings(notebook: dict[str, Any]) -> None:
    job, _ = run("print(os.environ['NCCL_DEBUG_FILE'], os.environ['TORCH_FR_DUMP_TEMP_FILE'])\n", notebook)
    assert job.wait(PATIENCE).state == "succeeded", job.exception()
    assert findings(job) == []
    node = job.paths.node(job.plan.nodes[0].name)
    assert f"{node.nccl(1)}.%p {node.nccl_dump}" in job.logs()


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    environ = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/elsewhere/", "NCCL_DEBUG": "INFO"}
    write_into(environ, NodePaths(tmp_path / "100%"), 3)
    assert environ == {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/elsewhere/", "NCCL_DEBUG": "INFO"}
    environ = {}
    write_into(environ, NodePaths(tmp_path / "100%"), 3)
    assert environ["NCCL_DEBUG_FILE"] == f"{tmp_path}/100%%/rank-00003.nccl.%p"
    assert environ["NCCL_DEBUG"] == "WARN"
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/100%/nccl-dump-"


@pytest.mark.timeout(240)
def test_files_that_user_code_damages(notebook: dict[str, Any]) -> None:
    """And a pipe in the place of one: nothing waits for it."""
    source = """
folder = os.path.dirname(os.environ["TORCH_FR_DUMP_TEMP_FILE"])
if rank == 0:
    with open(f"{folder}/rank-00000.recorder", "w") as file:
        file.write('{"rank": 5')
    os.mkfifo(f"{folder}/nccl-dump-1")
dist.barrier()
raise ValueError("bad batch")
"""
    job, _ = run(source, notebook)
    assert job.wait(PATIENCE).state == "failed"
    assert [finding.code for finding in findings(job)] == ["user-exception"]
    assert os.path.exists(job.paths.root)


NCCL = """
def leave(kind, data):
    path = {"log": os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())),
            "dump": f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}"}[kind]
    with open(path, "wb") as file:
        file.write(data)
"""
"""What NCCL and its watchdog leave where they are told to, without a GPU."""


@pytest.mark.timeout(240)
def test_the_warnings_of_nccl_are_read(notebook: dict[str, Any]) -> None:
    source = f"""{NCCL}
if rank == 1:
    leave("log", b"gpu7:11:22 [3] misc/socket.cc:9 NCCL WARN socketPollConnect: connect to 10.0.0.9<1> returned "
                 b"No route to host\\n")
    raise RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:400, unhandled system error")
time.sleep(600)
"""
    job, _ = run(source, notebook)
    assert job.wait(PATIENCE).state == "failed"
    [found] = job.state.findings
    assert (found.code, found.rank, found.node) == ("peer-unreachable", 1, job.plan.nodes[0].name)
    assert re.search(r"rank-00001\.nccl\.\d+$", found.evidence[0].file)


@pytest.mark.timeout(240)
def test_a_dump_of_a_rank_that_nccls_watchdog_aborted(notebook: dict[str, Any]) -> None:
    source = f"""{NCCL}
import pickle
if rank == 0:
    entry = dict(process_group=("0", "default_pg"), collective_seq_id=7, profiling_name="nccl:all_reduce", pg_id=0,
                 state="started", retired=True, is_p2p=False, time_created_ns=1, input_sizes=[[8]],
                 input_dtypes=["BFloat16"], output_sizes=[[8]], output_dtypes=["BFloat16"])
    config = {{"0": dict(name="0", desc="default_pg", ranks="[0, 1]")}}
    leave("dump", pickle.dumps(dict(version="2.10", entries=[entry], pg_config=config, pg_status={{}}), 2))
    os.abort()
time.sleep(600)
"""
    job, source = run(source, notebook)
    assert job.wait(PATIENCE).state == "failed"
    [found] = job.state.findings
    assert (found.code, found.rank) == ("rank-stuck", 1)
    assert found.sentence == "Rank 1 never came to all_reduce #7 of 8 bfloat16, in which rank 0 waits."
