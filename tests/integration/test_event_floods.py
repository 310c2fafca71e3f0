"""A rank with 300,000 events (``make soak``): driver, agent, client and feed read them in bounded memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.process import ProcessId
from jupyter_torchdist.store import catalog, journal, liveness
from tests.leaks import wait_until

EVENTS = 300_000

MOST = 150.0
"""MB of each process."""

PATIENCE = 600.0
"""Seconds; a quiet machine takes a tenth."""

FLOODS = f"""
import os, sys, time
from pathlib import Path

if os.environ["RANK"] == "1":
    (job,) = Path(os.environ["TORCHDIST_HOME"], "jobs").glob("2*")
    with open(job / "nodes" / "node0" / "rank-00001.events", "a") as file:
        for number in range({EVENTS}):
            file.write('{{"kind":"rank.dropped","rank":1,"t":%d.5,"lines":1}}\\n' % number)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""

FOLLOWS = """
import sys
from pathlib import Path
from jupyter_torchdist.feed.states import States
from jupyter_torchdist.protocol.paths import JobPaths

print(States(JobPaths(Path(sys.argv[1]))).state.ranks[1].dropped)
print(open("/proc/self/status").read())
"""


def peak(status: str) -> float:
    """MB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1000


def peak_of(pid: int) -> float:
    return peak(Path(f"/proc/{pid}/status").read_text())


@pytest.mark.soak
def test_many_events_of_a_rank(own_runtime: Path, home: Path, tmp_path: Path) -> None:
    script, end = tmp_path / "train.py", tmp_path / "end"
    script.write_text(FLOODS)
    command = [sys.executable, "-m", "jupyter_torchdist", "run", "--ranks", "2", str(script), str(end)]
    with subprocess.Popen(command) as client:
        assert wait_until(lambda: bool(catalog.jobs()), PATIENCE)
        paths = Home(home).job(catalog.jobs()[0].job)
        assert wait_until(lambda: lines(paths.journal) > EVENTS, PATIENCE)
        first = liveness.driver_of(paths)
        (agent,) = own_runtime.glob("agent-*/agent.json")
        assert first and peak_of(first.process.pid) < MOST
        assert peak_of(ProcessId.from_json(codec.loads(agent.read_bytes())["process"]).pid) < MOST

        os.kill(first.process.pid, 9)
        assert wait_until(lambda: driver_of_journal(paths.journal) not in (None, first.process.pid), PATIENCE)
        assert peak_of(driver_of_journal(paths.journal) or 0) < MOST and peak_of(client.pid) < MOST
        seen = subprocess.run([sys.executable, "-c", FOLLOWS, paths.root], text=True, capture_output=True, check=True)
        assert int(seen.stdout.split()[0]) == EVENTS and peak(seen.stdout) < MOST

        end.touch()
        assert client.wait(PATIENCE) == 0
    assert journal.state(paths).state == "succeeded"


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def driver_of_journal(path: Path) -> int | None:
    """The pid of the last driver that took the job, from the journal's last lines."""
    found = re.findall(rb'"kind":"job.driver".*?"pid":(\d+)', path.read_bytes()[-20_000:])
    return int(found[-1]) if found else None
