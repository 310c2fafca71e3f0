"""The file of a rank's recorder, when its code ends while another thread writes it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.diagnosis import dumps
from jupyter_torchdist.protocol.paths import NodePaths
from jupyter_torchdist.ranks.streams import flight, recording


def test_a_thread_that_writes_tells_of_an_end_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the main thread does not wait for it: without the end, nobody would see who waits."""
    reading, ended = threading.Event(), threading.Event()

    def slow() -> list[dict[str, Any]]:
        reading.set()
        assert ended.wait(60)
        return []

    monkeypatch.setattr(flight, "dumps", slow)
    monkeypatch.setattr(flight, "groups", dict)
    monkeypatch.setattr(recording, "PATIENCE", 0.01)
    files = NodePaths(tmp_path)
    recorder = recording.Recording(files, 0)
    thread = threading.Thread(target=recorder.write)
    thread.start()
    assert reading.wait(60)
    recorder.write("failed", "Cell In[3], line 6")
    ended.set()
    thread.join()
    assert dumps.read("rank-0", files.recorder(0).read_bytes()).end == dumps.FAILED
    recorder.write()
    first, second = files.recorder(0).read_bytes().splitlines()
    assert first == second, "nothing is new after the end"
