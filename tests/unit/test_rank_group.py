"""How the ranks of a process group come together and part."""

from __future__ import annotations

import threading

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from jupyter_torchdist.ranks.group import Meeting


def test_nobody_leaves_before_the_last_has_joined() -> None:
    store, gone = HashStore(), threading.Event()
    first = Meeting(store, 2)

    def leave() -> None:
        first.wait()
        gone.set()

    leaving = threading.Thread(target=leave)
    leaving.start()
    assert not gone.wait(0.1)
    Meeting(store, 2).wait()
    leaving.join(10)
    assert gone.is_set()


def test_a_store_that_is_gone_holds_nobody_up() -> None:
    here = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    meeting = Meeting(TCPStore("127.0.0.1", here.port, None), 2)
    del here
    meeting.wait()
