"""Streams of a rank, each in a process of its own: they replace the process's descriptors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_torchdist.ranks.bootstrap import RankInterrupts
from jupyter_torchdist.ranks.streams.output import UNINTERRUPTIBLE

SET_UP = """
import os, sys, time, threading, signal, io
from pathlib import Path
from jupyter_torchdist.ranks.streams.flusher import Flusher
from jupyter_torchdist.ranks.streams.output import Output
folder = Path(sys.argv[1])
dropped = []
flusher = Flusher()
output = Output(folder / "out", folder / "err", flusher, dropped.append)
flusher.start()

def seen(name="out"):
    return (folder / name).read_bytes()

def wait_for(text, name="out"):
    end = time.monotonic() + 10
    while text not in seen(name):
        assert time.monotonic() < end, (text, seen(name))
        time.sleep(0.001)
"""
TEAR_DOWN = """
flusher.stop()
output.close()
"""


def run(folder: Path, body: str, *, tear_down: str = TEAR_DOWN, code: int = 0) -> tuple[bytes, bytes]:
    program = SET_UP + textwrap.dedent(body) + tear_down
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], timeout=60, capture_output=True, check=False, env={**os.environ}
    )
    err = (folder / "err").read_bytes()
    assert done.returncode == code, (done, err)
    return (folder / "out").read_bytes(), err


def test_an_isolated_line_is_there_at_once(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        for i in range(3):
            print("line", i)
            assert seen().endswith(b"line %d\\n" % i)
            while "write" not in vars(sys.stdout): time.sleep(0.001)
    """,
    )


def test_a_line_without_an_end_appears_by_itself(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        print("half", end="")
        wait_for(b"half")
        sys.stderr.write("other half")
        wait_for(b"other half", "err")
    """,
    )


def test_a_loop_of_prints_pays_nothing_and_is_whole(tmp_path: Path) -> None:
    out, _ = run(
        tmp_path,
        """
        for i in range(20000):
            print("step", i)
        assert type(sys.stdout) is io.TextIOWrapper
    """,
    )
    assert out == b"".join(b"step %d\n" % i for i in range(20000))


def test_the_quiet_mode_returns_after_a_burst(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        for _ in range(1000): print("x")
        while "write" not in vars(sys.stdout): time.sleep(0.001)
        print("later")
        assert seen().endswith(b"later\\n")
    """,
    )


def test_threads_do_not_lose_lines(tmp_path: Path) -> None:
    out, _ = run(
        tmp_path,
        """
        sys.setswitchinterval(1e-5)
        def work(n):
            for i in range(5000):
                print(n, i)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
    """,
    )
    # Lines may be mixed, as ``print`` writes the end of a line by itself; nothing of them is lost.
    assert sorted(out) == sorted(b"".join(f"{n} {i}\n".encode() for n in range(4) for i in range(5000)))


def test_sigkill_loses_only_the_last_milliseconds(tmp_path: Path) -> None:
    out, _ = run(
        tmp_path,
        """
        for i in range(100): print("early", i)
        wait_for(b"early 99")
        os.kill(os.getpid(), signal.SIGKILL)
    """,
        code=-9,
    )
    assert out.count(b"\n") == 100


def test_c_stdout_lands_in_the_file_line_by_line(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import ctypes
        ctypes.CDLL(None).puts(b"from C")
        assert b"from C" in seen()
        os.system("echo from a child")
        assert b"from a child" in seen()
    """,
    )


def test_text_that_has_no_utf8_form(tmp_path: Path) -> None:
    out, _ = run(tmp_path, "print('lone \\udcff surrogate'); sys.stdout.buffer.write(b'\\xff raw')")
    assert out == b"lone \\udcff surrogate\n\xff raw"


def test_user_code_may_close_or_replace_the_streams(tmp_path: Path) -> None:
    out, err = run(
        tmp_path,
        """
        import contextlib
        with contextlib.redirect_stdout(io.StringIO()) as text:
            print("elsewhere")
        print("here")
        sys.stdout.close()
        time.sleep(0.02)
        sys.stderr = None
        time.sleep(0.02)
    """,
    )
    assert (out, err) == (b"here\n", b"")


def test_user_code_may_close_the_descriptor(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        os.close(1)
        print("lost")
        print("lost, too")
        end = time.monotonic() + 10
        while output.out.raw.dropped < 2:
            assert time.monotonic() < end, output.out.raw.dropped
            time.sleep(0.001)
    """,
        tear_down="\nflusher.stop(); output.close()\nassert sum(dropped) == 2, dropped",
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_drops_lines_and_says_so_when_there_is_space_again(tmp_path: Path) -> None:
    out, _ = run(
        tmp_path,
        """
        print("before")
        good = os.dup(1)
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        for i in range(5000): print("dropped", i)
        time.sleep(0.05)
        os.dup2(good, 1)
        print("after")
        while not dropped: time.sleep(0.001)
        assert sum(dropped) == 5000, dropped
    """,
    )
    assert out == b"before\n\nafter\n"


def test_a_forked_child_flushes_its_lines_and_repeats_none(tmp_path: Path) -> None:
    out, _ = run(
        tmp_path,
        """
        for i in range(100): print("parent", i)
        sys.stdout.write("unfinished ")
        pid = os.fork()
        if pid == 0:
            print("child")
            os._exit(0)
        os.waitpid(pid, 0)
    """,
    )
    assert out.count(b"unfinished") == 1
    assert out.count(b"child\n") == 1
    assert out.count(b"parent") == 100


def test_no_child_is_forked_in_the_middle_of_a_flush(tmp_path: Path) -> None:
    out, _ = run(
        tmp_path,
        """
        for i in range(200):
            print("parent", i)
            time.sleep(0.003 + i % 20 * 1e-4)
            pid = os.fork()
            if pid == 0:
                print("child", i)
                os._exit(0)
            os.waitpid(pid, 0)
    """,
    )
    assert out == b"".join(b"parent %d\nchild %d\n" % (i, i) for i in range(200))


def test_stdin_is_empty(tmp_path: Path) -> None:
    run(tmp_path, "assert sys.stdin.read() == ''")


def test_an_interrupt_in_the_middle_of_a_write_is_heard_when_it_is_sent_again() -> None:
    """Until then the main thread may begin to wait in a collective, where it hears nothing."""

    class Sources:
        def add(self, source: object) -> None: ...

        def wake(self) -> None: ...

    before = signal.getsignal(signal.SIGINT)
    try:
        interrupts = RankInterrupts(Sources())  # type: ignore[arg-type]
        interrupts._on_signal(signal.SIGINT, SimpleNamespace(f_code=UNINTERRUPTIBLE))  # type: ignore[arg-type]
        assert interrupts.received is not None and not interrupts.heard
        with pytest.raises(KeyboardInterrupt):
            interrupts.flush()
        assert interrupts.heard
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_in_the_middle_of_a_write_repeats_nothing(tmp_path: Path) -> None:
    out, _ = run(
        tmp_path,
        """
        from jupyter_torchdist.ranks.bootstrap import RankInterrupts
        interrupts = RankInterrupts(flusher)
        def later():
            wait_for(b"line 2000\\n")
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=later).start()
        last = 0
        try:
            while True:
                last += 1
                sys.stdout.write(f"line {last}\\n")
        except KeyboardInterrupt:
            assert interrupts.received is not None
    """,
    )
    numbers = [int(line.split()[1]) for line in out.splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
