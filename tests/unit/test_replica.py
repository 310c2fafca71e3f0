"""Files and blobs on a node without the driver's disk: nothing is taken that is not what its name says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jupyter_torchdist.node.replica import Incoming, prepare, replica, replica_blobs, trust_replica
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.bundle import Blob, Manifest

DATA = b"0123456789" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHDIST_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def test_a_blob_in_pieces() -> None:
    incoming = Incoming()
    assert incoming.take(DIGEST, 0, DATA[:4000], last=False) is None
    assert incoming.take(DIGEST, 4000, DATA[4000:], last=True) is True
    blob = replica_blobs() / DIGEST
    assert blob.read_bytes() == DATA
    assert blob.stat().st_mode & 0o777 == 0o600
    assert list(replica_blobs().iterdir()) == [blob]


def test_a_blob_that_changed_on_its_way() -> None:
    incoming = Incoming()
    assert incoming.take(DIGEST, 0, DATA[:-1] + b"!", last=True) is False
    assert list(replica_blobs().iterdir()) == []
    assert incoming.take(DIGEST, 0, DATA, last=True) is True


def test_two_drivers_send_the_same_blob_at_once() -> None:
    one, other = Incoming(), Incoming()
    one.take(DIGEST, 0, DATA[:100], last=False)
    other.take(DIGEST, 0, DATA[:300], last=False)
    one.take(DIGEST, 100, DATA[100:500], last=False)
    assert other.take(DIGEST, 300, DATA[300:], last=True) is True
    assert one.take(DIGEST, 500, DATA[500:], last=True) is True
    assert (replica_blobs() / DIGEST).read_bytes() == DATA


def test_a_driver_that_is_cut_off_leaves_no_part_behind() -> None:
    incoming = Incoming()
    incoming.take(DIGEST, 0, DATA[:100], last=False)
    assert len(list(replica_blobs().iterdir())) == 1
    incoming.close()
    assert list(replica_blobs().iterdir()) == []


def test_a_driver_that_begins_again() -> None:
    incoming = Incoming()
    incoming.take(DIGEST, 0, DATA[:100], last=False)
    assert incoming.take(DIGEST, 0, DATA, last=True) is True


def test_a_piece_without_a_beginning() -> None:
    with pytest.raises(KeyError):
        Incoming().take(DIGEST, 100, DATA, last=True)


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "", ".hidden"])
def test_no_name_leads_out_of_the_directory(name: str, scratch: Path) -> None:
    with pytest.raises(ValueError):
        Incoming().take(name, 0, b"x", last=False)
    with pytest.raises(ValueError):
        prepare(name, {}, [])
    with pytest.raises(ValueError):
        prepare("j", {name: "x"}, [])
    with pytest.raises(ValueError):
        prepare("j", {}, [name])
    assert {path.name for path in scratch.iterdir()} <= {"blobs", "jobs"}


def test_what_is_here_already_is_not_asked_for() -> None:
    Incoming().take(DIGEST, 0, DATA, last=True)
    assert prepare("j", {"spec.json": "{}"}, [DIGEST, "ab" * 32]) == ["ab" * 32]
    assert replica("j").spec.read_text() == "{}"
    assert replica("j").root.stat().st_mode & 0o777 == 0o700


def test_blobs_that_were_hashed_here_are_not_hashed_again() -> None:
    Incoming().take(DIGEST, 0, DATA, last=True)
    blob = Blob(DIGEST, len(DATA))
    manifest = Manifest("j", "3", blob, (blob,), (), (), blob)
    prepare("j", {"manifest.json": codec.dumps(manifest.to_json())}, [])
    trust_replica(replica("j"))
    trusted = Manifest.from_json(codec.loads(replica("j").manifest.read_bytes()))
    status = (replica_blobs() / DIGEST).stat()
    assert {b.record for b in trusted.blobs} == {
        (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    }


def test_a_blob_that_never_came_is_said(tmp_path: Path) -> None:
    del tmp_path
    blob = Blob("ab" * 32, 1)
    prepare("j", {"manifest.json": codec.dumps(Manifest("j", "3", blob, (), (), (), blob).to_json())}, [])
    with pytest.raises(FileNotFoundError):
        trust_replica(replica("j"))
