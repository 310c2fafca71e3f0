"""How the ranks of a process group come together and part."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from jupyter_torchdist.protocol.errors import UserError
from jupyter_torchdist.protocol.plan import NodePlan
from jupyter_torchdist.ranks.group import Meeting, choose_device


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


def test_a_gpu_and_a_torch_that_is_built_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(device: Any) -> None:
        raise AttributeError("module 'torch._C' has no attribute '_cuda_setDevice'")

    monkeypatch.setattr(torch.cuda, "set_device", absent)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match=r"this rank has a GPU, and torch .* is built for CPUs"):
        choose_device(NodePlan("node0", (0,), ("GPU-0",)))
