"""Ranks that misbehave, and code that asks a lot of them, in a real kernel: what the user sees and gets back."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.process import processes_of_job, start_ticks
from jupyter_torchdist.store import catalog, logs
from tests.leaks import command_of, wait_until
from tests.notebook import Cell, CellError, Notebook

RUN = "%%distribute --ranks 2 {}\nimport os, signal, sys, time\nimport jupyter_torchdist as td\n"
"""The cell's own lines begin with line 4."""

QUIET = 300_000
"""Bytes of all messages of one cell whose picture is updated, at most."""


def on_ranks(body: str, options: str = "") -> str:
    return RUN.format(options) + body


def failure(notebook: Notebook, source: str) -> CellError:
    """What the cell raised; afterwards no process of any job is alive, and the kernel is."""
    return failure_of(notebook, notebook.try_run(source))


def failure_of(notebook: Notebook, cell: Cell) -> CellError:
    assert cell.error is not None, cell.text
    assert nothing_runs()
    assert notebook.value("1 + 1") == 2
    return cell.error


def nothing_runs() -> bool:
    return all(not processes_of_job(summary.job) for summary in catalog.jobs())


def has(notebook: Notebook, name: str) -> bool:
    return bool(notebook.value(f"{name!r} in globals()"))


def peak(notebook: Notebook) -> float:
    """The kernel's largest resident memory so far, in MB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{notebook.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


def output_size(cell: Cell) -> int:
    """Characters of everything the kernel sent for the cell."""
    return sum(len(str(message["content"])) for _, message in cell.messages)


def log_paths(notebook: Notebook) -> list[Path]:
    """What the ranks of the last job wrote to stdout."""
    job = notebook.value("__import__('jupyter_torchdist').last.id")
    return [file.path for file in logs.files(catalog.find(job), stream="out")]


def curves(notebook: Notebook, expression: str) -> object:
    """An expression over ``metrics``, the last job's curves as a ``DataFrame``."""
    notebook.run("metrics = __import__('jupyter_torchdist').last.metrics")
    return notebook.value(expression)


# ------------------------------------------------------------------------------------------------ ranks that end


def test_ranks_that_leave(kernel: Notebook) -> None:
    error = failure(kernel, on_ranks("before = 1\ntd.barrier()\nif td.rank == 1:\n    os._exit(3)\ntd.barrier()"))
    assert error.name == "RankFailed"
    assert re.match(r"rank 1 on \S+ ended with exit code 3\n", error.value)
    assert "%dist logs" in error.value and "--rank 1" in error.value
    assert kernel.value("before") == 1, "what rank 0 had comes back"

    cell = kernel.run(on_ranks("value = 5\ntd.barrier()\nif td.rank == 1:\n    os._exit(0)\nvalue = 6"))
    assert kernel.value("value") == 6, "the other rank is not held up"
    assert "rank 1 exited with code 0 before its code had ended" in cell.text
    cell = kernel.run(on_ranks("gone = 1\ntd.barrier()\nos._exit(0)"))
    assert "rank 0 exited with code 0 before its code had ended" in cell.text and not has(kernel, "gone")

    cell = kernel.run(on_ranks("value = 7\nsys.exit()\nvalue = 8"))
    assert re.search(r"sys\.exit\(\) at Cell In\[\d+\], line 5 ended the code: what follows it did not run", cell.text)
    assert kernel.value("value") == 7
    error = failure(kernel, on_ranks("value = 9; td.barrier()\nif td.rank == 0:\n    sys.exit(3)\ntd.barrier()"))
    assert error.name == "RankFailed" and "SystemExit: 3" in error.value
    assert re.search(r"Cell In\[\d+\], line 6\n(.*\n)*----> 6 {5}sys\.exit\(3\)", error.traceback)
    assert kernel.value("value") == 9


