"""``@distributed`` and ``launch`` as users write them: in pytest, a script, Python's REPL and a notebook."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import jupyter_torchdist as td
from jupyter_torchdist.client.drivers import pool
from jupyter_torchdist.protocol.errors import JobCancelled, OptionError, UserError
from jupyter_torchdist.protocol.spec import OPTIONS, Options
from jupyter_torchdist.store import catalog
from tests.leaks import wait_until
from tests.notebook import Notebook

PATIENCE = 60.0
SCALE = 10


@pytest.fixture(autouse=True)
def closing(home: Path) -> Iterator[None]:
    yield
    pool().close()


@td.distributed(ranks=2)
def scaled(x: int, plus: int = 0) -> int:
    print("scales", x)
    return SCALE * x + plus + td.rank


@td.distributed(ranks=2)
def counts(until: int, gate: str = "") -> Iterator[int]:
    for number in range(until):
        yield 10 * td.rank + number
        while number == 0 and gate and not Path(gate).exists():
            time.sleep(0.01)


if TYPE_CHECKING:  # mypy reads this (`make lint`); nothing runs
    from typing_extensions import assert_type

    from jupyter_torchdist.client.job import Job

    @td.distributed(ranks=2)
    def losses(epochs: int) -> Iterator[float]:
        yield float(epochs)

    @td.distributed
    async def awaited(x: int) -> str:
        return str(x)

    @td.distributed
    async def stream() -> AsyncIterator[int]:
        yield 1

    @td.distributed
    def untyped(x):  # type: ignore[no-untyped-def]
        return x

    assert_type(scaled(1), int)
    assert_type(scaled.distributed(1, plus=2), list[int])
    assert_type(scaled.submit(1), Job)
    assert_type(losses.distributed(3), Iterator[list[float]])
    assert_type(awaited.distributed(3), list[str])
    assert_type(stream.distributed(), Iterator[list[int]])
    assert_type(untyped.distributed(1), Any)
    scaled.distributed("1")  # type: ignore[arg-type]
    losses.distributed(until=1)  # type: ignore[call-overload]


@td.distributed(ranks=2)
def calls_another() -> Any:
    return scaled.distributed(1)


@td.distributed(ranks=2)
async def later(x: int) -> int:
    await asyncio.sleep(0)
    return x + td.rank


def test_here_on_ranks_and_in_the_background(capfd: pytest.CaptureFixture[str]) -> None:
    assert scaled(2) == 20
    assert scaled.distributed(2, plus=5) == [25, 26]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] scales 2", "[rank 1] scales 2", "scales 2"]
    job = scaled.submit(3)

    async def waited() -> str:
        return (await job).state

    assert asyncio.run(waited()) == "succeeded"
    assert job.values() == [30, 31]
    assert capfd.readouterr().out == ""
    assert later.distributed(1) == [1, 2]
    assert td.distributed(ranks=2, collect="rank0", watch="off")(scaled.function).distributed(4) == [40]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("call", ["scaled.distributed()", "scaled.submit(1, times=2)"])
def test_wrong_arguments_start_nothing(home: Path, call: str) -> None:
    with pytest.raises(TypeError, match=r"scaled\(x: 'int', plus: 'int' = 0\)"):
        eval(call)
    assert catalog.jobs() == []


def test_a_generator_gives_its_items_while_it_runs(tmp_path: Path) -> None:
    gate = tmp_path / "go on"
    items = counts.distributed(3, str(gate))
    assert next(items) == [0, 10]
    assert wait_until(lambda: [job.state for job in catalog.jobs()] == ["running"], PATIENCE)
    gate.touch()
    assert list(items) == [[1, 11], [2, 12]]
    job = counts.submit(2)
    assert list(job.items()) == [[0, 10], [1, 11]]
    first: Any = td.distributed(ranks=2, collect="rank0")(counts.function)
    assert list(first.distributed(2)) == [0, 1]


def test_a_caller_that_takes_no_more_items_ends_the_job(tmp_path: Path) -> None:
    for item in counts.distributed(3, str(tmp_path / "never")):
        assert item == [0, 10]
        break
    assert wait_until(lambda: [job.state for job in catalog.jobs()] == ["cancelled"], PATIENCE)


@td.distributed(ranks=2)
def uneven() -> Iterator[int]:
    yield from range(1 + td.rank)


@td.distributed(ranks=1)
def with_a_lock(how: str) -> Any:
    return {"how": how, "parts": [threading.Lock()]}


@td.distributed(ranks=1)
def yields_a_lock() -> Iterator[Any]:
    yield 1
    yield {"parts": [threading.Lock()]}


def test_what_cannot_come_back_is_named() -> None:
    with pytest.raises(UserError, match=r"rank 1 yielded 2 items, and rank 0 1"):
        list(uneven.distributed())
    of_the_value = r"the value of rank 0 cannot be pickled: value\['parts'\]\[0\]: _thread.lock"
    with pytest.raises(UserError, match=of_the_value) as caught:
        with_a_lock.distributed("return")
    assert len(caught.traceback) == 2, "the caller's line and one of ours"
    with pytest.raises(UserError, match=r"item 2 of rank 0 cannot be pickled: item\['parts'\]\[0\]: _thread.lock"):
        list(yields_a_lock.distributed())


def test_a_rank_starts_no_job() -> None:
    with pytest.raises(UserError, match=r"scaled\.distributed\(\) was called in rank \d of a job") as caught:
        calls_another.distributed()
    assert "call scaled(…)" in caught.value.hint

    def plainly() -> int:
        return scaled(7)

    assert td.launch(plainly, ranks=2) == [70, 71]


def test_an_interrupt_stops_the_ranks(tmp_path: Path) -> None:
    def sleeps() -> None:
        Path(tmp_path, f"in {td.rank}").touch()
        time.sleep(600)

    def interrupt() -> None:
        if wait_until(lambda: len(list(tmp_path.glob("in *"))) == 2, PATIENCE):
            os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Thread(target=interrupt)
    timer.start()
    try:
        with pytest.raises(JobCancelled):
            td.launch(sleeps, ranks=2)
    finally:
        timer.join()
    assert [job.state for job in catalog.jobs()] == ["cancelled"]


SAMPLES = {
    "gpus": 1, "gpu_type": "A10", "ranks": 2, "hosts": ["a", "b:2"], "remote": True, "host_option": {"python": "/p"},
    "launcher": "ssh", "option": {"min_num_params": 5}, "config": "c.toml", "grad_accumulation": 2, "out": ["a"],
    "exclude": ["a"], "name": "n", "timeout": 90, "grace": "3s", "lease": "1h", "env": {"A": 1}, "checkpoint": "d",
    "strategy": "fsdp", "restarts": 2, "stall": "off", "verify": 3, "nodes": 2, "profile": 5,
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_every_option_of_the_magic_is_a_keyword(option: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text("ranks = 3\n")
    sample = SAMPLES.get(option.field, option.choices[-1] if option.choices else True)
    beside = {"launcher": "slurm"} if option.field == "nodes" else {}
    options = td.distributed(**{option.field: sample, **beside})(scaled.function).options
    assert getattr(options, option.field) != getattr(Options(), option.field)
    with pytest.raises(OptionError):
        td.distributed(**{option.field + "x": sample})


def test_files_give_options_and_remote_false_keeps_to_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torchdist.toml").write_text('hosts = "gpu1,gpu2"\nranks = 2\n')
    made = td.distributed(scaled.function).options
    assert (made.hosts, made.launcher, made.ranks) == (("gpu1", "gpu2"), "ssh", 2)
    here = td.distributed(remote=False)(scaled.function).options
    assert (here.hosts, here.launcher, here.ranks) == ((), "local", 2)
    with pytest.raises(OptionError, match="remote=False runs on this machine only"):
        td.distributed(remote=False, hosts=["a"])


PROGRAM = """
import jupyter_torchdist as td
from jupyter_torchdist import distributed

