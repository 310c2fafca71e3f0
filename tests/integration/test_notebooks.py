"""The quickstart runs wherever a notebook runs: nbclient, papermill, ``jupyter execute``, terminal IPython."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pexpect
import pytest
from nbclient import NotebookClient

from jupyter_torchdist.store import catalog
from tests.notebook import plain

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def brief(tmp_path: Path) -> Path:
    path = tmp_path / "brief.ipynb"
    path.write_text(briefly(NOTEBOOK.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def briefly(text: str) -> str:
    """The quickstart with fewer epochs: one front end shows that it learns, each that it runs."""
    for many, few in (("epochs=6)", "epochs=2)"), ("epochs=15)", "epochs=3)")):
        assert many in text
        text = text.replace(many, few)
    return text


def check_executed(notebook: Any) -> None:
    """Every cell ran, the failure is shown with the notebook's lines, accuracy and picture are real."""
    cells = {cell["id"]: cell for cell in notebook.cells if cell.cell_type == "code"}
    assert all(cell.execution_count for cell in cells.values())
    check_failure(texts(cells["failure-shown"]), texts(cells["failure-raised"]))
    assert any("image/png" in out.get("data", {}) for out in cells["picture"].outputs)
    check_text(texts(cells["bring"]))


def texts(cell: Any) -> str:
    """Everything that can be read below the cell."""
    pieces = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
    return plain("\n".join(pieces))


def check_failure(shown: str, raised: str) -> None:
    assert "Traceback (most recent call last)" in shown
    assert "loss = F.cross_entropy(DigitNet()(x), y)" in shown
    assert "IndexError: Target" in raised


def check_text(text: str, least: tuple[float, float] = (40, 50)) -> None:
    """The notebook's last line: ``6 epochs: 95.6%, 15 epochs: 97.3%``; a guess is right in 10 %."""
    line = next(line for line in text.splitlines() if line.startswith("6 epochs: "))
    first, second = (float(part.split(": ")[1].rstrip("%")) for part in line.split(", "))
    assert least[0] < first <= 100
    assert least[1] < second <= 100


def check_jobs(home: Path) -> None:
    assert sorted(job.state for job in catalog.jobs()) == ["failed", "succeeded", "succeeded"]
    assert home.is_dir()


@pytest.mark.soak
def test_papermill(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.ipynb"
    papermill.execute_notebook(str(NOTEBOOK), str(target), progress_bar=False, cwd=str(tmp_path))
    notebook = nbformat.read(target, as_version=4)
    check_executed(notebook)
    check_text(texts(next(cell for cell in notebook.cells if cell["id"] == "bring")), least=(80, 90))
    check_jobs(home)


@pytest.mark.soak  # papermill's client is this one with more, and so is that of jupyter execute
def test_nbclient(home: Path, brief: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(brief, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check_executed(notebook)
    check_jobs(home)


@pytest.mark.soak
def test_jupyter_execute(home: Path, brief: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.ipynb"
    command = [sys.executable, "-m", "jupyter", "execute", "--output", str(target), str(brief)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    check_executed(nbformat.read(target, as_version=4))
    check_jobs(home)


@pytest.fixture
def terminal(home: Path, tmp_path: Path) -> Iterator[Any]:
    """IPython in a terminal of 40 lines by 120 columns, at its first prompt."""
    environ = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
    arguments = ["-m", "IPython", "--no-banner", "--no-confirm-exit", "--colors=nocolor"]
    child = pexpect.spawn(
        sys.executable, arguments, env=environ, cwd=str(tmp_path), dimensions=(40, 120), encoding="utf-8", timeout=90
    )
    child.expect_exact("In [1]:")
    yield child
    child.sendline("exit")
    child.expect(pexpect.EOF)
    child.close()


def test_terminal(terminal: Any, brief: Path, home: Path) -> None:
    """The cells pasted one by one, as a person would, into plain terminal IPython."""
    notebook = nbformat.read(brief, as_version=4)
    seen = {}
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        # Bracketed paste keeps the cell as it is; Escape, Enter runs it whatever its last line.
        terminal.send("\x1b[200~" + cell.source + "\x1b[201~")
        terminal.send("\x1b\r")
        terminal.expect_exact(f"In [{number + 1}]:")
        # The prompt turns bracketed paste off when it hands the cell over: what follows is output.
        seen[cell["id"]] = plain(terminal.before.rpartition("\x1b[?2004l")[2]).replace("\r", "")
    assert {name for name, text in seen.items() if "Traceback" in text} == {"failure-shown"}
    check_failure(seen["failure-shown"], seen["failure-raised"])
    check_text("\n".join(line.strip() for line in seen["bring"].splitlines()))
    check_jobs(home)
