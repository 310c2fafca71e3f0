"""What a cell wrote on a host: what goes to the notebook, what stays, and what is deleted afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_torchdist.driver.copies import Copies
from jupyter_torchdist.driver.crossing import Arriving
from jupyter_torchdist.node.shipping import replica as module
from jupyter_torchdist.node.shipping.replica import written
from jupyter_torchdist.protocol.hosts import bytes_of, parse_setting
from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.protocol.plan import NodePlan


def fill(work: Path) -> None:
    (work / "deep" / "er").mkdir(parents=True)
    (work / "deep" / "er" / "small.txt").write_text("12")
    (work / "large.bin").write_bytes(bytes(5000))
    (work / "empty").touch()


def test_files_that_came_are_told_with_the_name_that_an_engine_gave_the_node_since(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path / "jobs" / "j")
    (paths.work / "node0").mkdir(parents=True)
    (paths.work / "node0" / "made.txt").touch()
    copies = Copies(paths, NodePlan("node0", (0,)), Arriving(paths, wanted=False))
    assert copies.of_the_cell("gpu7") == f"files that the cell wrote on gpu7 are in {paths.work / 'node0'}: made.txt"


def test_small_files_go_first_up_to_the_limit(tmp_path: Path) -> None:
    fill(tmp_path)
    found = written(tmp_path, 1000)
    assert found.going == {"empty": 0, "deep/er/small.txt": 2}
    assert found.staying == {"large.bin": 5000}
    told = found.told("gpu1", 1_000_000)
    assert told.startswith(f"files that the cell wrote stay on gpu1 in {tmp_path}: large.bin (0.0 MB); ")
    assert "bring=SIZE says how much comes back (1 MB)" in told


def test_nothing_goes_from_a_node_that_shares_the_disk(tmp_path: Path) -> None:
    fill(tmp_path)
    assert written(tmp_path, -1).going == {}


def test_no_more_files_than_a_job_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    monkeypatch.setattr(module, "MOST", 1)
    found = written(tmp_path, 10_000)
    assert (list(found.going), list(found.staying)) == (["empty"], ["deep/er/small.txt", "large.bin"])


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    work = tmp_path / "work"
    work.mkdir()
    os.symlink(tmp_path, work / "folder")
    os.symlink(tmp_path / "secret", work / "link")
    os.mkfifo(work / "pipe")
    found = written(work, 10_000)
    assert found.going == {}
    assert set(found.staying) == {"folder", "link", "pipe"}


def test_only_what_came_is_deleted(tmp_path: Path) -> None:
    work = tmp_path / "work"
    fill(work)
    found = written(work, 1000)
    (work / "empty").write_text("written since")
    found.discard()
    assert sorted(file.name for file in work.rglob("*")) == ["empty", "large.bin"]
    for file in work.iterdir():
        file.unlink()
    found.discard()
    assert not work.exists()


def test_there_need_be_no_directory(tmp_path: Path) -> None:
    found = written(tmp_path / "nowhere", 10)
    found.discard()
    assert (found.going, found.told("gpu1", 10)) == ({}, "")


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("500M", 500_000_000), ("1.5 GB", 1_500_000_000), ("2Gi", 2 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size
    assert parse_setting(f"gpu1.bring={text}")


@pytest.mark.parametrize("text", ["much", "-1", "1 P", "1e3"])
def test_a_bad_size_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="a size such as 500M"):
        parse_setting(f"bring={text}")