def helper(x):
    return x + td.rank

@distributed(ranks=2)
def double(x, fails=False):
    if fails:
        raise KeyError("here")
    print("in", x)
    return 2 * helper(x)
"""


def run_python(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, *words], env=environ, capture_output=True, text=True, timeout=PATIENCE, **options
    )


def test_in_a_script(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text(PROGRAM + "print(double(1), double.distributed(2))\ndouble.distributed(3, fails=True)\n")
    done = run_python([str(script)])
    assert sorted(done.stdout.splitlines()) == ["2 [4, 6]", "[rank 0] in 2", "[rank 1] in 2", "in 1"]
    assert done.returncode == 1
    assert "KeyError: 'here'" in done.stderr
    assert "raise KeyError" in done.stderr  # the script's own line


def test_in_pythons_repl(tmp_path: Path) -> None:
    typed = PROGRAM.replace("\n\n@", "\n\n\n@") + "\nprint('got', double.distributed(2))\n"
    done = run_python(["-i", "-q"], input=typed, cwd=tmp_path)
    assert "got [4, 6]" in done.stdout, done.stderr


def test_in_a_notebook(kernel: Notebook) -> None:
    kernel.run(PROGRAM.replace("from jupyter_torchdist import", "from jupyter_torchdist.serverless_gpu import"))
    cell = kernel.run("values = double.distributed(2)\nvalues")
    assert cell.result is not None
    assert cell.result["text/plain"] == "[4, 6]"
    assert "[rank 1] in 2" in cell.text
    assert "succeeded" in cell.text
    failed = kernel.try_run("double.distributed(3, fails=True)")
    assert failed.error is not None
    assert failed.error.name == "KeyError"
    assert 'raise KeyError("here")' in failed.error.traceback
    assert "Cell In[" in failed.error.traceback
    kernel.run("@distributed(ranks=2)\ndef numbers():\n    print('begun')\n    yield from (td.rank, 5)")
    cell = kernel.run("for item in numbers.distributed():\n    print('item', item)")
    assert cell.stdout.splitlines() == ["item [0, 1]", "item [5, 5]"]
    assert "[rank 1] begun" in cell.text
