"""Cells under ``%%distribute`` in a real kernel: what a person sees, and what the notebook has afterwards."""

from __future__ import annotations

import json
import re

import IPython
import pytest

from jupyter_torchdist.store import catalog
from tests.notebook import Notebook


@pytest.fixture
def kernel(one_kernel: Notebook) -> Notebook:
    """No test here needs a kernel of its own."""
    return one_kernel


def test_every_line_of_every_rank_is_there_once(kernel: Notebook) -> None:
    cell = kernel.run(
        "%%distribute --ranks 2 --watch text\n"
        "import sys\n"
        "import jupyter_torchdist as td\n"
        "for number in range(1000):\n"
        "    print('line', number)\n"
        "print('last', end='')\n"
        "print('oops', file=sys.stderr)\n"
    )
    for rank in (0, 1):
        lines = re.findall(rf"^\[rank {rank}\] line (\d+)$", cell.stdout, re.MULTILINE)
        assert lines == [str(number) for number in range(1000)]
        assert f"[rank {rank}] last\n" in cell.stdout
        assert f"[rank {rank}] oops\n" in cell.stderr


def test_the_picture_is_one_bounded_output(kernel: Notebook) -> None:
    cell = kernel.run(
        "%%distribute --ranks 2\n"
        "import jupyter_torchdist as td\n"
        "for step in td.progress(range(50), desc='steps'):\n"
        "    print('<b>' + 'x' * 5000)\n"
        "    td.log(loss=1 / (step + 1))\n"
    )
    kinds = [message["msg_type"] for _, message in cell.messages if "display" in message["msg_type"]]
    assert kinds[0] == "display_data" and set(kinds[1:]) <= {"update_display_data"}
    last = cell.displays[-1]
    assert "succeeded" in last["text/plain"] and "loss 0.02" in last["text/plain"]
    assert "steps 50 of 50 (100 %)" in last["text/plain"]
    assert "<b>x" not in last["text/html"] and "&lt;b&gt;x" in last["text/html"]
    assert len(last["text/html"]) < 30_000
    assert cell.stdout == cell.stderr == ""


def test_the_last_value_is_a_real_one(kernel: Notebook) -> None:
    cell = kernel.run(
        "%%distribute --ranks 2\nimport jupyter_torchdist as td\nanswer = [td.rank, td.world_size]\nanswer"
    )
    assert (cell.result or {})["text/plain"] == "[0, 2]"
    assert kernel.value("_") == [0, 2]
    assert kernel.value("answer") == [0, 2]
    quiet = kernel.run("%%distribute --ranks 2\nanswer;")
    assert quiet.result is None


def test_a_semicolon_hides_what_only_the_rank_could_show(kernel: Notebook) -> None:
    source = "%%distribute --ranks 1\n(number for number in range(3))"
    assert "generator object" in kernel.run(source).text
    assert "generator object" not in kernel.run(source + ";").text


def test_names_come_back_and_objects_are_updated_in_place(kernel: Notebook) -> None:
    kernel.run("losses = [1.0]\nalias = losses\n")
    kernel.run(
        "%%distribute --ranks 2\nfor step in range(3):\n    losses.append(step)\ndef twice(x):\n    return 2 * x\n"
    )
    assert kernel.value("alias, alias is losses, twice(4), step") == ([1.0, 0, 1, 2], True, 8, 2)


def test_what_stays_behind_is_named(kernel: Notebook) -> None:
    cell = kernel.run("%%distribute --ranks 1\nvalue = 3\nfile = open('/dev/null')\n")
    assert kernel.value("value") == 3
    assert kernel.value("'file' in globals()") is False
    assert "stayed behind: file: " in cell.text


def test_all_ranks_values_come_on_request(kernel: Notebook) -> None:
    cell = kernel.run(
        "%%distribute --ranks 2 --collect all\nimport jupyter_torchdist as td\nnumber = td.rank * 10\nnumber"
    )
    assert kernel.value("number") == [0, 10]
    assert (cell.result or {})["text/plain"] == "[0, 10]"


