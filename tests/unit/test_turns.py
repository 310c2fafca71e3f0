"""The queue of a machine's GPUs: who is first, who counts, and files that other users may write."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.launchers import turns
from jupyter_torchdist.protocol.machine import tickets
from jupyter_torchdist.protocol.machine.tickets import Asked
from jupyter_torchdist.protocol.plan import Gpu

A, B, C = (f"20260102-03040{number}-aaaaa{number}" for number in range(3))
GPUS = tuple(Gpu(f"GPU-{index}", index, "H200", 2**37, 0) for index in range(3))
ALL = tuple(gpu.uuid for gpu in GPUS)


@pytest.fixture(autouse=True)
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHDIST_QUEUE", str(tmp_path / "queue"))
    return tmp_path / "queue"


@pytest.fixture
def enter() -> Iterator[Callable[..., None]]:
    """Take a place, and hold it as a driver does."""
    held: list[int] = []

    def take(job: str, count: int, gpus: tuple[str, ...] = ALL, own: tuple[int, ...] = ()) -> None:
        assert tickets.enter(Asked(job, count, gpus, own))
        fd = tickets.hold(job)
        assert fd is not None
        held.append(fd)

    yield take
    for fd in held:
        os.close(fd)


def turn(job: str, present: tuple[Gpu, ...] = GPUS) -> turns.Turn:
    found = turns.turn(job, present)
    assert found is not None
    return found


def test_first_come_first_served(enter: Callable[..., None]) -> None:
    enter(C, 2)
    tickets.grant(C, turn(C).gpus)
    enter(B, 2)
    enter(A, 1)  # one is free, but B came first
    assert turn(B) == turns.Turn((), 1, f"1 free, 2 wanted; GPU 0 has job {C}; GPU 1 has job {C}")
    assert turn(A).position == 2 and turn(A).reason.startswith(f"after job {B}; 1 free, 1 wanted")
    tickets.leave(C)
    assert turn(B).gpus == ("GPU-0", "GPU-1") and turn(A).position == 2
    tickets.grant(B, ("GPU-0", "GPU-1"))
    assert turn(A).gpus == ("GPU-2",)
    assert [ticket.asked.job for ticket in tickets.counting() if not ticket.granted] == [A]


def test_jobs_for_other_gpus_do_not_wait_for_each_other(enter: Callable[..., None]) -> None:
    enter(A, 2, ("GPU-0", "GPU-1"))
    tickets.grant(A, ("GPU-0",))
    enter(B, 2, ("GPU-0", "GPU-1"))
    enter(C, 1, ("GPU-2",))
    assert turn(B).gpus == () and turn(C).gpus == ("GPU-2",)
    assert [one.asked.job for one in tickets.ahead("new", ("GPU-1", "GPU-2"), tickets.counting())] == [B, C]


def test_processes_make_a_gpu_busy_but_the_jobs_own(enter: Callable[..., None]) -> None:
    used = (Gpu("GPU-0", 0, "H200", 2**37, 2**30, (4711,)), *GPUS[1:])
    enter(A, 3)
    assert turn(A, used).reason == "2 free, 3 wanted; GPU 0 has process 4711 (1.0 GiB)"
    enter(B, 1, own=(4711,))
    tickets.leave(A)
    assert turn(B, used).gpus == ("GPU-1",)  # one without processes comes first
    assert turns.turn(A, GPUS) is None


def test_a_place_that_nobody_holds_counts_only_at_first(monkeypatch: pytest.MonkeyPatch, queue: Path) -> None:
    assert tickets.enter(Asked(A, 3, ALL))
    assert tickets.enter(Asked(B, 1, ALL))
    assert turn(B).position == 2
    monkeypatch.setattr(tickets, "YOUNG", 0.0)  # the driver of A should have come
    with open(queue / B) as mine:
        fcntl.flock(mine, fcntl.LOCK_SH)
        assert turn(B).gpus == ("GPU-0",)
        assert tickets.enter(Asked(C, 1, ALL))
        assert sorted(path.name for path in queue.iterdir()) == [B, C]


def test_a_file_that_is_being_written_is_not_removed(queue: Path) -> None:
    assert tickets.enter(Asked(A, 1, ALL))
    (queue / B).touch()
    assert tickets.enter(Asked(C, 1, ALL))
    assert (queue / B).exists()


def test_what_others_write_there(queue: Path, enter: Callable[..., None], tmp_path: Path) -> None:
    enter(A, 1)
    (queue / "noise").write_bytes(b"\xff\x00{")
    (queue / "20260102-030405-bbbbbb").write_text('{"job":"20260102-030405-cccccc","count":1,"gpus":["GPU-0"]}\n')
    (queue / "20260102-030405-dddddd").write_text('{"job":"20260102-030405-dddddd","count":"x","gpus":7}\n')
    (queue / "20260102-030405-eeeeee").write_text("[" * 100_000)
    (queue / "20260102-030405-ffffff").symlink_to(queue / A)
    os.mkfifo(queue / "20260102-030405-abcabc")
    (queue / "20260102-030405-abcabd").mkdir()
    half = '{"job":"20260102-030405-abcabe","count":1,"gpus":["GPU-0"]}\n{"granted":["GPU-0"'
    (queue / "20260102-030405-abcabe").write_text(half)  # a grant that is being written
    assert [ticket.asked.job for ticket in tickets.counting()] == [A, "20260102-030405-abcabe"]
    assert turn(A).gpus == ("GPU-0",)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_two_users(queue: Path, enter: Callable[..., None]) -> None:
    """The file of another user: it has its place, its owner is told, and nobody else's umask hides it."""
    enter(A, 1)
    code = (
        "import os, sys\n"
        "from jupyter_torchdist.launchers import turns\n"
        "from jupyter_torchdist.protocol.machine import tickets\n"
        "os.umask(0o077); os.setgid(65534); os.setuid(65534)\n"  # its Python may be in a folder of root
        f"assert tickets.enter(tickets.Asked({B!r}, 3, {ALL!r})); fd = tickets.hold({B!r})\n"
        f"tickets.leave({A!r})\n"  # not its own
        "print('there', turns.turn(sys.argv[1], ()).reason, flush=True); sys.stdin.read()"
    )
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": root}
    for folder in (queue.parent, *queue.parent.parents):
        if folder.stat().st_uid == 0 and folder != Path("/") and "pytest" in str(folder):
            folder.chmod(0o755)
    words = [sys.executable, "-c", code, B]
    with subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        said = other.stdout.readline()
        assert said.startswith(f"there after job {A} of root")
        enter(C, 1)
        assert turn(C).reason.startswith(f"after job {B} of nobody") and turn(A).gpus
        tickets.leave(A)
        assert turn(C).position == 2
        other.stdin.close()
        other.wait(30)


