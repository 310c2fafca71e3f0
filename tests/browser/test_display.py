"""What ranks displayed, and a failure that is told once."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook
from tests.browser.test_output import FRONT_ENDS, an_output

CELL = """\
%%distribute --ranks 2 --background
import os
import matplotlib.pyplot as plt
from IPython.display import HTML
rank = int(os.environ["RANK"])
plt.plot([rank, 1 - rank])
plt.show()
display(HTML(f"<table><tr><th>loss of {rank}</th></tr></table><script>window.ran = 1</script>"))
"""


@FRONT_ENDS
def test_what_any_rank_displayed_in_the_background(front_end: str, server: Jupyter, page: Page) -> None:
    path = server.write("display.ipynb", "%load_ext jupyter_torchdist", CELL)
    notebook = Notebook.open(page, server, front_end, path)
    notebook.kernel_ready()
    notebook.run(0)
    notebook.run(1)
    view = notebook.view(1)
    expect(view).to_contain_text("succeeded", timeout=120_000)
    view.get_by_role("tab", name="Logs").click()
    for rank in (0, 1):
        view.get_by_role("button", name=f"Show display 1 of rank {rank}").click()
        shown = view.get_by_role("region", name=f"rank {rank}, display 1")
        expect(shown.get_by_role("img")).to_have_attribute("src", re.compile("^data:image/png;base64,"))
        wide = shown.get_by_role("img").evaluate("async image => { await image.decode(); return image.naturalWidth; }")
        assert wide > 100
    notebook.picture("figure")
    view.get_by_role("button", name="Show display 2 of rank 1").click()
    shown = view.get_by_role("region", name="rank 1, display 2")
    expect(shown.get_by_text("loss of 1", exact=True)).to_be_visible()
    assert page.evaluate("window.ran") is None
    page.keyboard.press("Escape")
    expect(shown).to_be_hidden()
    expect(view.get_by_role("grid")).to_be_focused()
    assert not notebook.errors


@pytest.mark.parametrize("width", [pytest.param(700, marks=pytest.mark.soak), 1280])
def test_a_traceback_is_folded_at_the_end_of_the_log(
    width: int, server: Jupyter, page: Page, running_job: FakeJob
) -> None:
    running_job.rank(1).prints("".join(f"line {number}\n" for number in range(100)), "err")
    running_job.rank(1).failed(ValueError("no good")).prints("Traceback:\nValueError: no good\nafter\n", "err")
    running_job.ended("failed", "rank 1 failed", 1)
    page.set_viewport_size({"width": width, "height": 700})
    path = server.write("fold.ipynb", "pass", outputs={0: [an_output(running_job.spec.job)]})
    notebook = Notebook.open(page, server, "lab", path)
    view = notebook.view(0)
    log = view.get_by_role("grid")
    view.scroll_into_view_if_needed()
    expect(log.get_by_text("after", exact=True)).to_be_in_viewport()
    last = log.get_by_text("ValueError: no good", exact=True)
    expect(last).to_have_count(0)
    log.get_by_role("button", name="Show 2 lines").click()
    expect(last).to_be_in_viewport()
    notebook.picture(f"opened-{width}")
    log.get_by_role("button", name="Fold").click()
    expect(last).to_have_count(0)
    assert not notebook.errors
