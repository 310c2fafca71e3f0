"""``--json`` of every verb: what is printed has exactly the types of ``verbs/schema.py``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.cli import main
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.protocol.typed import Malformed, decode
from jupyter_torchdist.store import catalog
from jupyter_torchdist.testing import FakeJob
from jupyter_torchdist.verbs import parse, schema
from tests.notebook import Notebook

Shell = Callable[..., "subprocess.CompletedProcess[str]"]


def checked(kind: type, value: Any) -> Any:
    """``value`` if its fields are those of the class, no more and no fewer. Raises ``Malformed``."""
    if (again := codec.plain(asdict(decode(kind, value)))) != value:
        raise Malformed(f"{kind.__name__}: {value} has other fields than {again}")
    return value


def test_the_check_sees_what_differs() -> None:
    good = {"jobs": ["a"], "blobs": 0, "size": 1}
    assert checked(schema.Removed, good) == good
    for bad in ({**good, "more": 1}, {"jobs": ["a"], "blobs": 0}, {**good, "size": "1"}, {**good, "jobs": "a"}):
        with pytest.raises(Malformed):
            checked(schema.Removed, bad)


def objects(verb: str, text: str) -> list[Any]:
    """The objects that a verb printed, each checked, and that they come in the order of ``OF_VERB``."""
    values = [json.loads(line) for line in text.splitlines()]
    assert text.isascii()
    printed = schema.OF_VERB[verb]
    body = values[:-1] if printed.last else values
    for value in body:
        assert printed.lines is not None, f"{verb} printed more than one object: {values}"
        checked(printed.lines, value)
    if printed.last:
        checked(printed.last, values[-1])
    return values


@pytest.fixture
def shell(home: Path, tmp_path: Path) -> Shell:
    """The command, in a directory with two scripts."""
    (tmp_path / "ok.py").write_text("import sys\nprint('one', sys.argv[1:])\nprint('two \\x1b[1mé', file=sys.stderr)\n")
    (tmp_path / "bad.py").write_text("raise ValueError('boom')\n")
    steps = "while True:\n    time.sleep(0.05)\n    td.log(loss=1.0)\n"
    (tmp_path / "sleep.py").write_text(f"import time\nimport jupyter_torchdist as td\n{steps}")
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jupyter_torchdist", *words]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)

    return run


def of_main(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> list[Any]:
    assert main([*words, "--json"]) == status
    captured = capsys.readouterr()
    assert not captured.err
    return objects(words[0], captured.out)


@pytest.mark.timeout(240)
def test_every_verb(shell: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = set()

    def told(*words: str, status: int = 0) -> list[Any]:
        seen.add(words[0])
        return of_main(capsys, *words, status=status)

    done = shell("run", "--json", "--ranks", "1", "--name", "fine", "ok.py", "--", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    *lines, standing = objects("run", done.stdout)
    assert {"rank": 0, "stream": "out", "text": "one ['--json']"} in lines  # of the script, not ours
    assert {"rank": 0, "stream": "err", "text": "two \x1b[1mé"} in lines
    assert (standing["state"], standing["name"], standing["failures"]) == ("succeeded", "fine", [])

    again = shell("rerun", "fine", "--json")
    assert again.returncode == 0 and objects("rerun", again.stdout)[-1]["state"] == "succeeded"
    failed = shell("run", "--ranks", "1", "--json", "--name", "wrong", "bad.py")
    end = objects("run", failed.stdout)[-1]
    assert failed.returncode == 1 and end["failures"][0]["error"]["message"] == "boom" and not failed.stderr
    plan = shell("run", "--json", "--plan", "--ranks", "2", "ok.py")
    assert objects("run --plan", plan.stdout)[0]["plan"]["world_size"] == 2
    background = shell("run", "--json", "--background", "--ranks", "1", "--name", "night", "sleep.py")
    assert objects("run --background", background.stdout)[0]["state"] in ("submitted", "starting", "running")
    seen |= {"run", "rerun"}

    assert {job["name"] for job in told("jobs")[0]["jobs"]} == {"fine", "wrong", "night"}
    assert told("show", "fine")[0]["spec"]["argv"] == ["ok.py", "--json"]
    assert told("logs", "fine", "--stream", "out")[0]["text"] == "one ['--json']"
    assert told("attach", "wrong", status=1)[-1]["reason"]
    assert told("diagnose", "wrong")[0]["findings"] is not None
    assert told("export", "fine", str(tmp_path / "files"))[0]["directory"] == str(tmp_path / "files")
    assert told("nodes")[0]["nodes"][0]["agents"]
    assert {check["level"] for check in told("doctor")[0]["checks"]} <= {"fine", "warning"}
    assert told("plan", "--ranks", "3")[0]["plan"]["world_size"] == 3
    assert told("stacks", "night")[0]["stacks"][0]["rank"] == 0
    assert told("profile", "night", "--steps", "2")[0]["ranks"][0]["rank"] == 0
    assert told("cancel", "night", "--kill")[0]["state"] == "cancelled"
    [removed] = told("rm", "night")
    assert removed["jobs"] and removed["size"] > 0
    assert told("rm", "--older", "1d")[0]["jobs"] == []
    assert told("stop")[0]["nodes"][0]["warm"] >= 1
    delivers = {"track"}  # needs a package that keeps experiments
    assert seen | delivers == {"run", *parse.VERBS} == {verb.partition(" ")[0] for verb in schema.OF_VERB}


@pytest.mark.parametrize(
    ("words", "status", "kind", "message", "hint"),
    [
        (["jbs", "--json"], 2, "OptionError", "no verb 'jbs'", "did you mean jobs?"),
        (["show", "nothing", "--json"], 1, "JobNotFound", "there is no job 'nothing'", "`torchdist jobs` lists"),
        (["logs", "--json"], 2, "OptionError", "required: JOB", "usage: torchdist logs"),
        (["logs", "fake", "--rank", "7", "--json"], 1, "UserError", "has no rank 7", "its ranks are 0 to 1"),
        (["logs", "fake", "--json", "--grep", "("], 2, "OptionError", "not a regular expression", "usage"),
        (["rm", "--json"], 1, "UserError", "which jobs?", "--older 7d"),
        (["rm", "fake", "--json"], 1, "StoreError", "is running", "torchdist cancel"),
        (["plan", "--rank", "2", "--json"], 2, "OptionError", "no option --rank", "did you mean --ranks?"),
        (["run", "--json"], 2, "OptionError", "run needs a script", "torchdist run"),
        (["run", "--json", "--ranks", "1", "nowhere.py"], 2, "OptionError", "does not exist", ""),
        (["run", "--json", "--nnodes", "2", "x.py"], 2, "OptionError", "which has no --json", "--hosts"),
        (["track", "fake", "--json"], 1, "UserError", "was not launched with --track", "name a tracker"),
        (["diagnose", "no/file", "--json"], 2, "OptionError", "no/file", ""),
    ],
)
def test_an_error_is_one_object(
    words: list[str], status: int, kind: str, message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeJob(options=Options(ranks=2, name="fake")).running():
        assert main(words) == status
        captured = capsys.readouterr()
        assert not captured.err
        [failed] = [json.loads(line) for line in captured.out.splitlines()]
        error = checked(schema.Failed, failed)["error"]
        assert error["kind"] == kind and message in error["message"] and hint in error["hint"]


def test_a_script_keeps_its_own_json(capsys: pytest.CaptureFixture[str]) -> None:
    """After the script the word is an argument: the error is in words."""
    assert main(["run", "--rank", "1", "x.py", "--json"]) == 2
    captured = capsys.readouterr()
    assert not captured.out and "did you mean --ranks?" in captured.err


def test_what_is_printed_may_be_anything(capsys: pytest.CaptureFixture[str]) -> None:
    """Half characters, an @ that our own files double, a number that is not one."""
    with FakeJob(options=Options(ranks=2, name="odd")).running() as job:
        job.rank(0).prints(b"@nan \xff\n@@x\n")
        texts = [line["text"] for line in of_main(capsys, "logs", "odd", "--rank", "0")]
        assert texts[0].startswith("@nan ") and texts[1] == "@@x"
    assert codec.plain({"x": (float("nan"), 1.5, 2**60), 3: "@"}) == {"x": [None, 1.5, 2**60], "3": "@"}


@pytest.mark.timeout(120)
def test_in_a_notebook_it_is_an_object(one_kernel: Notebook, tmp_path: Path) -> None:
    one_kernel.run("%%distribute --ranks 1 --name cell\nprint('hello')")
    one_kernel.run("shown = %dist show cell --json\nlines = %dist logs cell --json\nagain = %dist rerun cell --json")
    assert checked(schema.Shown, one_kernel.value("shown"))["spec"]["label"].startswith("Cell In[")
    assert one_kernel.value("lines") == [{"rank": 0, "stream": "out", "text": "hello"}]
    assert checked(schema.Standing, one_kernel.value("again"))["state"] == "succeeded"
    assert len(catalog.jobs()) == 2
    assert one_kernel.run("found = %dist attach cell --json").stdout == ""
    assert checked(schema.Standing, one_kernel.value("found"))["state"] == "succeeded"
    refused = one_kernel.try_run("%dist show nothing --json")
    assert refused.error is not None and re.search("there is no job 'nothing'", refused.text)
