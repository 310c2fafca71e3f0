"""Files and blobs on a node without the driver's disk: nothing is taken that is not what its name says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jupyter_torchdist.node.shipping.replica import continued, prepare, replica, replica_blobs, trust_replica
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.bundle import Blob, Manifest
from jupyter_torchdist.protocol.eventreader import reader_of
from jupyter_torchdist.protocol.events import Event

DATA = b"0123456789" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHDIST_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def test_a_node_that_knows_nothing_of_an_earlier_attempt_goes_on_after_it(scratch: Path) -> None:
    paths = replica(scratch, "job")
    files = paths.node("node0")
    files.root.mkdir()
    files.err(0).write_text("longer than there")
    has = {"nodes/node0/rank-00000.events": 100, "nodes/node0/rank-00000.err": 3}
    replaced = {"nodes/node0/rank-00000.recorder": 50, "results/0.result": 7, "work/node1/table.csv": 9}
    assert continued(paths, "node0", {**has, **replaced}) == has, "what is replaced is sent from its beginning"
    with files.rank_events(0).open("ab") as events:
        assert events.tell() == 100
        events.write(Event("rank.ready", 1.0, rank=0).to_line())
    reader = reader_of(files, [0], "rank-00000.events")
    assert reader is not None and [event.kind for event in reader.read()] == ["rank.ready"]
    assert files.err(0).read_text() == "longer than there"
    assert not files.out(0).exists()


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "", ".hidden"])
def test_no_name_leads_out_of_the_directory(name: str, scratch: Path) -> None:
    with pytest.raises(ValueError):
        prepare(scratch, name, {}, [])
    with pytest.raises(ValueError):
        prepare(scratch, "j", {name: "x"}, [])
    with pytest.raises(ValueError):
        prepare(scratch, "j", {}, [name])
    assert {path.name for path in scratch.iterdir()} <= {"blobs", "jobs"}


def test_what_is_here_already_is_not_asked_for(scratch: Path) -> None:
    (replica_blobs(scratch) / DIGEST).write_bytes(DATA)
    assert prepare(scratch, "j", {"spec.json": "{}"}, [DIGEST, "ab" * 32]) == ["ab" * 32]
    assert replica(scratch, "j").spec.read_text() == "{}"
    assert replica(scratch, "j").root.stat().st_mode & 0o777 == 0o700


def test_blobs_that_were_hashed_here_are_not_hashed_again(scratch: Path) -> None:
    (replica_blobs(scratch) / DIGEST).write_bytes(DATA)
    blob = Blob(DIGEST, len(DATA))
    manifest = Manifest("j", "3", blob, (blob,), (), (), blob)
    prepare(scratch, "j", {"manifest.json": codec.dumps(manifest.to_json())}, [])
    trust_replica(replica(scratch, "j"), replica_blobs(scratch))
    trusted = Manifest.from_json(codec.loads(replica(scratch, "j").manifest.read_bytes()))
    status = (replica_blobs(scratch) / DIGEST).stat()
    assert {b.record for b in trusted.blobs} == {
        (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    }


def test_a_blob_that_never_came_is_said(tmp_path: Path, scratch: Path) -> None:
    del tmp_path
    blob = Blob("ab" * 32, 1)
    prepare(scratch, "j", {"manifest.json": codec.dumps(Manifest("j", "3", blob, (), (), (), blob).to_json())}, [])
    with pytest.raises(FileNotFoundError):
        trust_replica(replica(scratch, "j"), replica_blobs(scratch))
