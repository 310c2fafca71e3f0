"""Files that were changed, lost or cut short are refused in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_torchdist.marshal import mapping
from jupyter_torchdist.protocol.errors import DamagedJob, RankFailed
from tests import crossing
from tests.crossing import Notebook

ranks, notebook = crossing.ranks, crossing.notebook


@pytest.fixture
def bundle(notebook: Notebook) -> Notebook:
    notebook.cell("import numpy as np\ndata = np.arange(100_000)\nkept = []")
    notebook.send("total = int(data.sum())\nbig = np.ones(100_000)")
    return notebook


def _rank_fails(notebook: Notebook) -> str:
    with pytest.raises(AssertionError) as caught:
        notebook.again("")
    return str(caught.value)


def test_a_flipped_bit_is_found_by_the_digest(bundle: Notebook) -> None:
    assert bundle.manifest
    path = bundle.home / "blobs" / bundle.manifest.buffers[0].digest
    content = bytearray(path.read_bytes())
    content[1000] ^= 4
    path.chmod(0o600)
    path.write_bytes(content)
    text = _rank_fails(bundle)
    assert "DamagedJob" in text
    assert path.name in text
    assert "digest" in text


def test_a_missing_blob_is_named(bundle: Notebook) -> None:
    assert bundle.manifest
    path = bundle.home / "blobs" / bundle.manifest.stream.digest
    path.unlink()
    text = _rank_fails(bundle)
    assert "DamagedJob" in text
    assert f"{path} is missing" in text


def test_a_file_as_its_writer_left_it_is_not_hashed(bundle: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bundle.manifest
    calls: list[Path] = []
    monkeypatch.setattr(mapping, "digest_of", lambda path: str(calls.append(path)))  # type: ignore[func-returns-value]
    blob = bundle.manifest.buffers[0]
    assert mapping.check_blob(blob, bundle.home / "blobs").name == blob.digest
    assert not calls
    os.utime(bundle.home / "blobs" / blob.digest)
    with pytest.raises(DamagedJob):
        mapping.check_blob(blob, bundle.home / "blobs")
    assert calls


@pytest.mark.parametrize("keep", [0, 1, 10, 60])
def test_results_cut_short_are_refused(bundle: Notebook, keep: int) -> None:
    path = bundle.paths.result(0)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedJob) as caught:
        bundle.bring(bundle.captured)
    assert caught.value.hint
    assert bundle.names["kept"] == []


def test_results_that_are_not_there(bundle: Notebook) -> None:
    with pytest.raises(DamagedJob, match="no results of rank 3"):
        bundle.bring(bundle.captured, rank=3)


def test_a_buffer_that_is_missing_or_short(bundle: Notebook) -> None:
    path = bundle.paths.result_buffer(0, 0)
    path.write_bytes(path.read_bytes()[:-8])
    found = bundle.bring(bundle.captured)
    assert "total" in found and found.unread[0][0] == "big"
    path.unlink()
    with pytest.raises(DamagedJob, match="no results"):
        bundle.bring(bundle.captured)


def test_results_need_the_manifest_in_another_kernel(bundle: Notebook) -> None:
    bundle.paths.manifest.write_text("{")
    with pytest.raises(DamagedJob, match="manifest"):
        bundle.bring(None)


ODD = """
class Odd:
    def __init__(self, *parts): self.parts = parts
    def __reduce__(self): return rebuild, self.parts
def rebuild(*parts):
    if "rank" not in globals():
        raise ValueError("only on a rank")
    return Odd(*parts)
"""


def test_one_value_that_cannot_be_rebuilt_leaves_the_others(notebook: Notebook) -> None:
    notebook.cell(f"import numpy as np\n{ODD}\nkept, held = [1], [2]")
    found = notebook.bring(
        notebook.send(
            "globals()['rank'] = 0\nfirst = np.ones(100_000)\nshared = [3]\n"
            "odd = Odd(shared, np.zeros(100_000))\nafter = [shared]\nlast = np.full(100_000, 7.0)\n"
            "kept.append('here')\nheld.append(odd)\ndel globals()['rank']"
        )
    )
    assert found["first"].sum() == 100_000 and found["last"].sum() == 700_000
    assert "odd" not in found and notebook.names["kept"] == [1, "here"]
    reasons = dict(found.unread)
    assert reasons["odd"] == "it cannot be rebuilt here: ValueError: only on a rank"
    if "after" not in found:  # the list was written within ``odd``
        assert reasons["after"] == "it shares an object with odd, which cannot be rebuilt here"
    assert notebook.names["held"] == [2]
    assert any(note.startswith("an object of the notebook is as before the cell") for note in found.notes)


def test_no_value_that_can_be_rebuilt_is_an_error(notebook: Notebook) -> None:
    notebook.cell(ODD)
    notebook.send("globals()['rank'] = 0\nodd = Odd()\ndel globals()['rank']")
    with pytest.raises(RankFailed, match="odd of rank 0: it cannot be rebuilt here: ValueError: only on a rank"):
        notebook.bring(notebook.captured)
