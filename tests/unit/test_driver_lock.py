"""One driver a job, whatever the order in which drivers come and go."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from jupyter_torchdist.driver import __main__ as program
from jupyter_torchdist.driver.__main__ import _drive
from jupyter_torchdist.protocol.paths import runtime_dir
from jupyter_torchdist.store import files, journal
from jupyter_torchdist.store.journal import JournalInUse
from jupyter_torchdist.store.sole import Sole
from jupyter_torchdist.testing import FakeJob


def locks(job: str) -> list[str]:
    return [path.name for path in runtime_dir().glob(f"driver-{job}*")]


def race(job: str, inside: Path, rounds: int, gate: multiprocessing.synchronize.Barrier, won: object) -> None:
    """Take the lock again and again; two who have it at once would meet at the file ``inside``."""
    gate.wait()
    held = 0
    for _ in range(rounds):
        with Sole(f"driver-{job}") as sole:
            if sole:
                held += 1
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                os.unlink(inside)
    won.put(held)  # type: ignore[attr-defined]


def test_two_drivers_never_have_the_lock_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    gate, won = context.Barrier(4), context.Queue()
    arguments = ("race", tmp_path / "inside", 3000, gate, won)
    racers = [context.Process(target=race, args=arguments) for _ in range(4)]
    for racer in racers:
        racer.start()
    held = [won.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0] * 4
    assert sum(held) > 0
    assert locks("race") == []


def test_who_loses_leaves_the_winners_lock_alone() -> None:
    with Sole("driver-j") as first:
        for _ in range(2):
            with Sole("driver-j") as second:
                assert (first, second) == (True, False)
            assert locks("j") == ["driver-j.lock"]
    assert locks("j") == []
    with Sole("driver-j") as again:
        assert again


def test_a_journal_has_one_writer() -> None:
    with FakeJob() as job:
        job.close()
        with journal.Writer(job.paths) as writer:
            size = job.paths.journal.stat().st_size
            with pytest.raises(JournalInUse, match="another driver writes"):
                journal.Writer(job.paths)
            assert job.paths.journal.stat().st_size == size and writer.seq > 0
        journal.Writer(job.paths).close()


def test_a_second_driver_whose_lock_file_was_lost_goes_away(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "Sole", lambda _name: contextlib.nullcontext(True))
    with FakeJob().running() as job:
        before = job.paths.journal.read_bytes()
        _drive(job.paths)
        assert job.paths.journal.read_bytes() == before
        assert "another driver writes" in capfd.readouterr().err


def test_a_file_system_without_locks_has_them_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with open(tmp_path / "file", "w") as file:
        assert files.lock(file.fileno())
