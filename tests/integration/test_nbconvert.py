"""A notebook with jobs as nbconvert prints it: what was saved is whole without a kernel, a server and our scripts."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbclient import NotebookClient
from nbconvert import HTMLExporter, LatexExporter
from nbconvert.filters.latex import escape_latex

from jupyter_torchdist.protocol.feed import MIME_TYPE
from tests.notebook import apart

WIDGET = "application/vnd.jupyter.widget-view+json"

SET_UP = """\
%load_ext jupyter_torchdist
import pathlib
import jupyter_torchdist.kernel.widget as w
w.SCRIPT, w.JobWidget._esm = pathlib.Path(w.__file__), "export default {}"
w.pump.LINGER = 600
"""
"""A widget without its script, which need not have been built here, and which stays until the kernel ends."""
TRAINS = """\
%%distribute --ranks 2
import os
import jupyter_torchdist as td
for step in range(20):
    td.log(loss=1 / (step + 1))
    print("\\x1b[32mstep\\x1b[0m", step, "of rank", os.environ["RANK"], "<b>as it is</b>")
"""
FAILS = """\
%%distribute --ranks 2
import jupyter_torchdist as td
if td.rank == 1:
    raise ValueError("no good: $x_1$ is 50 % & {not} <less>")
td.barrier()
"""
MESSAGE = "ValueError: no good: $x_1$ is 50 % & {not} <less>"

pytestmark = pytest.mark.timeout(240)


def execute(directory: Path, *, by_a_person: bool = False) -> Any:
    """The notebook after a run of all of its cells, as JupyterLab saves it: without the state of widgets.

    ``by_a_person``: by one whose front end would answer ``input()``, and so is offered the widget.
    """
    cells = [nbformat.v4.new_code_cell(source) for source in (SET_UP, TRAINS, FAILS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(directory)}}
    client = NotebookClient(notebook, timeout=120, allow_errors=True, store_widget_state=False, resources=resources)
    client.on_notebook_start = lambda notebook: setattr(client.kc, "allow_stdin", by_a_person)
    client.execute()
    path = directory / "saved.ipynb"
    nbformat.write(notebook, path)
    return nbformat.read(path, as_version=4)


def forms_of(notebook: Any) -> list[dict[str, Any]]:
    """What stands under the two cells with jobs."""
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    return [dict(output.data) for output in outputs if MIME_TYPE in output.get("data", {})]


def without_outputs(notebook: Any) -> Any:
    bare = nbformat.from_dict(notebook)
    for cell in bare.cells:
        cell.outputs = []
    return bare


def as_html(notebook: Any) -> str:
    return str(HTMLExporter().from_notebook_node(notebook)[0])


@pytest.mark.parametrize("by_a_person", [False, True], ids=["by a program", "by a person"])
def test_a_saved_notebook_is_printed_whole(by_a_person: bool, home: Path, tmp_path: Path) -> None:
    notebook = execute(tmp_path, by_a_person=by_a_person)
    forms = forms_of(notebook)
    assert len(forms) == 2
    for form in forms:
        assert form.keys() == {MIME_TYPE, "text/html", "text/plain"} | ({WIDGET} if by_a_person else set())
    is_a_page_of_its_own(notebook)
    is_a_paper_of_its_own(str(LatexExporter().from_notebook_node(notebook)[0]))


def is_a_page_of_its_own(notebook: Any) -> None:
    page, bare = (BeautifulSoup(as_html(each), "html.parser") for each in (notebook, without_outputs(notebook)))
    trained, failed = page.select(".torchdist-job")
    assert trained.select_one("img[src^='data:image/svg+xml;base64,']") is not None
    words = apart(trained.get_text("\n"))
    assert "succeeded" in words
    for rank in (0, 1):
        assert re.search(rf"\[rank {rank}\]\s+step\s+19 of rank {rank} <b>as it is</b>", words), words
    assert "failed" in failed.get_text()
    assert MESSAGE in failed.get_text()
    assert all("tex2jax_ignore" in picture["class"] for picture in (trained, failed))
    assert [str(script) for script in page.select("script")] == [str(script) for script in bare.select("script")]
    assert "Loading widget" not in page.get_text()


def is_a_paper_of_its_own(latex: str) -> None:
    assert "succeeded" in latex and "failed" in latex
    assert f"rank 1 on {socket.gethostname()}: {escape_latex(MESSAGE)}" in latex
    for rank in (0, 1):
        assert f"step 19 of rank {rank} <b>as it is</b>" in latex
