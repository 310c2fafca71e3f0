"""What the launcher puts in the place of the engine's own parts."""

from __future__ import annotations

import os
import signal

from jupyter_torchdist.runtime.launcher import _AllReturned


def sleeper(event: _AllReturned) -> int:
    pid = os.fork()
    if pid == 0:
        event.wait()
        os._exit(0)
    return pid


def test_a_rank_that_was_killed_while_it_waited_for_the_others_holds_up_nobody() -> None:
    """multiprocessing's own event waits for ever for a sleeper that was killed."""
    event = _AllReturned()
    killed, others = sleeper(event), [sleeper(event), sleeper(event)]
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    event.set()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others] == [0, 0]
    os.close(event._read)
    os.close(event._write)
