"""Files and blobs on a node without the driver's disk: nothing is taken that is not what its name says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jupyter_torchdist.node.shipping.replica import Incoming, continued, prepare, replica, replica_blobs, trust_replica
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


def test_a_blob_in_pieces(scratch: Path) -> None:
    incoming = Incoming()
    assert incoming.take(replica_blobs(scratch), DIGEST, 0, DATA[:4000], last=False) is None
    assert incoming.take(replica_blobs(scratch), DIGEST, 4000, DATA[4000:], last=True) is True
    blob = replica_blobs(scratch) / DIGEST
    assert blob.read_bytes() == DATA
    assert blob.stat().st_mode & 0o777 == 0o600
    assert list(replica_blobs(scratch).iterdir()) == [blob]


def test_a_blob_that_changed_on_its_way(scratch: Path) -> None:
    incoming = Incoming()
    assert incoming.take(replica_blobs(scratch), DIGEST, 0, DATA[:-1] + b"!", last=True) is False
    assert list(replica_blobs(scratch).iterdir()) == []
    assert incoming.take(replica_blobs(scratch), DIGEST, 0, DATA, last=True) is True


def test_two_drivers_send_the_same_blob_at_once(scratch: Path) -> None:
    one, other = Incoming(), Incoming()
    one.take(replica_blobs(scratch), DIGEST, 0, DATA[:100], last=False)
    other.take(replica_blobs(scratch), DIGEST, 0, DATA[:300], last=False)
    one.take(replica_blobs(scratch), DIGEST, 100, DATA[100:500], last=False)
    assert other.take(replica_blobs(scratch), DIGEST, 300, DATA[300:], last=True) is True
    assert one.take(replica_blobs(scratch), DIGEST, 500, DATA[500:], last=True) is True
    assert (replica_blobs(scratch) / DIGEST).read_bytes() == DATA


def test_a_driver_that_is_cut_off_leaves_no_part_behind(scratch: Path) -> None:
    incoming = Incoming()
    incoming.take(replica_blobs(scratch), DIGEST, 0, DATA[:100], last=False)
    assert len(list(replica_blobs(scratch).iterdir())) == 1
    incoming.close()
    assert list(replica_blobs(scratch).iterdir()) == []


def test_a_driver_that_begins_again(scratch: Path) -> None:
    incoming = Incoming()
    incoming.take(replica_blobs(scratch), DIGEST, 0, DATA[:100], last=False)
    assert incoming.take(replica_blobs(scratch), DIGEST, 0, DATA, last=True) is True


def test_a_piece_without_a_beginning(scratch: Path) -> None:
    with pytest.raises(KeyError):
        Incoming().take(replica_blobs(scratch), DIGEST, 100, DATA, last=True)


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "", ".hidden"])
def test_no_name_leads_out_of_the_directory(name: str, scratch: Path) -> None:
    with pytest.raises(ValueError):
        Incoming().take(replica_blobs(scratch), name, 0, b"x", last=False)
    with pytest.raises(ValueError):
        prepare(scratch, name, {}, [])
    with pytest.raises(ValueError):
        prepare(scratch, "j", {name: "x"}, [])
    with pytest.raises(ValueError):
        prepare(scratch, "j", {}, [name])
    assert {path.name for path in scratch.iterdir()} <= {"blobs", "jobs"}


def test_what_is_here_already_is_not_asked_for(scratch: Path) -> None:
    Incoming().take(replica_blobs(scratch), DIGEST, 0, DATA, last=True)
    assert prepare(scratch, "j", {"spec.json": "{}"}, [DIGEST, "ab" * 32]) == ["ab" * 32]
    assert replica(scratch, "j").spec.read_text() == "{}"
    assert replica(scratch, "j").root.stat().st_mode & 0o777 == 0o700


def test_blobs_that_were_hashed_here_are_not_hashed_again(scratch: Path) -> None:
    Incoming().take(replica_blobs(scratch), DIGEST, 0, DATA, last=True)
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
