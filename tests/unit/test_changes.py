"""The system tells of writes to the files that are watched, and of no others."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from jupyter_torchdist.node.file_watch import Changes


def told(changes: Changes) -> bool:
    found = bool(select.select([changes.fd], [], [], 0.5)[0])
    changes.drain()
    return found


def test_a_write_is_told_and_what_is_not_watched_is_not(tmp_path: Path) -> None:
    first, second, log = tmp_path / "a.events", tmp_path / "b.events", tmp_path / "a.out"
    first.touch()
    log.touch()
    changes = Changes()
    assert not changes.watch("job", tmp_path, [first, second])  # one is not there yet
    second.touch()
    assert told(changes)
    assert changes.watch("job", tmp_path, [first, second])
    for path in (first, second):
        with path.open("a") as file:
            file.write("x")
        assert told(changes), path
    with log.open("a") as file:
        file.write("x")
    assert not told(changes)
    changes.forget("job")
    changes.drain()  # that the watches are gone is told too
    first.write_text("y")
    assert not told(changes)
    changes.close()


def test_without_inotify_nothing_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = Changes()
    changes.close()
    assert not changes.watch("job", tmp_path, [])