def test_the_first_failing_ranks_exception_is_raised_with_the_notebooks_lines(kernel: Notebook) -> None:
    kernel.run("def check(rank):\n    if rank == 1:\n        raise LookupError('no such thing')\n")
    cell = kernel.try_run(
        "%%distribute --ranks 2\n"
        "import time\n"
        "import jupyter_torchdist as td\n"
        "before = 'set'\n"
        "check(td.rank)\n"
        "time.sleep(60)\n"
    )
    assert cell.error is not None
    assert (cell.error.name, cell.error.value) == ("LookupError", "no such thing")
    assert "rank 1 on" in cell.error.traceback
    assert re.search(r"Cell In\[\d+\], line 5\n(.*\n)*----> 5 check\(td\.rank\)", cell.error.traceback)
    assert re.search(r"Cell In\[\d+\], line 3, in check\n(.*\n)*----> 3 {9}raise LookupError", cell.error.traceback)
    assert "1 other rank was stopped because of this" in cell.error.traceback
    assert "jupyter_torchdist" not in cell.error.traceback.replace("import jupyter_torchdist as td", "")
    assert kernel.value("__import__('sys').last_value.__class__ is LookupError") is True


def test_a_class_of_the_notebook_is_raised_as_itself(kernel: Notebook) -> None:
    kernel.run(
        "class Odd(Exception):\n"
        "    def __init__(self, code, *, why):\n"
        "        super().__init__(why)\n"
        "        self.code = code\n"
    )
    cell = kernel.try_run("%%distribute --ranks 1\nraise Odd(3, why='so')")
    assert cell.error is not None and cell.error.name == "Odd"
    assert kernel.value("(type(__import__('sys').last_value) is Odd, __import__('sys').last_value.code)") == (True, 3)


@pytest.mark.parametrize(
    ("source", "name", "value"),
    [("exec('1 +')", "SyntaxError", "invalid syntax"), ("raise SystemExit(3)", "RankFailed", "SystemExit: 3")],
)
def test_exceptions_that_ipython_treats_apart(kernel: Notebook, source: str, name: str, value: str) -> None:
    cell = kernel.try_run(f"%%distribute --ranks 1\nx = 1\n{source}\n")
    assert cell.error is not None and cell.status == "error"
    assert cell.error.name == name and value in cell.error.value
    assert f"----> 3 {source}" in cell.error.traceback
    assert "run_cell_magic" not in cell.error.traceback
    assert kernel.run("1 + 1").result is not None, "the kernel is alive"


@pytest.mark.parametrize(
    ("cell", "name", "parts"),
    [
        ("%%distribute --rank 2\npass", "OptionError", ["--rank", "did you mean --ranks?"]),
        ("%%distribute --ranks 0\npass", "OptionError", ["--ranks", "at least 1"]),
        ("%%distribute --ranks x\npass", "OptionError", ["whole number"]),
        ("%%distribute --ranks 1 --name 'a\npass", "OptionError", ["quotation mark"]),
        ("%%distribute --gpus 512\npass", "ResourceError", ["--ranks 512"]),
        ("%%distribute --ranks 1\nx = 1\ny = = 2\n", "CellSyntaxError", ["Cell In[", "line 3", "y = = 2", "^"]),
        ("%%distribute --ranks 1\nprint(undefned)", "UndefinedName", ["undefned"]),
        ("%%distribute --ranks 1\n   \n", "UserError", ["empty"]),
        ("%%distribute --ranks 1\n%cd /", "", ["cd"]),
    ],
)
def test_mistakes_are_told_in_words_and_nothing_starts(
    kernel: Notebook, cell: str, name: str, parts: list[str]
) -> None:
    found = kernel.try_run(cell)
    assert found.error is not None
    assert not name or found.error.name == name
    for part in parts:
        assert part in found.error.traceback
    assert "Traceback" not in found.error.traceback and "run_cell_magic" not in found.error.traceback
    assert catalog.jobs() == []


def test_under_time(kernel: Notebook) -> None:
    cell = kernel.try_run("%%time\n%%distribute --ranks 1\nx = 1\nraise ValueError(x)")
    assert cell.error is not None
    assert re.search(r"----> 4 raise ValueError\(x\)", cell.error.traceback)
    assert ("Wall time" in cell.stdout) == (IPython.version_info[0] > 8)  # IPython 8 shows the traceback alone
    good = kernel.run("%%time\n%%distribute --ranks 1\nx = 41\nx + 1")
    assert (good.result or {})["text/plain"] == "42" and kernel.value("x") == 41


