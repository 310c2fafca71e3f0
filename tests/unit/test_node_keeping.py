"""What a node keeps of earlier jobs, and what it deletes first."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path

import pytest

from jupyter_torchdist.node.shipping import keeping
from jupyter_torchdist.node.shipping.keeping import DAY, KEPT_DAYS, sweep, use
from jupyter_torchdist.node.shipping.replica import replica, replica_blobs
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.store.blobs import BlobStore
from jupyter_torchdist.testing import a_manifest

SIZE = 1_000_000


def blob(scratch: Path, number: int, days: float) -> str:
    """That was used so many days ago."""
    data = bytes([number]) * SIZE
    name = hashlib.sha256(data).hexdigest()
    path = replica_blobs(scratch) / name
    path.write_bytes(data)
    age(path, days)
    return name


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def names(scratch: Path) -> set[str]:
    return {path.name for path in replica_blobs(scratch).iterdir()}


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two blobs and a half may be kept."""
    monkeypatch.setattr(keeping, "FREE", 0.0)
    monkeypatch.setattr(keeping, "SHARE", 2.5 * SIZE / shutil.disk_usage(tmp_path).total)
    return 2


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path, room: int) -> None:
    old, older, new = blob(tmp_path, 1, 2), blob(tmp_path, 2, 3), blob(tmp_path, 3, 0)
    sweep(tmp_path, ())
    assert names(tmp_path) == {old, new}
    sweep(tmp_path, ())
    assert names(tmp_path) == {old, new}, "they have room"
    blob(tmp_path, 2, 3)
    use(replica_blobs(tmp_path) / older)
    sweep(tmp_path, ())
    assert names(tmp_path) == {older, new}


def test_what_a_job_needs_stays(tmp_path: Path, room: int) -> None:
    one, other, third = blob(tmp_path, 1, 3), blob(tmp_path, 2, 2), blob(tmp_path, 3, 1)
    manifest = a_manifest(BlobStore(Home(tmp_path / "store")), "j")
    value = manifest.to_json()
    value["stream"]["digest"] = other
    replica(tmp_path, "j").manifest.write_bytes(codec.dumps(value).encode())
    sweep(tmp_path, [one])
    assert names(tmp_path) == {one, other}
    blob(tmp_path, 3, 1)
    (replica(tmp_path, "k").manifest).write_bytes(b"{")
    sweep(tmp_path, [one, third])
    assert names(tmp_path) == {one, other, third}, "more than there is room for"


def test_a_part_of_an_agent_that_was_killed(tmp_path: Path) -> None:
    for name, days in ((".old", 2), (".new", 0)):
        path = replica_blobs(tmp_path) / name
        path.touch()
        age(path, days)
    sweep(tmp_path, ())
    assert names(tmp_path) == {".new"}


@pytest.mark.parametrize("days", [KEPT_DAYS - 1, KEPT_DAYS + 1])
def test_logs_that_nobody_fetched(tmp_path: Path, days: int) -> None:
    paths = replica(tmp_path, "j")
    log = paths.node("node0").out(0)
    log.parent.mkdir()
    log.write_text("epoch 1")
    paths.work.mkdir()
    (paths.work / "model.pt").write_text("weights")
    for path in (log, log.parent, paths.nodes, paths.results, paths.work, paths.root):
        age(path, days)
    sweep(tmp_path, ())
    assert log.exists() == (days < KEPT_DAYS)
    assert (paths.work / "model.pt").exists(), "what the cell wrote is never deleted"
    sweep(tmp_path, ())


def test_a_node_on_which_nothing_was(tmp_path: Path) -> None:
    sweep(tmp_path / "none", ())
