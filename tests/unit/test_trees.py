"""``--sync DIR``: what is refused, and what a node lacks of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_torchdist.client import Request
from jupyter_torchdist.client.submit import prepare
from jupyter_torchdist.node.shipping.replica import replica, unlink_synced
from jupyter_torchdist.node.shipping.synced import Synced
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.trees import Tree, TreeFile, checked, tree


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_text("one")
    (folder / "deep" / "b").write_text("two")
    return folder


def refused(text: str, cwd: Path) -> str:
    with pytest.raises(OptionError) as error:
        checked(text, cwd)
    return error.value.message


def test_what_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = data.parent
    monkeypatch.setenv("HOME", str(here))
    assert checked("data", here) == checked("./data/", here) == checked(str(data), Path("/")) == str(data)
    assert "there is no" in refused("nothing", here)
    assert "is no directory" in refused("data/a", here)
    for text in ("/", "~", "..", str(here)):
        assert "is too much to copy" in refused(text, here)
    (data / "inside").symlink_to("a")
    assert checked("data", here) == str(data)
    for target, said in [
        ("/etc/hostname", "is a link out of"),
        ("../..", "is a link out of"),
        ("gone", "cannot be read"),
    ]:
        (data / "link").symlink_to(target)
        assert said in refused("data", here)
        (data / "link").unlink()
    (data / "folder").symlink_to("deep")
    assert "is no file" in refused("data", here)
    (data / "folder").unlink()
    os.mkfifo(data / "pipe")
    assert "is no file" in refused("data", here)
    with pytest.raises(OptionError, match="--sync copies a directory to hosts"):
        prepare(Request("1", options=parse_options("--ranks 1 --sync data"), cwd=here))


def test_too_many_files(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_torchdist.protocol.trees.MOST", 1)
    assert "has more than 1 files" in refused("data", data.parent)


def take_all(synced: Synced, found: Tree) -> list[str]:
    """Send what is missing; returns its names."""
    names = []
    for name in synced.missing():
        file = found.files[int(name.rpartition("-")[2])]
        content = Path(found.path, file.name).read_bytes()
        assert synced.take(name, 0, content[:1], False) is False
        assert synced.take(name, 1, content[1:], True) is True
        names.append(file.name)
    return sorted(names)


def test_a_node_without_the_notebooks_directory(data: Path, tmp_path: Path) -> None:
    scratch, here = tmp_path / "scratch", data.parent
    paths, found = replica(scratch, "job1"), tree(str(data), str(here))
    assert take_all(Synced(scratch, paths, [found], "/not/there"), found) == ["a", "deep/b"]
    assert (paths.work / "data" / "deep" / "b").read_text() == "two"
    unlink_synced(paths.work)
    assert list(paths.work.iterdir()) == []

    (data / "a").write_text("three")
    following, found = replica(scratch, "job2"), tree(str(data), str(here))
    assert take_all(Synced(scratch, following, [found], "/not/there"), found) == ["a"]
    assert (following.work / "data" / "a").read_text() == "three"
    part = Synced(scratch, following, [Tree(found.path, "data", (TreeFile("c", 2, 1, 0o600),))], "/not/there")
    part.take(part.missing()[0], 0, b"x", False)
    part.close()
    assert sorted(path.name for path in (following.work / "data").iterdir()) == ["a", "deep"]


def test_a_large_file_that_was_cut_off(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_torchdist.node.shipping.synced.LARGE", 2)
    scratch, there = tmp_path / "scratch", tmp_path / "there"
    paths = replica(scratch, "job")

    def begun(content: str) -> Synced:
        (data / "a").write_text(content)
        return Synced(scratch, paths, [Tree(str(there), "", tree(str(data), str(data.parent)).files)], "/not/there")

    synced = begun("0123456789")
    [name] = [name for name in synced.missing() if name.endswith("-0")]
    assert synced.parts() == {}
    synced.take(name, 0, b"0123", False)
    synced.close()
    (there / ".a.old-copy").write_text("the user's")
    again = begun("0123456789")
    assert again.parts() == {}, "the file was written again: it has another time"
    assert [path.name for path in there.iterdir()] == [".a.old-copy"]
    (there / ".a.old-copy").unlink()
    again.take(name, 0, b"0123", False)
    again.close()
    found = tree(str(data), str(data.parent))
    third = Synced(scratch, paths, [Tree(str(there), "", found.files)], "/not/there")
    assert third.parts() == {name: 4}
    assert third.take(name, 4, b"456789", True) is True
    assert (there / "a").read_text() == "0123456789"
    assert [path.name for path in there.iterdir()] == ["a"]


def test_a_node_that_has_the_directory(data: Path, tmp_path: Path) -> None:
    here, paths = data.parent, replica(tmp_path / "scratch", "job")
    found = tree(str(data), str(here))
    there = Tree(str(tmp_path / "there"), "", found.files)
    synced = Synced(tmp_path / "scratch", paths, [there], str(here))
    assert len(synced.missing()) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="exists"):
        Synced(tmp_path / "scratch", paths, [Tree(str(tmp_path / "file"), "", ())], str(here))
    for name in ("../x", "/x", ""):
        with pytest.raises(ValueError, match="is no path below"):
            Synced(tmp_path / "scratch", paths, [Tree(there.path, "", (TreeFile(name, 1, 1, 1),))], str(here))