def test_rich_output_of_rank_0(kernel: Notebook) -> None:
    cell = kernel.run(
        "%%distribute --ranks 2\n"
        "import pandas as pd\n"
        "import matplotlib.pyplot as plt\n"
        "display(pd.DataFrame({'a': [1, 2]}))\n"
        "figure, axes = plt.subplots()\n"
        "axes.plot([1, 2])\n"
        "plt.show()\n"
        "pd.DataFrame({'b': [3]})\n",
        timeout=120,
    )
    shown = [bundle for bundle in cell.displays if "torchdist-job" not in bundle.get("text/html", "")]
    assert sum("<table" in bundle.get("text/html", "") for bundle in shown) == 1
    assert sum("image/png" in bundle for bundle in shown) == 1
    assert "<table" in (cell.result or {})["text/html"]
    assert kernel.value("type(_).__name__") == "DataFrame"


def test_a_figure_as_the_last_line_is_shown_once(kernel: Notebook) -> None:
    cell = kernel.run(
        "%%distribute --ranks 1\n"
        "import matplotlib.pyplot as plt\n"
        "figure = plt.figure()\n"
        "figure.add_subplot().plot([1, 2])\n"
        "figure\n",
        timeout=120,
    )
    bundles = [*cell.displays, cell.result or {}]
    assert sum("image/png" in bundle for bundle in bundles) == 1


def test_the_plan_starts_nothing(kernel: Notebook) -> None:
    kernel.run("import json as j\nvalue = [1] * 10\n")
    cell = kernel.run("%%distribute --ranks 2 --plan\nprint(j.dumps(value))\n")
    for part in ("2 ranks, backend gloo", "value", "json", "line 2"):
        assert part in cell.stdout
    assert catalog.jobs() == []


def test_help_stands_alone(kernel: Notebook) -> None:
    assert "--grace TIME" in kernel.run("%%distribute --help").stdout
    assert "--grace TIME" in kernel.run("%%distribute --help\npass").stdout


def test_defaults_lie_beside_the_notebook(kernel: Notebook) -> None:
    defaults = kernel.cwd / "torchdist.toml"
    defaults.write_text("ranks = 2\nwatch = 'text'\n")
    try:
        cell = kernel.run("%%distribute\nprint('hello')\n")
    finally:
        defaults.unlink()
    assert sorted(cell.stdout.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]


def test_the_kernel_stays_clean(kernel: Notebook) -> None:
    look = (
        "import os, signal, sys, threading\n"
        "def look():\n"
        "    threads = [thread.name for thread in threading.enumerate() if not isinstance(thread, threading.Timer)]\n"
        "    return sorted(os.environ), 'torch' in sys.modules, signal.getsignal(signal.SIGINT), sorted(threads)\n"
        "before, names = look(), set(globals())\n"
    )
    kernel.run(look)
    kernel.run("%%distribute --ranks 2\nimport torch\nprint(torch.ones(2))\n")
    assert kernel.value("look()[:1] == before[:1] and look()[2:] == before[2:]") is True
    new = kernel.value("sorted(name for name in set(globals()) - names if not name.startswith('_'))")
    assert new == ["before", "names", "torch"]


def test_loading_twice_and_unloading(kernel: Notebook) -> None:
    kernel.run("%load_ext jupyter_torchdist\nget_ipython().extension_manager.load_extension('jupyter_torchdist')")
    kernel.run("%reload_ext jupyter_torchdist")
    assert "hello" in kernel.run("%%distribute --ranks 1\nprint('hello')").text
    kernel.run("%unload_ext jupyter_torchdist")
    assert kernel.try_run("%%distribute --ranks 1\npass").stderr.startswith("UsageError")
    kernel.load()


def test_the_job_is_at_hand(kernel: Notebook) -> None:
    kernel.run("import jupyter_torchdist as td")
    kernel.run("%%distribute --ranks 2 --name mine\nprint('hello')\nvalue = 3")
    assert kernel.value("(td.last.name, td.last.state.state, td.last.result()['value'])") == ("mine", "succeeded", 3)
    assert kernel.value("td.last.logs(1)") == "hello\n"


def test_a_cell_run_in_a_thread(kernel: Notebook) -> None:
    cell = kernel.run(
        "import threading\n"
        "arguments = 'distribute', '--ranks 2 --watch text', 'print(6 * 7)'\n"
        "thread = threading.Thread(target=get_ipython().run_cell_magic, args=arguments)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    assert sorted(cell.stdout.splitlines()) == ["[rank 0] 42", "[rank 1] 42"]


def test_saved_outputs_are_small(kernel: Notebook) -> None:
    cell = kernel.run("%%distribute --ranks 2\nfor number in range(20000):\n    print('x' * 100)\n")
    assert len(json.dumps(cell.displays[-1])) < 60_000
