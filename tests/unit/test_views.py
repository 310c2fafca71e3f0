"""States as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_torchdist.protocol.bundle import Captured
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.events import ErrorRecord, Event
from jupyter_torchdist.protocol.gauges import Gauges
from jupyter_torchdist.protocol.plan import Gpu, Inventory, Kept, NodePlan, Plan, Reach
from jupyter_torchdist.protocol.spec import JobSpec, Options
from jupyter_torchdist.protocol.state import JobState, RankState, Waiting, apply, fold
from jupyter_torchdist.views import failure_text, host_text, job_text, plan_tables, wording

ERROR = ErrorRecord(
    "ValueError", "builtins", "bad", "Traceback …\nValueError: bad", (("Cell In[2]", 3, "f", "x"),), 10.0
)


def job(state: str = "running", world: int = 2, **changes: object) -> JobState:
    ranks = {number: RankState(number, "n0", "box", 100 + number, "running") for number in range(world)}
    base = JobState("20250101-000000-abc123", None, "Cell In[2]", state, world, 100.0, ranks=ranks)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.00 s"), (0.051, "0.05 s"), (-1, "0.00 s"), (12.34, "12.3 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"),
        (245, "4 min 05 s"), (3599.7, "1 h 00 min"), (11220, "3 h 07 min"), (187200, "2 d 04 h"),
    ],
)  # fmt: skip
def test_durations_read_like_a_person_says_them(seconds: float, words: str) -> None:
    assert wording.duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (256_000_000, "256 MB"),
        (999_600, "1 MB"),
        (5e15, "5e+03 TB"),
    ],
)
def test_sizes_have_three_digits(count: float, words: str) -> None:
    assert wording.size(int(count)) == words


def test_a_clock_that_was_set_back_does_not_give_negative_times() -> None:
    assert wording.ago(200.0, 100.0) == "just now"
    assert job_text.elapsed(job(), 50.0) == 0.0
    assert wording.ago(0.0, 3 * 86400.0) == "3 d ago"


def test_headline_says_state_ranks_time_and_reason() -> None:
    assert job_text.headline(job(), 103.0) == "running · 2 ranks on box · 3.0 s"
    ended = job("failed", ended=104.0, reason="rank 1 failed")
    assert job_text.headline(ended, 999.0) == "✗ failed · 2 ranks on box · 4.0 s · rank 1 failed"


def waiting_job() -> JobState:
    """Ranks 0 to 2 of 4 wait for rank 3."""
    state = job(world=4)
    for number in range(3):
        wait = Waiting("all_reduce", "gloo:0", 17, 100.0 + number)
        state.ranks[number] = replace(state.ranks[number], waiting=wait, entered={"gloo:0": 17}, counted=105.0)
    state.ranks[3] = replace(state.ranks[3], entered={"gloo:0": 16}, counted=105.0)
    return state


def test_who_waits_is_said_and_for_whom() -> None:
    state = waiting_job()
    assert job_text.waiting_lines(state, 112.0) == ["ranks 0-2 wait in all_reduce #17 for rank 3, for 12.0 s"]
    assert "waiting in all_reduce #17 for rank 3" in job_text.ranks_table(state)
    assert "\nranks 0-2 wait in" in job_text.job_page(state, None, None, None, 112.0)
    state.ranks[3] = replace(state.ranks[3], counted=0.0)
    assert job_text.waiting_lines(state, 112.0) == ["ranks 0-2 wait in all_reduce #17, for 12.0 s"]


def test_memory_of_ranks_where_it_is_known() -> None:
    taken = {0: Gauges(97, 1_250_000_000, 2_000_000_000)}
    assert "MEMORY" not in job_text.ranks_table(job())
    running = job_text.ranks_table(job(), taken).split("\n")
    assert running[0].split() == ["RANK", "HOST", "PID", "MEMORY", "STATE", "RESULTS"]
    assert "  1.25 GB  running" in running[1]
    ended = job_text.ranks_table(
        job("succeeded", ended=104.0), {1: Gauges(gpu_memory=5, gpu_memory_peak=12_000_000_000)}
    )
    assert "GPU MEMORY" in ended and "peak 12 GB" in ended.split("\n")[2]
    assert "1.25 GB" in job_text.job_page(job(), None, None, None, 101.0, taken)


def test_a_rank_that_has_ended_waits_no_more() -> None:
    state = waiting_job()
    assert job_text.waiting_lines(replace(state, state="cancelled"), 112.0) == []
    state.ranks[0] = replace(state.ranks[0], state="stopped", why="was stopped")
    assert job_text.rank_line(state, state.ranks[0]) == "was stopped"
    assert job_text.waiting_lines(state, 112.0) == ["ranks 1, 2 wait in all_reduce #17 for rank 3, for 11.0 s"]


def test_a_rank_that_was_interrupted_says_by_what() -> None:
    rank = replace(job().ranks[0], state="interrupted")
    assert job_text.rank_line(job("cancelled"), rank) == "cancelled"
    assert job_text.rank_line(job("timed_out"), rank) == "timed out"
    assert job_text.rank_line(replace(job("stopping"), reason="cancelled"), rank) == "cancelled"
    assert job_text.rank_line(job("failed"), rank) == "interrupted"


def test_several_hosts_are_counted() -> None:
    state = job()
    state.ranks[1] = replace(state.ranks[1], host="other")
    assert job_text.where(state) == "2 ranks on 2 hosts"
    assert job_text.where(JobState(world_size=1)) == "1 rank"


def test_the_jobs_table_has_a_line_for_every_job_and_words_for_none() -> None:
    lines = job_text.jobs_table([job(), job("timed_out", name="long one", ended=160.0)], 160.0).split("\n")
    assert lines[0].split() == ["JOB", "NAME", "STATE", "RANKS", "STARTED", "TOOK", "CELL"]
    assert "timed out" in lines[2] and "long one" in lines[2] and "1 min 00 s" in lines[2]
    assert "no jobs yet" in job_text.jobs_table([], 0.0)


def test_first_failure_is_shown_in_full_and_the_others_folded() -> None:
    state = job("failed", world=8)
    state.ranks[3] = replace(state.ranks[3], state="failed", error=ERROR)
    text = failure_text.failure(state)
    assert text.startswith("rank 3 on box\nTraceback …\nValueError: bad")
    assert text.endswith("7 other ranks were stopped because of this")


def test_other_ranks_that_failed_by_themselves_are_named() -> None:
    state = job("failed", world=3)
    state.ranks[0] = replace(state.ranks[0], state="failed", error=replace(ERROR, t=11.0, type="KeyError"))
    state.ranks[1] = replace(state.ranks[1], state="failed", error=ERROR)
    state.ranks[2] = replace(state.ranks[2], state="done")
    assert failure_text.others(state, 1) == "1 other rank failed too: rank 0 KeyError"
    assert state.failures()[0].rank == 1


def test_a_killed_rank_is_described_in_its_own_words() -> None:
    events = [
        Event("job.submitted", 1.0, data={"job": "j", "world_size": 1}),
        Event("rank.exited", 2.0, rank=0, data={"code": -9, "why": "was killed (SIGKILL)"}),
    ]
    assert "was killed (SIGKILL)" in failure_text.failure(fold(events))


def test_the_page_of_a_job_shows_its_source_with_the_users_line_numbers() -> None:
    spec = JobSpec("j", "cell", "x = 1\ny = 2\n", "Cell In[2]", 2, Options(), 0.0)
    plan = Plan("j", 4, "gloo", (NodePlan("n0", (0, 1, 2, 3)),), False, "node", 60.0, 5.0, env_names=("TOKEN",))
    page = job_text.job_page(job(notes=("mind this",)), spec, plan, None, 101.0)
    assert "    2  x = 1\n    3  y = 2" in page
    assert "note: mind this" in page
    assert "0-3" in page and "NUMA binding: node" in page and "environment: TOKEN" in page and "1 min 00 s" in page


def test_a_job_says_that_its_first_steps_are_being_proved() -> None:
    state = apply(job(), Event("rank.proving", 1.0, rank=0, data={"seconds": 0}))
    assert job_text.headline(state, 101.0) == "running: proving the first steps · 2 ranks on box · 1.0 s"
    state = apply(state, Event("rank.proving", 2.0, rank=0, data={"seconds": 1.5}))
    assert job_text.headline(state, 101.0) == "running · 2 ranks on box · 1.0 s"
    assert "the first steps were proved in 1.5 s" in job_text.job_page(state, None, None, None, 101.0)


def test_a_plan_on_hosts_says_what_differs_between_them() -> None:
    first = NodePlan("node0", (0,), address="10.0.0.1", interface="", threads=8, host="gpu1")
    second = replace(first, name="node1", ranks=(1,), address="", threads=4, host="gpu2")
    text = plan_tables.plan_table(Plan("j", 2, "gloo", (first, second), False, None, None, 5.0))
    assert "OMP_NUM_THREADS=8, 4 (in the order of the hosts)" in text
    assert "gpu1  0      10.0.0.1 " in text and "gpu2  1      towards gpu1" in text


def test_the_receipt_lists_every_name() -> None:
    receipt = [
        Captured("model", "model", "TinyGPT", 1_500_000, "line 4"),
        Captured("torch", "module", "import", 0, "line 2"),
    ]
    text = plan_tables.receipt_table(receipt)
    assert "1.5 MB" in text and "line 4" in text and text.count("\n") == 2
    assert "nothing" in plan_tables.receipt_table([])


def test_the_inventory_names_gpus_and_their_processes() -> None:
    node = Inventory(
        "box", 2, 8_000_000_000, (Gpu("GPU-1", 0, "H200", 150_000_000_000, 1_000_000_000, (7,)),), "3.11", "2.13"
    )
    text = plan_tables.inventory_table([node, Inventory("cpu", 1, 1000)])
    assert "GPU 0  H200  1 GB of 150 GB in use  GPU-1  by 7" in text
    assert "cpu: 1 core, 1 kB\n  no GPU" in text


def test_a_host_has_one_row_with_its_gpus_its_clock_and_its_jobs() -> None:
    gpus = Gpu("GPU-1", 0, "H200", 9, 0), Gpu("GPU-2", 1, "H200", 9, 5, (7,))
    host = Inventory("gpu1", 8, 2_000_000, gpus, "3.11.7", "2.13", 5_000, reach=Reach(python="/p"))
    kept = "3 MB, 2 environments 1 kB"
    words = ("gpu1", "1 of 2 free, H200", "8", "2 MB", "5 kB", kept, "-2.1 s", "2.13", "3.11.7 /p", "runs j")
    assert host_text.row(host, -2.1, ["j"], Kept(3_000_000, 2, 1_000)) == words
    assert host_text.row(host, 0.3, [], Kept())[5:7] == ("nothing", "same")
    failed = host_text.failed_row("gpu2", "gpu2: no route", "plug it in")
    assert (failed[0], failed[-1]) == ("gpu2", "no route → plug it in")
    assert host_text.hosts_table([words, failed]).count("\n") == 2


def test_refusals_say_what_to_do() -> None:
    assert failure_text.refusal(OptionError("there is no option --rank", "did you mean --ranks?")) == (
        "OptionError: there is no option --rank\n  → did you mean --ranks?"
    )


def test_names_that_stayed_behind_are_in_one_line() -> None:
    state = job()
    state.ranks[0] = replace(state.ranks[0], left=(("f", "an open file"), ("g", "a generator")))
    assert failure_text.left_behind(state) == "f: an open file; g: a generator"
    assert failure_text.left_behind(JobState()) == ""
