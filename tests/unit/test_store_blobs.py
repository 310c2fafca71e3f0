"""Blobs: by content, once, in bounded memory, and what a disk can refuse in words."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.errors import DamagedJob, StoreError
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.store import blobs, files
from jupyter_torchdist.store.blobs import BlobStore


@pytest.fixture
def place(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_a_blob_is_named_by_its_content_and_private(place: Home) -> None:
    blob = BlobStore(place).put(b"content")
    path = place.blob(blob.digest)
    assert blob.digest == hashlib.sha256(b"content").hexdigest()
    assert path.read_bytes() == b"content"
    assert path.stat().st_mode & 0o777 == 0o600
    assert place.blobs.stat().st_mode & 0o777 == 0o700
    assert blob.record == blobs.record_of(path.stat())


def test_what_is_there_is_neither_written_nor_touched(place: Home) -> None:
    store = BlobStore(place)
    first = store.put(b"x" * 5_000_000)
    inode = place.blob(first.digest).stat().st_ino
    again = [store.put(memoryview(bytearray(b"x" * 5_000_000))), BlobStore(place).put(b"x" * 5_000_000)]
    assert again == [first, first]
    assert store.written == 5_000_000
    assert place.blob(first.digest).stat().st_ino == inode
    assert len(list(place.blobs.iterdir())) == 1


def test_any_contiguous_buffer_goes(place: Home) -> None:
    import array

    numbers = array.array("d", [1.0, 2.0])
    blob = BlobStore(place).put(memoryview(numbers))
    assert place.blob(blob.digest).read_bytes() == numbers.tobytes()
    assert BlobStore(place).put(b"").size == 0


def test_a_changed_file_is_replaced_when_its_content_comes_again(place: Home) -> None:
    store = BlobStore(place)
    blob = store.put(b"right content")
    place.blob(blob.digest).write_bytes(b"wrong content")
    assert store.put(b"right content").record != blob.record
    assert place.blob(blob.digest).read_bytes() == b"right content"
    place.blob(blob.digest).write_bytes(b"short")
    BlobStore(place).put(b"right content")
    assert place.blob(blob.digest).read_bytes() == b"right content"


def test_verify_trusts_the_record_and_refuses_damage(place: Home) -> None:
    store = BlobStore(place)
    blob = store.put(b"0" * 1000)
    path = place.blob(blob.digest)
    assert BlobStore(place).verify(blob) == path
    os.utime(path)
    assert BlobStore(place).verify(blob) == path  # another record, the same content
    flipped = bytearray(path.read_bytes())
    flipped[500] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(DamagedJob, match="changed since it was written"):
        store.verify(blob)
    path.write_bytes(b"0")
    with pytest.raises(DamagedJob, match="1 bytes instead of 1000"):
        store.verify(blob)
    path.unlink()
    with pytest.raises(DamagedJob, match="is missing") as caught:
        store.verify(blob)
    assert blob.digest in str(caught.value)
    assert caught.value.hint


def test_a_full_disk_says_how_much_and_where(place: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_space", lambda directory: 1000)
    with pytest.raises(StoreError, match=r"full: 2\.0 MB needed, 1\.0 kB free") as caught:
        BlobStore(place).put(b"x" * 2_000_000)
    assert str(place.blobs) in str(caught.value)
    assert "TORCHDIST_HOME" in caught.value.hint
    assert list(place.blobs.iterdir()) == []


def test_a_disk_that_fills_while_writing_leaves_nothing(place: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: memoryview) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StoreError, match="is full"):
        BlobStore(place).put(b"x")
    assert list(place.blobs.iterdir()) == []


def test_a_read_only_directory_is_named(place: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(StoreError, match="Read-only file system") as caught:
        BlobStore(place).put(b"x")
    assert str(place.blobs) in caught.value.message
    assert "TORCHDIST_HOME" in caught.value.hint


def test_a_file_where_the_directory_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    with pytest.raises(StoreError) as caught:
        BlobStore(Home(tmp_path / "home")).put(b"x")
    assert str(tmp_path / "home") in caught.value.message


def test_sizes_in_words() -> None:
    assert [files.in_bytes(size) for size in (0, 999, 1000, 123_456_789, 3e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "123.5 MB",
        "3.0 TB",
    ]


def test_large_data_is_written_while_it_is_hashed_and_only_once(place: Home) -> None:
    store = BlobStore(place)
    first, second = bytes(2 * 2**20), b"\1" * (2 * 2**20)  # of one size: the second is hashed before it is written
    stored = [store.put(data) for data in (first, second, first, bytearray(second))]
    assert [blob.digest for blob in stored] == [hashlib.sha256(data).hexdigest() for data in (first, second) * 2]
    assert store.written == 4 * 2**20
    assert store.verify(stored[0]).read_bytes() == first
    assert store.verify(stored[1]).read_bytes() == second
    assert not list(place.blobs.glob(".*"))
