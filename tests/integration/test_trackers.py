"""``--track NAME``: a tracker that a package brings, what is refused before a launch, and what it survives."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.protocol.paths import JobPaths, home
from jupyter_torchdist.store import catalog, journal, liveness, metrics, tracking
from tests.leaks import wait_until

DIARY = '''
"""A tracker that writes what it is told, one JSON line each."""
import json, os, time
from pathlib import Path
from jupyter_torchdist.trackers.base import Opened, Refused

class Diary:
    def check(self, environ):
        pass

    def open(self, run, place):
        self.diary = Path(place or os.environ["DIARY"])
        fresh = not self.diary.exists()
        self.write("open", params=run.params, tags=run.tags, name=run.name)
        return Opened(str(self.diary), str(self.diary), fresh)

    def write(self, what, **more):
        with self.diary.open("a") as file:
            file.write(json.dumps({"what": what, **more}) + chr(10))

    def log(self, points):
        if any(one.name == "refused" for one in points):
            raise Refused("never")
        for one in points:
            self.write("point", name=one.name, value=one.value, step=one.step)

    def tag(self, tags):
        self.write("tag", tags=dict(tags))

    def file(self, path, name):
        self.write("file", name=name)

    def close(self, state, ended):
        while Path(os.environ["DIARY"] + ".closed").exists():
            time.sleep(0.05)
        self.write("close", state=state)
'''

SCRIPT = """
import os, time
import jupyter_torchdist as td

for step in range(5):
    td.log(loss=float(step), step=step)
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.02)
td.log(refused=1.0)
"""


class Desk:
    """Jobs from the shell, each with the tracker ``diary`` of a package."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.diary, self.gate = directory / "diary", directory / "gate"
        self.gate.touch()
        (directory / "train.py").write_text(SCRIPT)
        site = directory / "site"
        info = site / "diary-1.2.dist-info"
        info.mkdir(parents=True)
        (site / "diary.py").write_text(DIARY)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: diary\nVersion: 1.2\n")
        points = "diary = diary:Diary\nbroken = diary:Missing\n"
        (info / "entry_points.txt").write_text(f"[jupyter_torchdist.trackers]\n{points}")
        self.environ = {"PYTHONPATH": str(site), "DIARY": str(self.diary), "GATE": str(self.gate)}

    def run(self, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jupyter_torchdist", "run", "--ranks", "1", *options, "train.py"]
        paths = os.pathsep.join(filter(None, [self.environ["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]))
        variables = {**os.environ, **self.environ, "PYTHONPATH": paths, **environ}
        return subprocess.run(command, env=variables, cwd=self.directory, capture_output=True, text=True, timeout=90)

    @property
    def paths(self) -> JobPaths:
        return home().job(catalog.jobs()[0].job)

    def lines(self, what: str) -> list[dict[str, Any]]:
        found = self.diary.read_text().splitlines() if self.diary.exists() else []
        return [line for line in map(json.loads, found) if line["what"] == what]

    def losses(self) -> list[int]:
        """The steps of the curve ``loss`` that were delivered."""
        return [one["step"] for one in self.lines("point") if one["name"] == "loss"]

    def closed(self) -> bool:
        return bool(self.lines("close")) and tracking.of(self.paths, "diary").closed


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.gate.touch()
    (tmp_path / "diary.closed").unlink(missing_ok=True)
    for job in catalog.jobs():
        for one in tracking.read(home().job(job.job)):
            if one.lives and one.process is not None:
                one.process.signal(signal.SIGKILL)


def test_a_tracker_of_a_package_gets_everything_once(desk: Desk) -> None:
    done = desk.run("--name", "night", "--track", "diary", "--track", "diary")
    assert done.returncode == 0, done.stderr
    assert wait_until(desk.closed), tracking.lines(desk.paths)
    assert [(one["name"], one["step"]) for one in desk.lines("point") if one["name"] == "loss"] == [
        ("loss", step) for step in range(5)
    ], "the refused point was passed over"
    (opened,) = desk.lines("open")
    assert opened["name"] == "night" and opened["params"]["ranks"] == 1
    assert {one["name"] for one in desk.lines("file")} >= {"job/spec.json", "job/journal.jsonl"}
    assert desk.lines("close") == [{"what": "close", "state": "finished"}]
    known = tracking.of(desk.paths, "diary")
    assert (known.refused, known.link) == (1, str(desk.diary))


def test_the_process_that_submitted_may_end_and_the_driver_may_die(desk: Desk) -> None:
    desk.gate.unlink()
    done = desk.run("--background", "--track", "diary")
    assert done.returncode == 0, done.stderr
    assert wait_until(lambda: len(desk.lines("point")) >= 5)
    driver = liveness.driver_of(desk.paths)
    assert driver is not None
    driver.process.signal(signal.SIGKILL)
    desk.gate.touch()
    assert wait_until(lambda: journal.state(desk.paths).final)
    assert wait_until(desk.closed), tracking.lines(desk.paths)
    assert desk.losses() == list(range(5))


def test_a_tracker_that_is_killed_is_started_again_and_goes_on_where_it_was(desk: Desk) -> None:
    desk.gate.unlink()
    done = desk.run("--background", "--track", "diary")
    assert done.returncode == 0, done.stderr
    assert wait_until(lambda: len(desk.losses()) == 5)
    curves = metrics.files(desk.paths)[0]
    assert wait_until(lambda: tracking.of(desk.paths, "diary").at.get(curves.name) == curves.stat().st_size)
    first = tracking.of(desk.paths, "diary").process
    assert first is not None
    first.signal(signal.SIGKILL)
    assert wait_until(lambda: tracking.of(desk.paths, "diary").process != first)
    desk.gate.touch()
    assert wait_until(desk.closed), tracking.lines(desk.paths)
    assert desk.losses() == list(range(5))


def test_a_tracker_that_never_returns_does_not_delay_the_job(desk: Desk) -> None:
    (desk.directory / "diary.closed").touch()
    done = desk.run("--track", "diary", TORCHDIST_TRACK_SECONDS="2")
    assert done.returncode == 0, done.stderr
    later = f"not everything is delivered: it took longer than 2.0 s; `torchdist track {desk.paths.job} diary`"
    assert wait_until(lambda: later in "".join(tracking.lines(desk.paths))), tracking.lines(desk.paths)


@pytest.mark.parametrize(
    ("tracker", "words"),
    [
        ("diry", ("there is no tracker 'diry'", "these are installed: broken, diary, mlflow, tensorboard, wandb")),
        ("broken", ("--track broken: package diary 1.2 could not be loaded (diary:Missing)", "other trackers still")),
        ("a/b", ("--track 'a/b': expected names separated by commas",)),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_before_the_launch(
    desk: Desk, tracker: str, words: tuple[str, ...]
) -> None:
    done = desk.run("--track", tracker)
    assert done.returncode != 0 and catalog.jobs() == []
    assert [word for word in words if word not in done.stderr] == [], done.stderr


@pytest.mark.parametrize("tracker", ["mlflow", "tensorboard", "wandb"])
def test_a_package_that_is_not_installed_is_named_with_its_extra(desk: Desk, tracker: str) -> None:
    if importlib.util.find_spec(tracker) is not None:
        pytest.skip(f"{tracker} is installed here; `make test-trackers` has it, `make test-ranks` has not")
    done = desk.run("--track", tracker)
    assert done.returncode != 0 and catalog.jobs() == []
    assert f"needs the package {tracker}, which is not installed in {sys.executable}" in done.stderr
    assert f"{sys.executable} -m pip install 'jupyter_torchdist[{tracker}]'" in done.stderr
