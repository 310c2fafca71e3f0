"""The same magics in a plain terminal: lines as text, Ctrl-C, no widgets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from jupyter_torchdist.store import catalog


@pytest.fixture
def terminal(home: Path, tmp_path: Path) -> Iterator[Any]:
    """IPython in a terminal of 40 lines by 120 columns, the extension loaded, at its second prompt."""
    environ: Any = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "IPYTHONDIR": str(tmp_path / "ip")}
    words = ["-m", "IPython", "--no-banner", "--no-confirm-exit", "--colors=nocolor"]
    child = pexpect.spawn(
        sys.executable, words, env=environ, cwd=str(tmp_path), dimensions=(40, 120), encoding="utf-8", timeout=60
    )
    child.expect_exact("In [1]:")
    cell(child, "%load_ext jupyter_torchdist")
    child.expect_exact("In [2]:")
    yield child
    child.sendline("exit")
    child.expect(pexpect.EOF, timeout=20)
    child.close()


def cell(terminal: Any, *lines: str) -> None:
    """Type a cell: a bracketed paste keeps it as it is, Escape and Enter run it."""
    terminal.send("\x1b[200~" + "\n".join(lines) + "\x1b[201~")
    terminal.send("\x1b\r")
    terminal.expect_exact("\x1b[?2004l")  # the prompt hands the cell over: what follows is output


def test_a_cell_in_a_terminal(terminal: Any) -> None:
    cell(terminal, "%%distribute --ranks 2", "print('hello')", "6 * 7")
    terminal.expect(r"\[rank \d\] hello\r\n\[rank \d\] hello")
    terminal.expect(r"Out\[2\]: \S*42")
    terminal.expect_exact("In [3]:")
    cell(terminal, "%%distribute --ranks 2", "x = 1", "raise ValueError('bad')")
    terminal.expect(r"----> 3 raise ValueError\('bad'\)")
    terminal.expect("ValueError: bad")
    terminal.expect_exact("In [4]:")
    cell(terminal, "%dist")
    terminal.expect("failed")
    terminal.expect_exact("In [5]:")


def test_ctrl_c_in_a_terminal(terminal: Any) -> None:
    cell(terminal, "%%distribute --ranks 2", "import time", "value = 1", "print('asleep')", "time.sleep(100)")
    terminal.expect(r"\[rank \d\] asleep\r\n\[rank \d\] asleep")
    terminal.sendintr()
    terminal.expect("brought back as they were before the end: .*value")
    terminal.expect("JobCancelled")
    terminal.expect_exact("In [3]:")
    assert [summary.state for summary in catalog.jobs()] == ["cancelled"]
