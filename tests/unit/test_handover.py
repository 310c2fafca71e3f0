"""A job that another machine takes over: which job is meant, what is sent of it, and who drives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jupyter_torchdist.driver.crossing import Arriving
from jupyter_torchdist.node.shipping.handover import copied, taken_over
from jupyter_torchdist.node.shipping.replica import prepare, replica_paths
from jupyter_torchdist.protocol.bundle import Blob, Manifest
from jupyter_torchdist.protocol.paths import JobPaths

A, B, C = "20260102-030405-aaaaaa", "20260102-030405-aabbbb", "20260103-030405-cccccc"


def prepared(scratch: Path, job: str, name: str | None) -> JobPaths:
    spec = json.dumps({"options": {"name": name}})
    prepare(scratch, job, {"spec.json": spec, "plan.json": "{}", "manifest.json": '"ä"'}, [])
    paths = replica_paths(scratch, job)
    paths.node("node1").root.mkdir()
    return paths


def test_which_job_is_meant(tmp_path: Path) -> None:
    assert copied(tmp_path, A).jobs == ()
    prepared(tmp_path, A, "night")
    prepared(tmp_path, B, "night")
    prepared(tmp_path, C, None)
    (tmp_path / "jobs" / "20260104-000000-dddddd").mkdir()  # nothing is in it
    (tmp_path / "jobs" / "x y").mkdir()
    for text, jobs in [
        (A, (A,)),
        ("20260102", (A, B)),
        ("20260103", (C,)),
        ("night", (B,)),
        ("", ()),
        ("..", ()),
        ("20260104", ()),
        ("../jobs", ()),
    ]:
        assert copied(tmp_path, text).jobs == jobs, text
    (replica_paths(tmp_path, C).spec).write_text("{")
    assert copied(tmp_path, "night").jobs == (B,)


def test_what_is_sent(tmp_path: Path) -> None:
    paths = prepared(tmp_path, A, None)
    found = copied(tmp_path, A)
    assert (found.node, found.attempt, found.driver) == ("node1", 1, 1)
    assert found.files["manifest.json"] == '"ä"' and set(found.files) == {"spec.json", "plan.json", "manifest.json"}
    lines = [
        f'{{"seq":0,"t":1.0,"node":null,"rank":null,"kind":"launcher.started","process":{PROCESS},"attempt":{attempt}}}\n'
        for attempt in (1, 2)
    ]
    paths.node("node1").launcher_events.write_text("".join([*lines, "nonsense\n", '{"half']))
    assert taken_over(paths, 4, "anna@desk") == ""
    found = copied(tmp_path, A)
    assert (found.attempt, found.driver) == (2, 4)


PROCESS = '{"host":"h","boot":"b","namespace":"n","pid":1,"ticks":1}'


def test_the_newest_machine_drives(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path / "jobs" / A)
    assert taken_over(paths, 1, "anna@laptop") == ""
    assert taken_over(paths, 1, "anna@laptop") == ""  # again, after its channel broke
    assert taken_over(paths, 2, "anna@desk") == ""
    assert taken_over(paths, 1, "anna@laptop") == "anna@desk"
    assert taken_over(paths, 2, "ben@desk") == "anna@desk"  # both at once: the first one
    paths.driver.write_text("{")
    assert taken_over(paths, 1, "anna@laptop") == ""


def test_captured_data_that_comes_from_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = Blob("2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824", 5)  # of hello
    manifest = Manifest.__new__(Manifest)
    monkeypatch.setattr(Manifest, "blobs", (blob,))
    monkeypatch.setattr("jupyter_torchdist.driver.crossing.read_manifest", lambda paths: manifest)
    paths = JobPaths(tmp_path / "jobs" / A)
    paths.root.mkdir(parents=True)
    assert Arriving(paths, wanted=False).missing() == []
    arriving = Arriving(paths, wanted=True)
    assert arriving.missing() == [blob.digest]
    assert arriving.path("nodes/node1/x") is None and arriving.path("blobs/other") is None
    part = arriving.path(f"blobs/{blob.digest}")
    assert part is not None
    part.parent.mkdir()
    for content, left in (("hell", True), ("hallo", False), ("hello", False)):
        part.write_text(content)
        arriving.look(part)
        assert part.exists() == left
    assert arriving.missing() == [] and (tmp_path / "blobs" / blob.digest).read_text() == "hello"
