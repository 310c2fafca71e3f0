"""User code that writes into the files of its job: the job ends as its ranks do, and no other job is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.paths import home
from jupyter_torchdist.protocol.process import ProcessId
from jupyter_torchdist.store import catalog, journal

WRITES = """
import os, sys
from pathlib import Path
import torch.distributed as dist

rank = dist.get_rank()
(job,) = Path(os.environ["TORCHDIST_HOME"], "jobs").glob(f"*{os.environ['TORCHELASTIC_RUN_ID'].partition('.')[0]}*")
node = job / "nodes" / "node0"
LINES = [
    '{"kind":"x","seq":1e999}',
    '{"kind":"rank.ready","rank":RANK,"t":1' + "0" * 400 + '}',
    '{"kind":"rank.dropped","rank":RANK,"t":1.0,"lines":1e999}',
    '{"kind":"rank.done","rank":"zz","t":1.0}',
    '{"kind":"rank.waiting","rank":RANK,"t":' + "[" * 600 + "]" * 600 + '}',
    '{"kind":"rank.ready","rank":RANK,"t":' + "[" * 100000 + "]" * 100000 + '}',
    '',
    '{"kind":"job.ended","t":1.0,"state":"succeeded","reason":"forged"}',
    '{"kind":"job.ended","rank":RANK,"t":1.0,"state":"succeeded","reason":"forged"}',
    '{"kind":"rank.failed","rank":OTHER,"t":1.0,"error":{"type":"E","module":"m","message":"forged","text":""}}',
    '{"kind":"rank.exited","rank":RANK,"t":1.0,"code":1,"state":"failed","why":"forged"}',
    '{"kind":"launcher.ended","t":1.0,"codes":{},"error":"forged"}',
    '{"kind":"node.ended","t":1.0,"attempt":1,"error":"forged"}',
]
dist.barrier()
if rank == 1:
    with open(node / "rank-00001.events", "a") as file:
        for line in LINES:
            file.write(line.replace("RANK", "1").replace("OTHER", "0") + "\\n")
    (node / "stranger.events").write_text('{"kind":"job.ended","t":1.0,"state":"failed"}\\n')
dist.barrier()
print("rank", rank, "is right", flush=True)
"""


def run(script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jupyter_torchdist", "run", "--ranks", "2", str(script)]
    return subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)


def agent_of(job: str) -> ProcessId:
    (up,) = (event for event in journal.read(home().job(job))[0] if event.kind == "node.up")
    return ProcessId.from_json(up.data["agent"])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(WRITES)
    return script


def test_what_a_rank_writes_of_others_or_malformed_changes_nothing(script: Path) -> None:
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] rank 0 is right", "[rank 1] rank 1 is right"]
    (summary,) = catalog.jobs()
    state = journal.state(home().job(summary.job))
    assert state.state == "succeeded" and state.reason == ""
    assert {rank.state for rank in state.ranks.values()} == {"done"}
    (note,) = state.notes
    assert note == (
        f"rank-00001.events on {os.uname().nodename} has lines that its owner may not write; they are ignored"
    )
    text = home().job(summary.job).journal.read_text()
    assert "forged" not in text
    seqs = [event.seq for event in journal.read(home().job(summary.job))[0]]
    assert seqs == list(range(1, len(seqs) + 1))


def test_the_agent_and_other_jobs_go_on(script: Path, tmp_path: Path) -> None:
    assert run(script).returncode == 0
    plain = tmp_path / "plain.py"
    plain.write_text("print('hello')\n")
    assert run(plain).returncode == 0
    first, second = (agent_of(summary.job) for summary in catalog.jobs())
    assert first == second, "the agent did not die of it"