def test_a_directory_that_is_not_safe(queue: Path) -> None:
    assert tickets.enter(Asked(A, 1, ALL))
    assert stat.S_IMODE(queue.stat().st_mode) == 0o1777
    tickets.leave(A)
    queue.chmod(0o777)  # everybody could delete everybody's files
    assert not tickets.enter(Asked(A, 1, ALL)) and tickets.counting() == [] and tickets.hold(A) is None
    queue.rmdir()
    queue.write_text("")
    assert not tickets.enter(Asked(A, 1, ALL)) and tickets.counting() == []
    queue.unlink()
    queue.symlink_to("/tmp")
    assert not tickets.enter(Asked(A, 1, ALL)) and tickets.counting() == []
    tickets.grant(A, ALL)  # without a place nothing happens
    tickets.leave(A)


def test_a_host_gives_a_gpu_to_one_job(enter: Callable[..., None], queue: Path) -> None:
    """Two agents of a host: the GPUs are kept until the job is not wanted any more, or who keeps them ends."""
    one, other = tickets.Kept(), tickets.Kept()
    assert one.claim(A, ("GPU-0", "GPU-1"), "anna@laptop", GPUS) == ""
    assert one.claim(A, ("GPU-0", "GPU-1"), "anna@laptop", GPUS) == ""  # sent again after its channel broke
    said = other.claim(B, ("GPU-1", "GPU-2"), "ben@\x1b[2Jdesk", GPUS)
    assert said.startswith(f"GPU 1 has job {A} of anna@laptop. Ask for fewer --gpus, name other --hosts")
    assert [path.name for path in queue.iterdir()] == [A]  # of B nothing is left
    assert other.claim(B, ("GPU-2",), "ben@\x1b[2Jdesk", ()) == ""
    assert one.claim(C, ("GPU-2",), "", ()).startswith(f"GPU-2 has job {B} of ben@2Jdesk.")
    assert [gpu.job for gpu in tickets.with_jobs(GPUS)] == [f"{A} of anna@laptop"] * 2 + [f"{B} of ben@2Jdesk"]
    one.only(lambda job: job != A)
    assert one.claim(C, ("GPU-0", "GPU-1"), "", GPUS) == ""
    assert other.claim(B, ("GPU-0",), "", GPUS).startswith(f"GPU 0 has job {C}.")  # another attempt, on others
    assert one.claim(A, ("GPU-2",), "", GPUS) == ""
    tickets.leave(A)
    enter(B, 3)  # waits on the host itself, and came first
    assert one.claim(A, ("GPU-2",), "", GPUS).startswith(f"GPU 2 has job {B}.")


def test_a_claim_outlives_its_agent_while_ranks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "YOUNG", 0.0)
    agent, following = tickets.Kept(), tickets.Kept()
    assert agent.claim(A, ("GPU-0",), "", GPUS) == ""
    launcher = tickets.hold(A)
    assert launcher is not None
    os.close(agent._files.pop(A))  # the agent is killed
    assert following.claim(B, ("GPU-0",), "", GPUS).startswith(f"GPU 0 has job {A}.")
    following.hold(A)  # the next agent follows the job
    os.close(launcher)
    assert following.claim(B, ("GPU-0",), "", GPUS).startswith(f"GPU 0 has job {A}.")
    os.close(following._files.pop(A))  # all are dead
    assert following.claim(B, ("GPU-0",), "", GPUS) == ""


def test_where_no_place_can_be_had_every_claim_is_granted(queue: Path) -> None:
    queue.write_text("")
    kept = tickets.Kept()
    assert kept.claim(A, ALL, "", GPUS) == "" and kept.claim(B, ALL, "", GPUS) == ""
    kept.leave(A)