def test_ranks_that_are_killed(kernel: Notebook) -> None:
    crash = "import ctypes\nvalue = 1; td.barrier()\nif td.rank == 1:\n    ctypes.string_at(0)\ntd.barrier()"
    cell = kernel.try_run(on_ranks(crash))
    error = failure_of(kernel, cell)
    assert error.name == "RankFailed"
    assert re.match(
        r"rank 1 on \S+ was killed \(SIGSEGV: a crash in native code\) at Cell In\[\d+\], line 7", error.value
    )
    assert kernel.value("value") == 1
    # On a busy machine the launcher may look seconds after the peer has failed because of it.
    later = [
        "if td.rank == 1:",
        "    import subprocess",
        "    launcher = os.getppid()",
        "    os.kill(launcher, signal.SIGSTOP)",
        "    subprocess.Popen(f'sleep 2; kill -CONT {launcher}', shell=True)",
        "    os.kill(os.getpid(), signal.SIGKILL)",
        "td.barrier()",
    ]
    cell = kernel.try_run(on_ranks("\n".join(later)))
    error = failure_of(kernel, cell)
    assert re.match(r"rank 1 on \S+ was killed \(SIGKILL\)", error.value)
    assert "rank 0 on" not in cell.displays[-1]["text/plain"], "the peer's broken connection is not blamed"


def test_the_first_failure_is_blamed_and_others_are_folded(kernel: Notebook) -> None:
    source = "%%distribute --ranks 3\nimport jupyter_torchdist as td\nif td.rank == 2:\n    raise LookupError('mine')\n"
    cell = kernel.try_run(source + "td.barrier()\n")
    error = failure_of(kernel, cell)
    assert (error.name, error.value) == ("LookupError", "mine")
    assert "rank 2 on" in error.traceback and "----> 4     raise LookupError('mine')" in error.traceback
    assert "gloo" not in error.traceback, "the peers' broken connections are folded"
    assert re.search(r"other ranks? (were|was) stopped|other ranks? failed too", error.traceback)
    failure(kernel, on_ranks("if td.rank == 1:\n    raise LookupError('mine')\ntime.sleep(60)"))
    states = kernel.value("{rank: one.state for rank, one in td.last.state.ranks.items()}")
    assert states == {0: "stopped", 1: "failed"}


# ------------------------------------------------------------------------------------------------ what ranks print


def test_floods(kernel: Notebook) -> None:
    kernel.run("%%distribute --ranks 2\nprint('warm')")
    before = peak(kernel)
    body = "text = 'x' * 92\nfor number in range(1_000_000):\n    print(f'{number:06d}', text)\nvalue = 1"
    cell = kernel.run(on_ranks(body))
    assert kernel.value("value") == 1
    assert output_size(cell) < QUIET and peak(kernel) - before < 40
    assert "[rank 1] 999999 xx" in cell.text
    for path in log_paths(kernel):
        content = path.read_bytes()
        assert len(content) == 100_000_000 and content.count(b"\n") == 1_000_000
        assert content.startswith(b"000000 x") and content[-100:-92] == b"999999 x"

    # One line that never ends, as plain text: that too stops somewhere.
    cell = kernel.run(on_ranks("for _ in range(100):\n    sys.stdout.write('y' * 1_000_000)", "--watch text"))
    assert output_size(cell) < 45_000_000 and peak(kernel) - before < 300
    assert "more is not shown here: %dist logs" in cell.stdout[-200:]
    assert [path.stat().st_size for path in log_paths(kernel)] == [100_000_000, 100_000_000]


def test_streams_in_odd_states(kernel: Notebook) -> None:
    cell = kernel.run(on_ranks(r"os.write(1, b'\xff\xfe\n')" + "\nprint('after')", "--watch text"))
    assert cell.stdout.count(r"\xff\xfe") == 2 and cell.stdout.count("after") == 2
    for close in ("sys.stdout.close()", "os.close(1)", "sys.stdout = None", "os.close(0); os.close(2)"):
        cell = kernel.run(on_ranks(f"print('before', flush=True)\n{close}\nvalue = {close!r}\nvalue"))
        assert kernel.value("value") == close and kernel.value("_") == close
        assert "[rank 0] before" in cell.text and "[rank 1] before" in cell.text


