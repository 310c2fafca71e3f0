"""What a saved notebook shows where its kernel is gone, where our extension is not installed, and on paper."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Page, expect
from pypdf import PdfReader

from jupyter_torchdist.protocol.feed import MIME_TYPE
from tests.browser.frontend import SCREENSHOTS, Jupyter, Notebook
from tests.browser.test_life import state_is
from tests.browser.test_output import FRONT_ENDS
from tests.integration.test_nbconvert import MESSAGE, execute, forms_of
from tests.notebook import apart

LOAD = "%load_ext jupyter_torchdist"

PRINTS = """\
%%distribute --ranks 2
import os
for number in range(1000):
    print("line", number, "of", os.environ["RANK"], flush=True)
"""

pytestmark = pytest.mark.timeout(300)


@FRONT_ENDS
def test_a_notebook_is_opened_again_without_a_kernel(front_end: str, server: Jupyter, page: Page) -> None:
    """The view is the server's: all lines of the job are there, and nothing was started for them."""
    path = server.write("saved.ipynb", LOAD, PRINTS)
    notebook = Notebook.open(page, server, front_end, path)
    notebook.kernel_ready()
    notebook.run(0)
    notebook.run(1)
    state_is(notebook.view(1), "succeeded")
    notebook.kernel_ready()
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.goto("about:blank")
    server.end_kernels()
    of_no_kernel(server.root / path)

    notebook = Notebook.open(page, server, front_end, path)
    page.locator(".jp-Dialog").get_by_role("button", name="No Kernel").click()
    view = notebook.view(1)
    state_is(view, "succeeded")
    lines = notebook.log_lines(view)
    assert sorted(lines) == sorted(f"[rank {rank}] line {n} of {rank}" for rank in (0, 1) for n in range(1000))
    notebook.picture("without-a-kernel")
    assert server.kernels() == []
    assert not notebook.errors


def of_no_kernel(path: Path) -> None:
    """Nothing in the notebook says which kernel it is for: a front end asks, and starts none by itself."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.clear()
    nbformat.write(notebook, path)


@pytest.mark.soak
def test_the_picture_in_a_lab_without_our_extension_and_on_paper(server: Jupyter, page: Page, tmp_path: Path) -> None:
    saved = execute(tmp_path)
    is_on_paper(page, saved)
    for form in (output.data for cell in saved.cells for output in cell.outputs if MIME_TYPE in output.get("data", {})):
        del form[MIME_TYPE]
    assert forms_of(saved) == []
    saved.cells.append(nbformat.v4.new_markdown_cell("A formula: $x_1$"))
    nbformat.write(saved, server.root / "elsewhere.ipynb")
    notebook = Notebook.open(page, server, "lab", "elsewhere.ipynb")
    expect(notebook.cell(2).locator(".torchdist-job")).to_contain_text(MESSAGE)
    expect(page.locator(".jp-MarkdownCell mjx-container")).to_have_count(1)  # formulas are drawn by now
    expect(page.locator(".torchdist-job mjx-container")).to_have_count(0)
    curve = page.locator(".torchdist-job img").first
    assert curve.evaluate("image => image.complete && image.naturalWidth") == 220
    curve.scroll_into_view_if_needed()
    notebook.picture("without-our-extension")
    assert not notebook.errors


def is_on_paper(page: Page, saved: Any) -> None:
    """Printed by the browser, as nbconvert's webpdf does with the same page (it takes no browser but its own)."""
    html, _ = HTMLExporter(template_name="webpdf").from_notebook_node(saved)
    page.route("http*://**", lambda route: route.abort())  # require.js and MathJax, which are not ours
    page.set_content(html)
    for log in page.locator(".torchdist-job pre").all():
        expect(log).to_have_css("font-family", re.compile("monospace"))
    printed = page.pdf()
    page.unroute_all()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    (SCREENSHOTS / "paper.pdf").write_bytes(printed)
    text = " ".join("\n".join(sheet.extract_text() for sheet in PdfReader(io.BytesIO(printed)).pages).split())
    for rank in (0, 1):
        assert f"step 19 of rank {rank} <b>as it is</b>" in apart(text)
    assert "succeeded" in text and MESSAGE in text
