"""The words after ``torchdist``, and what the shell learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jupyter_torchdist import cli
from jupyter_torchdist.client.submit import Request
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.protocol.state import JobState
from jupyter_torchdist.testing import FakeJob
from jupyter_torchdist.verbs.command_line import CommandLine, split


@pytest.mark.parametrize(
    ("line", "options", "program"),
    [
        ("--ranks 2 train.py -- --lr 1", ["--ranks", "2"], ["train.py", "--", "--lr", "1"]),
        ("--ranks=2 --fresh train.py a", ["--ranks=2", "--fresh"], ["train.py", "a"]),
        ("--ranks 2 -m pkg.train --lr 1", ["--ranks", "2"], ["-m", "pkg.train", "--lr", "1"]),
        ("train.py --ranks 2", [], ["train.py", "--ranks", "2"]),
        ("--nonsense train.py", ["--nonsense"], ["train.py"]),
        ("--ranks 2 -- train.py --lr 1", ["--ranks", "2"], ["train.py", "--lr", "1"]),
        ("--ranks 2 -- train.py -- --lr 1", ["--ranks", "2"], ["train.py", "--", "--lr", "1"]),
        ("--module --nproc_per_node 2 pkg.train", ["--nproc_per_node", "2"], ["-m", "pkg.train"]),
        ("-m --tee=0 -r 0 -t0 pkg.train -x", ["--tee=0", "-r", "0", "-t0"], ["-m", "pkg.train", "-x"]),
        ("--detach -O a=1 train.py", ["--detach", "-O", "a=1"], ["train.py"]),
        ("", [], []),
    ],
)
def test_options_end_where_the_program_begins(line: str, options: list[str], program: list[str]) -> None:
    assert split(line.split()) == CommandLine(options, program, False)


def request_of(*words: str) -> Request:
    line = split(words)
    return line.request(line.meant({}), Path.cwd(), "torchdist run")


def test_a_script_is_a_request(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    request = request_of("--ranks", "2", str(script), "--", "--lr", "1")
    assert (request.kind, request.source, request.label) == ("script", "print('hello')\n", str(script))
    assert (request.argv, request.options.ranks, request.first_line) == ((str(script), "--lr", "1"), 2, 1)


def test_a_module_is_a_request() -> None:
    request = request_of("--ranks", "2", "-m", "pkg.train", "x")
    assert (request.kind, request.source, request.argv) == ("module", "pkg.train", ("-m", "x"))
    assert request.options.out == ("none",)


@pytest.mark.parametrize(
    ("options", "program", "message"),
    [
        (["--ranks", "2"], [], "run needs a script"),
        (["--rank", "2"], ["x.py"], "no option --rank"),
        ([], ["-m"], "-m needs the name of a module"),
        (["-x"], ["train.py"], "no option -x"),
        ([], ["nowhere.py"], "does not exist"),
        ([], ["/"], "is a directory without __main__.py"),
    ],
)
def test_mistakes(options: list[str], program: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        request_of(*options, *program)


@pytest.mark.parametrize(
    ("state", "status"), [("succeeded", 0), ("failed", 1), ("timed_out", 1), ("lost", 1), ("cancelled", 130)]
)
def test_exit_status(state: str, status: int) -> None:
    assert cli.exit_status(JobState(state=state)) == status


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_misuse_is_2_and_failure_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "jbs") == (2, "", "OptionError: torchdist has no verb 'jbs'\n  → did you mean jobs?\n")
    assert "are required: JOB\n" in run(capsys, "track")[2]
    status, out, err = run(capsys, "show", "nothing")
    assert (status, out) == (1, "") and "JobNotFound" in err


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["logs", "--help"], ["--version"], []])
def test_help_and_empty_lists_succeed(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    status, out, err = run(capsys, *words)
    assert status == 0 and out and not err


def test_jobs_and_logs(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeJob().running() as job:
        job.rank(0).prints("a\n\x1b[2Jb\n")
        job.rank(1).prints("a\n")
        name = job.paths.job
        assert name in run(capsys, "jobs")[1]
        assert json.loads(run(capsys, "jobs", "--json")[1])["jobs"][0]["job"] == name
        assert json.loads(run(capsys, "show", name, "--json")[1])["state"]["state"] == "running"
        assert run(capsys, "logs", name)[1] == "[rank 0] a\n[rank 0] b\n[rank 1] a\n"
        assert run(capsys, "logs", name, "--rank", "0", "--tail", "1")[1] == "b\n"
        assert run(capsys, "logs", name, "--grep", "^a", "--stream", "out")[1] == "[rank 0] a\n[rank 1] a\n"
        assert run(capsys, "logs", name, "--rank", "7")[0] == 1
        status, _, err = run(capsys, "rm", name)
        assert status == 1 and "not removed" in err


def test_attach_to_a_job_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    job = FakeJob().running()
    job.rank(1).prints("hello\n").failed(ValueError("bad"))
    job.ended("failed", "rank 1 failed", 1)
    status, out, err = run(capsys, "attach", job.paths.job)
    assert (status, out) == (1, "[rank 1] hello\n")
    assert "ValueError: bad" in err


def test_rm(capsys: pytest.CaptureFixture[str]) -> None:
    job = FakeJob().running().ended()
    assert run(capsys, "rm") == (
        1,
        "",
        "UserError: rm: which jobs?\n  → name them, or give --older 7d, or --keep-bytes 10G\n",
    )
    assert run(capsys, "rm", job.paths.job)[1] == f"removed {job.paths.job}\n"
    old = FakeJob().running().ended()
    assert "removed 1 job" in run(capsys, "rm", "--older", "7d")[1]
    assert not old.paths.root.exists()


def test_no_word_of_a_job_moves_or_renames_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;renamed\x07\x1b[2J\x1b[1A\x9b5Aevil"
    with FakeJob(options=Options(ranks=2, name=evil), label=evil, source=f"# {evil}\n").running() as job:
        job.rank(0).prints(f"{evil}\n").failed(ValueError(evil))
        job.rank(1).failed(type(evil, (Exception,), {})(evil))
        job.tell("job.note", text=evil)
        job.ended("failed", evil, 0)
        name = job.paths.job
        for words in (["jobs"], ["show", name], ["logs", name], ["attach", name], ["cancel", name], ["show", evil]):
            _, out, err = run(capsys, *words)
            assert "evil" in out + err
            assert not re.search(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;]*m)", out + err), words
