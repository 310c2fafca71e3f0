"""When a job counts as stalled, by what agents say of its ranks; and who holds up the others, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jupyter_torchdist.driver.stall import BEGINNING, WORKING, StallWatch
from jupyter_torchdist.driver.stalled import StalledJob
from jupyter_torchdist.protocol.plan import NodePlan, Plan
from jupyter_torchdist.protocol.spec import JobSpec, Options
from jupyter_torchdist.protocol.state import JobState, RankState, Waiting

FLOOR = 30.0
BEGAN = 1000.0


def job(*ranks: RankState, world: int = 2, **changes: Any) -> JobState:
    made = ranks or tuple(rank(number) for number in range(world))
    found = {one.rank: one for one in made}
    return replace(JobState("j", state="running", world_size=len(found), attempt=1, ranks=found), **changes)


def rank(number: int, state: Any = "running", **changes: Any) -> RankState:
    ready = 0.0 if state == "starting" else 1.0
    return RankState(number, **{"node": "node0", "host": "box", "state": state, "ready": ready, **changes})


def waits(number: int = 7, group: str = "gloo:0", **changes: Any) -> dict[str, Any]:
    wait = Waiting("all_reduce", group, number, 100.0)
    return {"waiting": wait, "entered": {group: number}, "counted": 105.0, **changes}


RUNNING = job()


class Course:
    """A job over time: every second its agent says of each rank when it made progress and when it worked."""

    def __init__(self, state: JobState = RUNNING, floor: float = FLOOR) -> None:
        self.watch, self.state, self.now = StallWatch(floor), state, BEGAN
        self.progress = dict.fromkeys(state.ranks, BEGAN)
        self.work = dict(self.progress)
        self.told = set(state.ranks)

    def passes(self, seconds: int, progress: tuple[int, ...] = (), work: tuple[int, ...] = ()) -> float | None:
        """Seconds since which the job stalls in the end."""
        found = None
        for _ in range(seconds):
            self.now += 1.0
            self.progress |= dict.fromkeys(progress, self.now)
            self.work |= dict.fromkeys((*progress, *work), self.now)
            ranks = [(n, self.now - self.progress[n], self.now - self.work[n]) for n in sorted(self.told)]
            self.watch.told(ranks, self.now + 0.01)
            found = self.watch.since(self.state, self.now + 0.02)
        return None if found is None else round(self.now - found)


def test_no_rank_makes_progress() -> None:
    course = Course()
    assert course.passes(100, progress=(0, 1)) is None
    assert course.passes(29) is None
    assert course.passes(2) == 31
    assert course.passes(20) == 51


def test_one_rank_is_enough() -> None:
    assert Course().passes(1000, progress=(1,)) is None


def test_progress_ends_it_and_work_does_not() -> None:
    course = Course()
    course.passes(35)
    assert course.passes(5, work=(0,)) == 40
    assert course.passes(1, progress=(1,)) is None
    assert course.passes(20) is None


def test_a_pause_that_was_seen_may_come_again_and_take_twice_as_long() -> None:
    course = Course()
    course.passes(10, progress=(0, 1))
    assert course.passes(25) is None
    course.passes(10, progress=(0, 1))
    assert course.passes(45) is None
    course.passes(1, progress=(0, 1))
    assert course.passes(88) is None
    assert course.passes(5) == 93


def test_ranks_that_work_and_for_which_nobody_waits() -> None:
    """A cell that computes for hours without a word is slow, not stalled."""
    assert Course().passes(5000, work=(0,)) is None


def test_ranks_that_work_while_others_wait() -> None:
    """A first step that is compiled, a validation, a checkpoint: for ten times the floor, then twice the longest."""
    course = Course(job(rank(0), rank(1, **waits())))
    patience = int(WORKING * FLOOR)
    assert course.passes(patience - 5, work=(0,)) is None
    course.passes(1, progress=(0, 1))
    assert course.passes(patience + 200, work=(0,)) is None
    course.passes(1, progress=(0, 1))
    assert course.passes(2 * (patience + 200) + 5, work=(0,)) is not None
    assert course.watch.at_work(course.now) == {0}


def test_what_compiles_makes_a_later_hang_no_longer() -> None:
    """The long pause was full of work: a pause without any is a stall as soon as before."""
    course = Course(job(rank(0), rank(1, **waits())))
    course.passes(250, work=(0,))
    course.passes(5, progress=(0, 1))
    assert course.passes(31) is not None


def test_before_the_first_line_the_floor_is_not_lowered() -> None:
    course = Course(job(rank(0), rank(1, "starting")), floor=1.0)
    assert course.passes(int(BEGINNING) - 1, progress=(0,)) is None
    assert course.passes(2, progress=(0,)) == BEGINNING + 1
    course.state = RUNNING
    assert course.passes(2, progress=(0, 1)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda course: course.told.discard(1),
        lambda course: setattr(course, "state", replace(RUNNING, world_size=3)),
        lambda course: setattr(course, "watch", StallWatch(0.0)),
    ],
    ids=["an agent that says nothing", "a rank that is not there yet", "--stall off"],
)
def test_what_is_not_known_is_no_stall(change: Any) -> None:
    course = Course()
    change(course)
    assert course.passes(200) is None


def test_a_driver_that_takes_up_a_stalled_job() -> None:
    course = Course()
    course.watch = StallWatch(FLOOR, since=BEGAN - 40)
    assert course.watch.since(course.state, BEGAN) == BEGAN - 40, "nothing was heard yet"
    course.progress = dict.fromkeys((0, 1), BEGAN - 40)
    assert course.passes(3) == 43
    assert course.passes(1, progress=(0,)) is None


# -- who holds up the others

SOURCE = "import torch\nstore.wait(['key'])\nfor batch in loader:\n    pass\n"
SPEC = JobSpec("j", "cell", SOURCE, "Cell In[3]", 2, Options(), 0.0)
ONE = Plan("j", 2, "gloo", (NodePlan("node0", (0, 1, 2, 3)),), fresh=False, numa_binding=None, timeout=None, grace=5.0)
GPUS = replace(ONE, nodes=(NodePlan("node0", (0, 1), ("a", "b")), NodePlan("node1", (2, 3), ("c", "d"))))
ELSEWHERE: dict[str, Any] = {"place": "Cell In[3], line 9, in work", "entered": {"gloo:0": 6}, "counted": 105.0}
LOADER: dict[str, Any] = {
    **ELSEWHERE,
    "place": "Cell In[3], line 4, in DataLoader; its worker is at Cell In[3], line 2, in get",
}
THREE = tuple(rank(number, **waits()) for number in range(3))

HANGS: dict[str, tuple[JobState, str, str]] = {
    "one of four": (
        job(*THREE, rank(3, host="node2", **LOADER)),
        "dataloader-stuck",
        (
            "rank 3 has not entered all_reduce #7; it is at Cell In[3], line 4, in DataLoader; its worker is at "
            "Cell In[3], line 2, in get; 3 ranks wait for it"
        ),
    ),
    "user code": (
        job(rank(0, **waits()), rank(1, **ELSEWHERE)),
        "rank-stuck",
        "rank 1 has not entered all_reduce #7; it is at Cell In[3], line 9, in work; rank 0 waits for it",
    ),
    "one that cannot say how far it is": (
        job(rank(0, **waits()), rank(1, place="Cell In[3], line 9, in re.match")),
        "rank-stuck",
        "rank 1 has not entered all_reduce #7; it is at Cell In[3], line 9, in re.match; rank 0 waits for it",
    ),
    "one that does not answer": (
        job(rank(0, **waits()), rank(1)),
        "rank-stuck",
        "rank 1 has not entered all_reduce #7; it does not answer; rank 0 waits for it",
    ),
    "before the first line": (
        job(rank(0, **waits()), rank(1, "starting", place="/x/mine.py, line 3, in load")),
        "rank-not-begun",
        "rank 1 hangs before the first line of the cell; it is at /x/mine.py, line 3, in load; rank 0 waits for it",
    ),
    "a store": (
        job(rank(0, place="Cell In[3], line 3"), rank(1, place="Cell In[3], line 3")),
        "store-stuck",
        "ranks 0, 1 make no progress; they are at Cell In[3], line 3 (store.wait(['key']))",
    ),
    "new_group": (
        job(rank(0, place="Cell In[3], line 8, in new_group"), rank(1, **ELSEWHERE)),
        "store-stuck",
        (
            "ranks 0, 1 make no progress; rank 0 is at Cell In[3], line 8, in new_group, "
            "rank 1 is at Cell In[3], line 9, in work"
        ),
    ),
    "destroy_process_group": (
        job(rank(0, place="Cell In[3], line 5, in destroy_process_group"), rank(1, "done")),
        "destroy-stuck",
        "rank 0 makes no progress; it is at Cell In[3], line 5, in destroy_process_group",
    ),
    "all in a DataLoader": (
        job(rank(0, **LOADER), rank(1, **LOADER)),
        "dataloader-stuck",
        (
            "ranks 0, 1 make no progress; they are at Cell In[3], line 4, in DataLoader; its worker is at Cell In[3], "
            "line 2, in get"
        ),
    ),
    "one that has ended": (
        job(rank(0, **waits()), rank(1, "done", **ELSEWHERE)),
        "ended-early",
        "rank 1 has ended and never entered all_reduce #7; rank 0 waits for it",
    ),
    "two groups": (
        job(
            rank(0, **waits(1, "gloo:1", place="Cell In[3], line 4")),
            rank(1, **waits(1, "gloo:2", place="Cell In[3], line 5")),
        ),
        "groups-deadlocked",
        (
            "ranks wait for each other: "
            "rank 0 waits in all_reduce #1 of group gloo:1 for rank 1 at Cell In[3], line 4; "
            "rank 1 waits in all_reduce #1 of group gloo:2 for rank 0 at Cell In[3], line 5"
        ),
    ),
    "different collectives": (
        job(
            rank(0, **waits(place="Cell In[3], line 4")),
            rank(1, **waits(waiting=Waiting("broadcast", "gloo:0", 7, 100.0), place="Cell In[3], line 5")),
        ),
        "collective-mismatch",
        (
            "ranks call different collectives: rank 0 all_reduce #7 at Cell In[3], line 4; rank 1 broadcast #7 at "
            "Cell In[3], line 5"
        ),
    ),
    "all in one collective": (
        job(rank(0, **waits()), rank(1, **waits())),
        "watchdog-same-op",
        "ranks 0, 1 wait in all_reduce #7, and no rank is known to be missing",
    ),
    "a lock": (
        job(rank(0, place="Cell In[3], line 9, in queue.get"), rank(1, place="Cell In[3], line 9, in queue.get")),
        "no-progress",
        "ranks 0, 1 make no progress; they are at Cell In[3], line 9, in queue.get",
    ),
}


@pytest.mark.parametrize("case", HANGS)
def test_who_holds_up_the_others(case: str) -> None:
    state, code, sentence = HANGS[case]
    found = StalledJob(ONE, SPEC, state).finding()
    assert (found.code, found.sentence) == (code, sentence)
    assert found.remedy and found.cause and "JOB" not in found.remedy


def test_host_gpu_line_and_work() -> None:
    culprit = rank(3, host="node2", **ELSEWHERE | {"place": "Cell In[3], line 2"})
    found = StalledJob(GPUS, SPEC, job(*THREE, culprit), at_work={3}).finding()
    assert found.sentence == (
        "rank 3 (node2, cuda:1) has not entered all_reduce #7; it is at work at Cell In[3], line 2; 3 ranks wait for it"
    )
    assert (found.rank, found.node) == (3, "node2")
    assert [(line.file, line.number, line.text) for line in found.evidence] == [("Cell In[3]", 2, "import torch")]
