"""Which rank holds up the others, from what all ranks did; what a rank's file says of that."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.diagnosis import live, stragglers
from jupyter_torchdist.driver import findings
from jupyter_torchdist.protocol.events import Finding
from jupyter_torchdist.protocol.gauges import PLACE, Gauges
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.plan import NodePlan, Plan
from jupyter_torchdist.protocol.spec import JobSpec, Options
from jupyter_torchdist.protocol.state import JobState, RankState
from jupyter_torchdist.ranks.streams import pace
from jupyter_torchdist.ranks.streams.pace import Pace
from jupyter_torchdist.store import journal
from jupyter_torchdist.testing import FakeJob

EVEN = Gauges(looks=240, waits=40, loads=5, network=0, place="Cell In[3], line 4")
SPEC = JobSpec("job", "cell", "for x in loader:\n    step(x)\n", "Cell In[3]", 3, Options(), 0.0)


def found(gauges: dict[int, Gauges], hosts: int = 1, gpus: int = 0, **more: Any) -> list[Finding]:
    """Of a job with these ranks, on so many hosts."""
    world = max(gauges, default=0) + 1
    size = world // hosts
    cards = tuple(f"GPU-{n}" for n in range(gpus)), tuple(range(gpus))
    nodes = [NodePlan(f"node{host}", tuple(range(host * size, (host + 1) * size)), *cards) for host in range(hosts)]
    plan = Plan("job", world, "gloo", tuple(nodes), False, None, None, 5.0)
    ranks = {rank: RankState(rank, host=f"box{rank // size}", state="running") for rank in range(world)}
    state = replace(JobState("job", state="running", world_size=world, ranks=ranks), **more)
    return live.of(state, plan, SPEC, gauges)


def test_the_rank_that_hardly_waits_is_named_with_its_line() -> None:
    [one] = found(dict.fromkeys(range(4), EVEN) | {2: replace(EVEN, waits=2, loads=70)}, hosts=2, gpus=2)
    assert (one.code, one.rank, one.node, one.severity) == ("late-by-input", 2, "box1", "warning")
    words = "rank 2 (box1, GPU 0) holds up the others for 38 % of the time: it waits for data at Cell In[3], line 4"
    assert one.sentence == words
    assert [line.text for line in one.evidence] == ["step(x)"]


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (replace(EVEN, waits=0, loads=0), "late-by-work"),
        (replace(EVEN, waits=0, loads=0, network=60), "late-by-network"),
        (replace(EVEN, waits=0, loads=60), "late-by-input"),
    ],
)
def test_what_it_does_instead(told: Gauges, code: str) -> None:
    assert [one.code for one in found({0: EVEN, 1: told})] == [code]


def test_nothing_is_said_of_equal_ranks_nor_too_early() -> None:
    assert found({rank: replace(EVEN, waits=30 + 5 * rank) for rank in range(4)}) == []
    late = replace(EVEN, waits=0)
    assert found({0: EVEN, 1: replace(late, looks=stragglers.LOOKS - 1)}) == []
    assert found({0: EVEN, 1: replace(late, looks=None)}) == []
    assert found({1: late}) == [], "the other rank is not known"
    assert found({0: late}) == [], "there is no other"
    assert found({0: EVEN, 1: late}, state="stopping") == []
    assert found({rank: late if rank < 3 else EVEN for rank in range(4)}) == [], "most ranks hold up nobody"


def test_with_nccl_only_the_input_tells() -> None:
    blind = replace(EVEN, waits=None)
    assert found({0: blind, 1: replace(blind, network=90)}) == []
    [one] = found(
        {0: blind, 1: replace(blind, loads=60, gpu_clock=1200, gpu_temperature=88), 2: replace(blind, gpu_clock=1980)}
    )
    assert one.code == "late-by-input" and one.rank == 1
    assert one.sentence.endswith("; its GPU has 1200 MHz at 88 °C, the others 1980 MHz")


def test_the_worst_are_named_first() -> None:
    gauges = dict.fromkeys(range(10), EVEN) | {rank: replace(EVEN, waits=rank) for rank in (1, 3, 5, 7)}
    assert [one.rank for one in found(gauges)] == [1, 3, 5]


CARD = Gauges(gpu=90, gpu_total=80, gpu_clock=1200, gpu_temperature=91)


def test_a_gpu_that_is_slowed_down_by_heat() -> None:
    [one] = found({0: CARD, 1: replace(CARD, gpu_slowed="heat, its power limit")}, gpus=2)
    assert (one.code, one.severity, one.rank) == ("gpu-slowed", "warning", 1)
    assert one.sentence == "Rank 1 (GPU 1) has a GPU that is slowed down by heat: 1200 MHz at 91 °C."
    assert found({0: CARD, 1: replace(CARD, gpu_slowed="its power limit")}, gpus=2) == [], "common at full load"


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (replace(CARD, gpu_xid=79), "gpu-off-bus"),
        (Gauges(gpu_xid=79), "gpu-off-bus"),
        (replace(CARD, gpu_xid=94), "gpu-ecc"),
        (replace(CARD, gpu_xid=74), "nvlink-error"),
        (replace(CARD, gpu_errors=1), "gpu-ecc"),
    ],
)
def test_a_gpu_that_fails(told: Gauges, code: str) -> None:
    [one] = found({0: CARD, 1: told}, hosts=2, gpus=1)
    assert (one.code, one.severity, one.rank, one.node) == (code, "fault", 1, "box1")
    assert one.sentence.startswith("Rank 1 (box1, GPU 0) ")
    assert (f"Xid {told.gpu_xid}" in one.sentence) == (told.gpu_xid is not None)


def test_a_job_that_failed_is_told_that_its_gpu_did(tmp_path: Path) -> None:
    with FakeJob(Home(tmp_path), ranks=2) as job:
        job.running().takes(rank0=CARD, rank1=replace(CARD, gpu_xid=79))
        job.rank(0).prints("CUDA error: uncorrectable ECC error encountered\n", "err")
        job.rank(1).failed(RuntimeError("GPU has fallen off the bus"))
        job.ended("failed", first_failure=1)
        told = findings.of(job.paths, job.plan, journal.state(job.paths), "failed", 1)
    assert (told[0]["code"], told[0]["rank"]) == ("gpu-off-bus", 1)
    assert "Xid 79" in told[0]["sentence"]
    assert len({(one["code"], one["rank"]) for one in told}) == len(told), "what the log says, too, is said once"


def test_nothing_is_said_of_errors_that_mean_nothing_nor_after_the_end() -> None:
    assert found({0: replace(CARD, gpu_xid=43), 1: replace(CARD, gpu_errors=0)}, gpus=2) == []
    assert found({0: replace(CARD, gpu_xid=79)}, gpus=1, state="failed") == []


def test_a_rank_tells_what_its_main_thread_does(tmp_path: Path) -> None:
    told = Pace(tmp_path / "pace", 1, lambda: False)
    stop = threading.Event()

    def look() -> None:
        for _ in range(8):
            told.look()
        stop.set()

    threading.Thread(target=look).start()
    while not stop.is_set():
        time.sleep(0.001)
    found = pace.read(tmp_path / "pace", [5, 6])
    assert found.keys() == {6}, "rank 5 has not written"
    assert found[6]["looks"] == 8 and found[6]["waits"] == 0 and "test_stragglers.py, line" in found[6]["place"]


def test_waits_are_unknown_where_a_collective_may_be_on_a_gpu(tmp_path: Path) -> None:
    told = Pace(tmp_path / "pace", 0, lambda: None)
    ready, stop = threading.Event(), threading.Event()

    def look() -> None:
        ready.wait()
        time.sleep(0.2)
        told.look()
        stop.set()

    threading.Thread(target=look).start()
    ready.set()
    stop.wait()  # in futex(2)
    assert told.shares()["waits"] is None


def test_what_user_code_writes_into_the_file_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "pace"
    records = [
        b"rubbish",
        json.dumps({"looks": -3, "waits": "x", "place": 7}).encode(),
        b'{"place":"%s"}' % (b"x" * 900),
    ]
    path.write_bytes(b"".join(record.ljust(pace.RECORD) for record in records))
    found = pace.read(path, [0, 1, 2, 3])
    assert found[1] == {"looks": None, "waits": None, "loads": None, "network": None, "place": ""}
    assert found[2]["place"] == "x" * PLACE and not {0, 3} & found.keys()
    assert pace.read(tmp_path, [0]) == {}