def test_children_that_hold_the_pipes_end_with_the_job(kernel: Notebook) -> None:
    orphans = (
        "import subprocess\n"
        "own = subprocess.Popen(['sleep', '1000']).pid\n"
        "session = subprocess.Popen(['setsid', '-f', 'sleep', '1001'])\n"
        "deaf = subprocess.Popen(['sh', '-c', 'trap \"\" TERM; (sleep 1002; sleep 1003) & sleep 1004'])\n"
        "daemon = os.fork()\n"
        "if daemon == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(1000)\n"
        "time.sleep(0.2)\n"
        "pids = [own, deaf.pid, daemon]\n"
    )
    began = time.monotonic()
    kernel.run(on_ranks(orphans + "print('done')"))
    assert time.monotonic() - began < 30
    pids = kernel.value("pids")
    assert len(pids) == 3 and not any(start_ticks(pid) for pid in pids)
    assert sleepers() == [] and nothing_runs()
    assert failure(kernel, on_ranks(orphans + "raise ValueError('with children')")).name == "ValueError"
    assert sleepers() == []


def sleepers() -> list[str]:
    """The ``sleep 100N`` of the test above, wherever they are now."""
    commands = (command_of(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return [command for command in commands if re.fullmatch(r"sleep 100\d", command)]


# --------------------------------------------------------------------------------------- ranks that do not listen


def test_a_rank_that_ignores_sigterm(kernel: Notebook) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    body = "td.barrier()\nif td.rank == 1:\n    raise ValueError('peer')\ntime.sleep(100)"
    began = time.monotonic()
    error = failure(kernel, on_ranks(deaf + body, "--grace 1s"))
    assert (error.name, error.value) == ("ValueError", "peer")
    assert time.monotonic() - began < 20
    stubborn = deaf + "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun')\ntime.sleep(100)"
    cell = kernel.start(on_ranks(stubborn, "--grace 1s --watch text"))
    kernel.wait_for(cell, "[rank 0] begun")
    kernel.wait_for(cell, "[rank 1] begun")
    kernel.interrupt()
    error = failure_of(kernel, kernel.finish(cell, 20))
    assert error.name == "JobCancelled"


def test_a_rank_that_somebody_else_interrupts(kernel: Notebook) -> None:
    """The others would wait for it for ever."""
    body = "if td.rank == 1:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(100)\ntd.barrier()"
    error = failure(kernel, on_ranks(body, "--grace 1s"))
    assert "rank 1 got a SIGINT that did not come from this notebook" in error.traceback


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupts_while_a_rank_sits_in_a_collective(kernel: Notebook, presses: int) -> None:
    body = "kept = td.rank + 10\nprint('begun', flush=True)\nif td.rank == 0:\n    td.barrier()\ntime.sleep(100)"
    grace = {1: "2s", 2: "60s"}[presses]
    cell = kernel.start(on_ranks(body, f"--watch text --grace {grace}"))
    kernel.wait_for(cell, "[rank 0] begun")
    kernel.wait_for(cell, "[rank 1] begun")
    began = time.monotonic()
    kernel.interrupt()
    if presses == 2:
        kernel.wait_for(cell, "KeyboardInterrupt")  # rank 1 has heard the first
        kernel.interrupt()
    error = failure_of(kernel, kernel.finish(cell, 20))
    assert error.name == "JobCancelled"
    assert time.monotonic() - began < 15
    if presses == 1:
        assert kernel.value("kept") == 10, "rank 0 heard nothing, and what it had came back"
        assert "brought back as they were before the end:" in cell.text and "kept" in cell.text


def test_a_timeout(kernel: Notebook) -> None:
    kernel.run(on_ranks("pass"))  # warm: the time counts from the cell's start
    cell = kernel.try_run(on_ranks("kept = 4\ntime.sleep(100)", "--timeout 2s"))
    error = failure_of(kernel, cell)
    assert (error.name, error.value) == ("JobTimedOut", "ran longer than --timeout 2s")
    assert kernel.value("kept") == 4 and "timed out" in cell.displays[-1]["text/plain"]
    body = "kept = 5\nif td.rank == 0:\n    td.barrier()\ntime.sleep(100)"
    assert failure(kernel, on_ranks(body, "--timeout 1s --grace 30s")).name == "JobTimedOut"
    assert kernel.value("kept") == 5, "also of a rank in a collective"


# ------------------------------------------------------------------------------------------- what ranks run


def test_data_loader_workers(kernel: Notebook) -> None:
    kernel.run(
        "import torch\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "OFFSET = 10\n"
        "class Squares(Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return torch.tensor(i * i + OFFSET)\n"
        "def load(how):\n"
        "    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=how)\n"
        "    return [batch.tolist() for batch in loader]\n"
    )
    kernel.run(on_ranks("got = load('fork')", "--collect all"))
    assert kernel.value("got") == [[[10, 11, 14, 19]]] * 2
    kernel.run("%%distribute --ranks 1\ngot = [load('spawn'), load('forkserver')]\n")
    assert kernel.value("got") == [[[10, 11, 14, 19]]] * 2
    assert nothing_runs()


COMPILED = (
    "%%distribute --ranks 2 --collect all\n"
    "import torch\n"
    "layer = torch.nn.Linear(64, 64)\n"
    "step = torch.compile(lambda x: torch.relu(layer(x)) + 1, backend={backend!r})\n"
    "made = step(torch.ones(32, 64)) @ torch.ones(64, 3)\n"
    "made.sum().backward()\n"
    "shape = tuple(made.shape), tuple(layer.weight.grad.shape)\n"
)


def test_a_compiled_function_and_a_matmul_in_every_rank(kernel: Notebook) -> None:
    for _ in range(2):
        kernel.run(COMPILED.format(backend="eager"), timeout=100)
        assert kernel.value("shape") == [((32, 3), (64, 64))] * 2


@pytest.mark.soak
def test_a_function_compiled_by_inductor_in_every_rank(kernel: Notebook) -> None:
    kernel.run(COMPILED.format(backend="inductor"), timeout=110)
    assert kernel.value("shape") == [((32, 3), (64, 64))] * 2


def test_exceptions_keep_their_class_and_what_is_in_them(kernel: Notebook) -> None:
    kernel.run(
        "import sys, torch\n"
        "class Odd(Exception):\n"
        "    def __init__(self, code, *, why):\n"
        "        super().__init__(f'odd {code}: {why}')\n"
        "        self.code, self.extra = code, {'tensor': torch.arange(3)}\n"
    )
    error = failure(kernel, on_ranks("raise Odd(3, why='so')"))
    assert (error.name, error.value) == ("Odd", "odd 3: so")
    assert kernel.value("(type(sys.last_value) is Odd, sys.last_value.code)") == (True, 3)
    assert kernel.value("sys.last_value.extra['tensor'].tolist()") == [0, 1, 2]

    error = failure(
        kernel,
        on_ranks(
            "class Own(ValueError):\n    pass\ntd.barrier()\nif td.rank == 1:\n    raise Own('cell')\ntd.barrier()"
        ),
    )
    assert error.name == "Own"
    assert kernel.value("type(sys.last_value) is Own"), "the class that came back is the exception's"

    assert failure(kernel, on_ranks("import torch\nraise ValueError('has', torch.ones(2))")).name == "ValueError"
    assert kernel.value("sys.last_value.args[1].tolist()") == [1.0, 1.0]

    chained = (
        "try:\n    {}['key']\nexcept KeyError as cause:\n    error = ValueError('outer')\n"
        "    error.__notes__ = ['look here']\n    raise error from cause"
    )
    error = failure(kernel, on_ranks(chained))
    assert "KeyError: 'key'" in error.traceback and "direct cause" in error.traceback and "look here" in error.traceback
    assert kernel.value("repr(sys.last_value.__cause__), sys.last_value.__notes__[0]") == (
        "KeyError('key')",
        "look here",
    )
    kernel.run("try:\n    td.last.raise_for_state()\nexcept ValueError as error:\n    notes = error.__notes__")
    assert any("Cell In[" in note and "raise error from cause" in note for note in kernel.value("notes"))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_is_whole_although_its_rank_is_stopped_while_it_writes_it(kernel: Notebook, rank: int) -> None:
    kernel.run(
        "import os, signal, sys\n"
        "class Stopped:\n"
        "    def __reduce__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return (str, ('whole',))\n"
        "class Odd(Exception):\n"
        "    pass\n"
    )
    failure(
        kernel,
        on_ranks(f"error = Odd('odd')\nerror.value = Stopped()\nif td.rank == {rank}:\n    raise error\ntd.barrier()"),
    )
    assert kernel.value("(type(sys.last_value) is Odd, getattr(sys.last_value, 'value', None))") == (True, "whole")


@pytest.mark.parametrize("raised", ["KeyboardInterrupt('mine')", "SystemExit(4)", "GeneratorExit()"])
def test_exceptions_that_would_end_the_kernel(kernel: Notebook, raised: str) -> None:
    name = raised.partition("(")[0]
    error = failure(kernel, on_ranks(f"value = 1\ntd.barrier()\nraise {raised}"))
    assert error.name == "RankFailed" and error.value.startswith(name)
    assert f"----> 6 raise {raised}" in error.traceback
    assert kernel.value("value") == 1 and catalog.jobs()[0].state == "failed"


def test_shells_magics_keyboards_and_awaits(kernel: Notebook) -> None:
    kernel.run(
        "def ask():\n    return input('? ')\nword, other = 'captured', 5\ndef say():\n    !echo said $other {other + 1}"
    )
    cell = kernel.run(on_ranks("!echo from $((1 + 1)) {word}\nfound = !echo {word} again\nfound", "--watch text"))
    assert cell.stdout.count("from 2 captured") == 2
    assert kernel.value("list(found)") == ["captured again"]
    own = kernel.run(
        on_ranks("say()\nmine = td.rank\n!echo $mine, '$mine', $$mine\n!echo home=$HOME $word", "--watch text")
    )
    assert own.stdout.count("said 5 6") == 2
    assert "[rank 1] 1, $mine," in own.stdout, "as IPython expands it"
    assert f"home={Path.home()}" in own.stdout
    before = len(catalog.jobs())
    for magic in ("%timeit 1", "%cd /", "x = %time 1", "if word:\n    %matplotlib inline"):
        error = failure(kernel, on_ranks(magic))
        assert error.name == "CaptureError" and "line " in error.value
        assert re.search(r"%\w+", magic).group() in error.value  # type: ignore[union-attr]
    assert len(catalog.jobs()) == before, "nothing started"
    error = failure(kernel, on_ranks("ask()"))
    assert (
        "input() does not work: a rank has no keyboard" in error.value
        and "set the value in a cell before" in error.value
    )
    assert re.search(r"line 2, in ask\n(.*\n)*----> 2 {5}return input", error.traceback)
    error = failure(kernel, on_ranks("breakpoint()"))
    assert "breakpoint() does not work" in error.value and "----> 4 breakpoint()" in error.traceback
    kernel.run(
        on_ranks("import asyncio\nasync def five():\n    await asyncio.sleep(0.01)\n    return 5\nv = await five()")
    )
    assert kernel.value("v") == 5


def test_what_a_cell_shows(kernel: Notebook) -> None:
    timed = kernel.run("%%time\n" + on_ranks("3 + 4"))
    assert "Wall time" in timed.stdout and (timed.result or {})["text/plain"] == "7"
    frame = kernel.run(on_ranks("import pandas as pd\npd.DataFrame({'a': [1, 2]})")).result or {}
    assert "<table" in frame["text/html"]
    drawn = "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\naxes.plot([1, 2]){}\nfigure"
    cell = kernel.run(on_ranks(drawn.format("")), timeout=100)
    assert sum("image/png" in bundle for bundle in [*cell.displays, cell.result or {}]) == 1
    assert kernel.run(on_ranks("5;")).result is None


def test_names_that_are_asked_for(kernel: Notebook) -> None:
    cell = kernel.run(on_ranks("number, pair = td.rank, [td.rank] * 2\nnumber", "--collect all"))
    assert (cell.result or {})["text/plain"] == "[0, 1]"
    assert kernel.value("(number, pair)") == ([0, 1], [[0, 0], [1, 1]])
    cell = kernel.run(on_ranks("first, second = 1, 2", "--out second,third"))
    assert kernel.value("second") == 2 and not has(kernel, "first")
    assert "stayed behind: third" in cell.text and "no such name" in cell.text
    kernel.run("import threading\nlock = threading.Lock()")
    cell = kernel.run(on_ranks("seen = 'lock' in globals()\nlock = 3", "--exclude lock"))
    assert kernel.value("(seen, lock)") == (False, 3)


# -------------------------------------------------------------------------------------- the job and the notebook


def test_a_cell_run_at_once_from_two_kernels(new_notebook: Callable[[], Notebook]) -> None:
    notebooks = [new_notebook(), new_notebook()]
    for name, notebook in zip("ab", notebooks, strict=True):
        notebook.run(f"NAME = {name!r}")
    source = on_ranks("td.barrier()\ntime.sleep(0.3)\nwho = NAME, td.gather(NAME + str(td.rank))")
    cells = [notebook.start(source) for notebook in notebooks]
    for notebook, cell in zip(notebooks, cells, strict=True):
        assert notebook.finish(cell).status == "ok", cell.text
    assert [notebook.value("who") for notebook in notebooks] == [("a", ["a0", "a1"]), ("b", ["b0", "b1"])]
    assert len(catalog.jobs()) == 2


def test_a_background_job_and_its_rerun(kernel: Notebook) -> None:
    kernel.run("losses = []\nimport jupyter_torchdist as td")
    kernel.run(on_ranks("time.sleep(0.3)\nlosses.append(1)\nprint('done')\nfinal = 3", "--background --name bg"))
    error = failure_early(kernel, "td.last.bring()")
    assert "no results yet" in error.value and "job.wait()" in error.value
    kernel.run("state = td.last.wait()")
    assert kernel.value("(state.state, losses, 'final' in globals())") == ("succeeded", [], False)
    kernel.run("td.last.bring()")
    assert kernel.value("(losses, final)") == ([1], 3)
    assert "[rank 1] done" in kernel.run("%dist rerun bg").text
    assert [job.state for job in catalog.jobs()] == ["succeeded"] * 2
    kernel.run(on_ranks("time.sleep(0.3)\nraise KeyError('later')", "--background --name fails"))
    kernel.run("td.last.wait()")
    error = failure_early(kernel, "td.last.raise_for_state()")
    assert error.name == "KeyError" and "raise KeyError('later')" in error.traceback, "with the rank's lines"


def failure_early(notebook: Notebook, source: str) -> CellError:
    """What a cell raised while a job may still run."""
    cell = notebook.try_run(source)
    assert cell.error is not None
    return cell.error


TICKS = "data.append(4)\nfor number in range(15):\n    print('tick', number)\n    time.sleep(0.1)\nanswer = 42\ndata"


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_job_outlives_its_kernel(kernel: Notebook, how: str) -> None:
    kernel.run("data = [1, 2, 3]")
    if how == "restart":
        kernel.run(on_ranks(TICKS, "--background --name survivor"))
    else:
        cell = kernel.start(on_ranks(TICKS, "--watch text --name survivor"))
        kernel.wait_for(cell, "tick 0")
        kernel.kill()
    kernel.restart()
    kernel.load()
    kernel.run("%dist attach survivor")
    kernel.run("import jupyter_torchdist as td\ntd.last.wait()")
    cell = kernel.run("%dist attach survivor")
    assert "[rank 0] tick 14" in cell.text and "[rank 1] tick 14" in cell.text and "succeeded" in cell.text
    kernel.run("td.last.bring()")
    assert kernel.value("(answer, data, td.last.value)") == (42, [1, 2, 3, 4], [1, 2, 3, 4])
    assert kernel.value("td.last.logs(1)") == "".join(f"tick {number}\n" for number in range(15))


def test_an_attached_job_shows_the_whole_failure(kernel: Notebook) -> None:
    """Of a long traceback the picture shows only the last lines."""
    kernel.run("%%distribute --ranks 2 --background --name broken\ndef f(n): f(n - 1) if n else 1 / 0\nf(20)")
    kernel.run("import jupyter_torchdist as td\ntd.last.wait()")
    text = kernel.run("%dist attach broken").text
    assert "Traceback (most recent call last)" in text
    assert "----> 3 f(20)" in text and "ZeroDivisionError: division by zero" in text


def test_curves_progress_and_logs(kernel: Notebook) -> None:
    cell = kernel.run(
        on_ranks(
            "import torch\n"
            "model = torch.nn.Linear(2, 1)\n"
            "for step in td.progress(range(5), desc='training'):\n"
            "    loss = model(torch.ones(3, 2)).pow(2).mean()\n"
            "    loss.backward()\n"
            "    td.log(accuracy=step / 5)\n"
        )
    )
    assert "training 5 of 5 (100 %)" in cell.text and "accuracy 0.8" in cell.text and "loss" in cell.text
    assert curves(kernel, "sorted(set(metrics['rank']))") == [0, 1]
    assert curves(kernel, "(int(metrics['loss'].count()), int(metrics['accuracy'].count()))") == (10, 10)
    assert curves(kernel, "metrics[metrics['rank'] == 1]['accuracy'].dropna().tolist()") == [0.0, 0.2, 0.4, 0.6, 0.8]


def test_the_ranks_are_in_the_notebooks_world(kernel: Notebook, home: Path, tmp_path: Path) -> None:
    secrets = ["swordfish-one", "swordfish-two", "swordfish-three"]
    kernel.run(
        f"import os, sys\nos.environ['SECRET_A'] = {secrets[0]!r}\nos.makedirs('below')\nos.chdir('below')\n"
        "os.environ.pop('OMP_NUM_THREADS', None)\nsys.path.insert(0, '/nowhere/special')"
    )
    kernel.run(f"%env SECRET_B={secrets[1]}")
    body = (
        "import torch\n"
        "secrets = [os.environ.get('SECRET_' + letter, '')[10:] for letter in 'ABC']\n"
        "seen = secrets, os.getcwd(), '/nowhere/special' in sys.path\n"
        "threads = int(os.environ['OMP_NUM_THREADS']), torch.get_num_threads()\n"
    )
    kernel.run(on_ranks(body, f"--env SECRET_C={secrets[2]}"))
    assert kernel.value("seen") == (["one", "two", "three"], str(tmp_path / "below"), True)
    wanted = max(1, len(os.sched_getaffinity(0)) // 2)
    assert kernel.value("threads") == (wanted, wanted)
    assert not has(kernel, "SECRET_C") and kernel.value("os.environ.get('SECRET_C')") is None
    kernel.run("%env OMP_NUM_THREADS=3")
    kernel.run(on_ranks(body))
    assert kernel.value("threads") == (3, 3), "a number of the user's own stands"
    written = {str(path): secret for path, secret in found_in(home, secrets)}
    assert written == {}, "the environment's values are on disk"


def found_in(root: Path, words: Iterable[str]) -> Iterable[tuple[Path, str]]:
    """Files below ``root`` in which one of the words stands."""
    for path in root.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            yield from ((path, word) for word in words if word.encode() in content)


def test_nothing_of_these_jobs_waits_for_the_next_test(kernel: Notebook) -> None:
    """A rank that left descriptors, threads and handlers in odd states does so in its own process only."""
    kernel.run(on_ranks("os.closerange(0, 3)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.environ.clear()"))
    kernel.run(on_ranks("value = td.gather(td.rank), len(os.environ) > 3"))
    assert kernel.value("value") == ([0, 1], True)
    assert wait_until(nothing_runs)


SLOW = (
    "import os, time\n"
    "class Slow:\n"
    "    def __init__(self, seconds, ranks):\n"
    "        self.given = seconds, ranks\n"
    "    def __setstate__(self, state):\n"
    "        self.__dict__.update(state)\n"
    "        seconds, ranks = self.given\n"
    "        if os.environ.get('RANK') in ranks:\n"
    "            time.sleep(seconds)\n"
)
"""A value that takes its time, without computing, before the first line of the cell that uses it."""


@pytest.mark.soak
def test_a_rank_that_does_not_begin_is_named_and_waited_for(kernel: Notebook) -> None:
    kernel.run(SLOW + "slow = Slow(60, ('1',))")
    text = kernel.run(on_ranks("td.barrier()\nprint('begun', slow.given[0])"), timeout=110).text
    assert re.search(r"nothing happens on rank 1 \(\S+\) before the cell's first line; see \S+/rank-\*\.stacks", text)
    assert "begun 60" in text


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_ranks_that_never_begin_are_started_once_more_and_ended(kernel: Notebook) -> None:
    kernel.run(SLOW + "slow = Slow(1e6, ('0', '1'))")
    cell = kernel.try_run(on_ranks("slow"), timeout=200)
    assert "nothing happens on rank 0, 1" in cell.text and "started again with --fresh" in cell.text
    assert "ranks hung before their first user line" in failure_of(kernel, cell).value
