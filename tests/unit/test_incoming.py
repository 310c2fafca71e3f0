"""Blobs that come in pieces: what is cut off is gone on with, and nothing gets a name that it does not deserve."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.node.shipping import incoming as module
from jupyter_torchdist.node.shipping.incoming import Incoming

DATA = b"0123456789" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def blobs(tmp_path: Path) -> Path:
    return tmp_path


def test_a_blob_in_pieces(blobs: Path) -> None:
    incoming = Incoming(blobs)
    incoming.take(DIGEST, 0, DATA[:4000], last=False)
    assert incoming.turn() == []
    incoming.take(DIGEST, 4000, DATA[4000:], last=True)
    assert incoming.turn() == [(DIGEST, True)]
    blob = blobs / DIGEST
    assert blob.read_bytes() == DATA
    assert blob.stat().st_mode & 0o777 == 0o600
    assert list(blobs.iterdir()) == [blob]


def test_an_empty_blob(blobs: Path) -> None:
    incoming, digest = Incoming(blobs), hashlib.sha256(b"").hexdigest()
    incoming.take(digest, 0, b"", last=True)
    assert incoming.turn() == [(digest, True)]
    assert (blobs / digest).read_bytes() == b""


def test_a_blob_that_changed_on_its_way(blobs: Path) -> None:
    incoming = Incoming(blobs)
    incoming.take(DIGEST, 0, DATA[:-1] + b"!", last=True)
    assert incoming.turn() == [(DIGEST, False)]
    assert list(blobs.iterdir()) == []
    incoming.take(DIGEST, 0, DATA, last=True)
    assert incoming.turn() == [(DIGEST, True)]


def test_two_senders_of_one_blob(blobs: Path) -> None:
    incoming = Incoming(blobs)
    incoming.take(DIGEST, 0, DATA[:100], last=False)
    incoming.take(DIGEST, 0, DATA[:300], last=False)
    incoming.take(DIGEST, 100, DATA[100:200], last=False)
    incoming.take(DIGEST, 300, DATA[300:], last=True)
    incoming.take(DIGEST, 200, DATA[200:], last=True)
    assert incoming.turn() == [(DIGEST, True)]
    incoming.take(DIGEST, 9000, DATA[9000:], last=True)
    assert incoming.turn() == [(DIGEST, True)], "who is late hears that it is there"
    assert (blobs / DIGEST).read_bytes() == DATA


@pytest.mark.parametrize("hashed", [module.HASHED, 1000])
def test_what_was_cut_off_is_gone_on_with(hashed: int, blobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HASHED", hashed)
    Incoming(blobs).take(DIGEST, 0, DATA[:7000], last=False)
    later = Incoming(blobs)  # of the next agent
    assert later.have(DIGEST) == 7000
    later.take(DIGEST, 7000, DATA[7000:], last=True)
    turns = 1
    while not (ended := later.turn()):
        turns += 1
    assert ended == [(DIGEST, True)]
    assert turns == max(1, len(DATA) // hashed)
    assert (blobs / DIGEST).read_bytes() == DATA


def test_what_was_cut_off_and_is_damaged(blobs: Path) -> None:
    (blobs / f".{DIGEST}").write_bytes(b"x" * 7000)
    incoming = Incoming(blobs)
    incoming.take(DIGEST, incoming.have(DIGEST), DATA[7000:], last=True)
    assert incoming.turn() == [(DIGEST, False)]
    assert incoming.have(DIGEST) == 0


def test_a_piece_after_a_gap_counts_for_nothing(blobs: Path) -> None:
    incoming = Incoming(blobs)
    incoming.take(DIGEST, 100, DATA[100:200], last=False)
    assert incoming.turn() == []
    incoming.take(DIGEST, 200, DATA[200:], last=True)
    assert incoming.turn() == [(DIGEST, False)], "it must come once more, from its beginning"
    assert list(blobs.iterdir()) == []


def test_two_nodes_that_share_the_directory(blobs: Path) -> None:
    one, other = Incoming(blobs), Incoming(blobs)
    one.take(DIGEST, 0, DATA[:5000], last=False)
    assert other.have(DIGEST) == 5000
    other.take(DIGEST, 5000, DATA[5000:8000], last=False)
    one.take(DIGEST, 5000, DATA[5000:], last=True)
    assert one.turn() == [(DIGEST, True)]
    other.take(DIGEST, 8000, DATA[8000:], last=True)
    assert other.turn() == [(DIGEST, True)]
    assert [path.name for path in blobs.iterdir()] == [DIGEST]


def test_a_part_that_another_node_found_damaged(blobs: Path) -> None:
    incoming = Incoming(blobs)
    incoming.take(DIGEST, 0, DATA[:5000], last=False)
    (blobs / f".{DIGEST}").unlink()
    incoming.take(DIGEST, 5000, DATA[5000:], last=True)
    assert incoming.turn() == [(DIGEST, False)]


def test_a_full_disk_keeps_nothing(blobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    incoming, real = Incoming(blobs), os.pwrite
    incoming.take(DIGEST, 0, DATA[:5000], last=False)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=DIGEST) as raised:
        incoming.take(DIGEST, 5000, DATA[5000:], last=False)
    assert raised.value.errno == errno.ENOSPC
    assert list(blobs.iterdir()) == []
    monkeypatch.setattr(os, "pwrite", real)
    incoming.take(DIGEST, 0, DATA, last=True)
    assert incoming.turn() == [(DIGEST, True)]


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "", ".hidden"])
def test_no_name_leads_out_of_the_directory(name: str, blobs: Path) -> None:
    with pytest.raises(ValueError, match="cannot name a file"):
        Incoming(blobs).take(name, 0, b"x", last=False)
    assert list(blobs.iterdir()) == []
