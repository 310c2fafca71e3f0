"""What a cell is before it runs: text, label, first line, names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class

from jupyter_torchdist.capture.closure import PROVIDED
from jupyter_torchdist.kernel import cell
from jupyter_torchdist.kernel.magic import with_body


@magics_class
class Reader(Magics):
    """Reads the cell under ``%%read``, as ``%%distribute`` does."""

    seen: cell.Cell | None = None
    own: frozenset[str] = frozenset()

    @cell_magic
    def read(self, line: str, body: str) -> None:
        shell: Any = self.shell
        type(self).seen = cell.read(shell, body)
        type(self).own = cell.shells_own(shell)


@pytest.fixture
def shell() -> Iterator[Any]:
    InteractiveShell.clear_instance()
    shell: Any = InteractiveShell.instance()
    shell.register_magics(Reader)
    yield shell
    shell.history_manager.end_session()
    InteractiveShell.clear_instance()


def read(shell: Any, text: str) -> cell.Cell:
    shell.run_cell(text, store_history=True).raise_error()
    assert Reader.seen is not None
    return Reader.seen


@pytest.mark.parametrize(
    ("text", "first_line"),
    [
        ("%%read\nx = 1\ny = 2", 2),
        ("%%read --option\n\n\nx = 1\n", 2),
        ("%%time\n%%read\nx = 1", 3),
        ("\n\n%%read\nx = 1\n", 4),
        ("%%time\n\n%%read\nx = 1\n\n\n", 4),
    ],
)
def test_lines_are_counted_as_the_user_sees_them(shell: Any, text: str, first_line: int) -> None:
    found = read(shell, text)
    assert found.first_line == first_line
    assert found.source.lstrip().startswith("x = 1")


def test_the_label_is_the_cells_number_and_other_cells_keep_theirs(shell: Any) -> None:
    shell.run_cell("def f(): pass", store_history=True)
    found = read(shell, "%%read\nf()")
    assert found.label == "Cell In[2]"
    assert found.labels[shell.user_ns["f"].__code__.co_filename] == "Cell In[1]"


def test_times_become_clocks_and_strings_stay(shell: Any) -> None:
    text = '%%read\n%time x = f(\'a\')\nif x:\n    %time g()\ntext = """\n%time h()\n"""\n'
    assert read(shell, text).source.split("\n")[:7] == [
        "with get_ipython().clocked(): x = f('a')",
        "if x:",
        "    with get_ipython().clocked(): g()",
        'text = """',
        "%time h()",
        '"""',
        "",
    ]
    assert read(shell, "%%read\n%%time\nx = 1\n").source.split("\n")[:2] == ["get_ipython().clock()", "x = 1"]


def test_shell_commands_become_calls(shell: Any) -> None:
    source = read(shell, "%%read\n!ls {x}\nfiles = !ls\n%cd /\n").source
    assert source.split("\n")[:3] == [
        "get_ipython().system('ls {x}')",
        "files = get_ipython().getoutput('ls')",
        "get_ipython().run_line_magic('cd', '/')",
    ]


def test_future_imports_of_the_notebook_hold(shell: Any) -> None:
    shell.run_cell("from __future__ import annotations", store_history=True)
    flags = read(shell, "%%read\nx = 1").flags
    assert flags & 0x1000000


def test_the_shells_own_names_are_not_the_notebooks(shell: Any) -> None:
    shell.run_cell("value = 3\nvalue", store_history=True)
    shell.run_cell("exit = 'mine'\n_private = 1", store_history=True)
    read(shell, "%%read\nx = 1")
    assert not Reader.own & {"value", "exit", "_private"}
    assert {"In", "Out", "_i", "_i1", "_ih", "get_ipython", "quit", "open"} <= Reader.own
    assert {"__name__", "__builtins__"} <= PROVIDED, "each process has its own"
    assert "_1" not in Reader.own, "an earlier cell's value is a value"


def test_options_may_stand_alone() -> None:
    assert with_body(["%%distribute --help\n"]) == ["%%distribute --help\n", "\n"]
    assert with_body(["%%distribute\n", "x\n"]) == ["%%distribute\n", "x\n"]
    assert with_body(["x = 1\n"]) == ["x = 1\n"]
