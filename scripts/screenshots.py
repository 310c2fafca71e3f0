"""Takes the pictures of the README and the docs: real jobs in headless Chromium. ``make screenshots`` runs it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, Locator, Page, ViewportSize, expect, sync_playwright

from tests.browser.frontend import Jupyter, Notebook, find_browser, jupyter, write_settings

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
SIZE: ViewportSize = {"width": 1240, "height": 860}

IMPORTS = """\
%load_ext jupyter_torchdist
import time, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from sklearn.datasets import load_digits
import jupyter_torchdist as td

images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float() / 16
"""

TRAIN = """\
%%distribute --ranks 2 --name digits
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
mine = slice(td.rank, None, td.world_size)
for epoch in td.progress(range(60), desc="epochs"):
    order = torch.randperm(len(images[mine]))
    for batch in order.split(64):
        optimizer.zero_grad()
        logits = model(images[mine][batch])
        loss = nn.functional.cross_entropy(logits, labels[mine][batch])
        loss.backward()
        optimizer.step()
        td.log(accuracy=(logits.argmax(1) == labels[mine][batch]).float().mean())
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    time.sleep(0.25)
"""

FAIL = """\
%%distribute --ranks 4 --name broken
def check(step, loss):
    if td.rank == 2 and step == 30:
        raise ValueError(f"the loss of step {step} is {loss}")

for step in range(100):
    loss = 2.3 * 0.97**step
    print(f"step {step} loss {loss:.3f}")
    check(step, loss)
    time.sleep(0.05)
td.barrier()
"""


STALL = """\
%%distribute --ranks 4 --name stuck --stall 5s
from torch import distributed as dist

def augment(step):
    if td.rank == 2 and step == 30:
        time.sleep(600)

for step in range(100):
    augment(step)
    dist.all_reduce(torch.ones(10))
    print(f"step {step}")
    time.sleep(0.05)
"""

MISMATCH = """\
%%distribute --ranks 2 --name mismatch
from torch import distributed as dist

for step in range(100):
    gradients = torch.ones(10 if td.rank or step < 30 else 20)
    dist.all_reduce(gradients)
    print(f"step {step}")
"""

DISPLAY = """\
%%distribute --ranks 2 --name digits --background
import matplotlib.pyplot as plt
for digit in range(4):
    print(f"digit {digit} of rank {td.rank}")
    plt.imshow(images[labels == digit][td.rank].view(8, 8))
    plt.title(f"rank {td.rank}: {digit}")
    plt.show()
"""


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tds-") as directory, browser() as chromium:
        os.environ["TORCHDIST_HOME"] = f"{directory}/home"
        with jupyter(Path(directory) / "jupyter") as server:
            light(chromium, server)
            in_notebook(chromium, server)
            of_tabs(chromium, server, "light")
            of_rich_output_and_failure(chromium, server, "light")
            of_findings(chromium, server, "light")
        settings = Path(directory) / "dark" / "settings"
        write_settings(settings, "apputils-extension/themes", theme="JupyterLab Dark")
        with jupyter(Path(directory) / "dark") as server:
            dark(chromium, server)
            of_tabs(chromium, server, "dark")
            of_rich_output_and_failure(chromium, server, "dark")
            of_findings(chromium, server, "dark")
    print(f"written: {PICTURES}")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=find_browser(), args=arguments)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def running(chromium: Browser, server: Jupyter, front_end: str, name: str, cell: str) -> Iterator[tuple[Page, Locator]]:
    """A page with the cell's view in it, the cell just begun."""
    page = chromium.new_context(viewport=SIZE).new_page()
    notebook = Notebook.open(page, server, front_end, server.write(f"{name}.ipynb", IMPORTS, cell))
    notebook.kernel_ready()
    notebook.run(0)
    expect(notebook.cell(0).locator(".jp-InputPrompt").first).to_have_text("[1]:", timeout=60_000)
    notebook.run(1)
    view = notebook.view(1)
    expect(view).to_be_visible(timeout=60_000)
    yield page, view
    page.keyboard.press("Control+s")
    page.wait_for_timeout(1000)
    page.context.close()


def light(chromium: Browser, server: Jupyter) -> None:
    """A training in JupyterLab, the panel beside it; then what the saved notebook shows elsewhere."""
    with running(chromium, server, "lab", "digits", TRAIN) as (page, view):
        page.get_by_role("tab", name="Distributed Jobs").click()
        view.get_by_role("tab", name="Curves").click()
        expect(view.locator(".td-progress, progress").first).to_be_visible(timeout=30_000)
        page.wait_for_timeout(9000)
        view.scroll_into_view_if_needed()
        take(page, "jupyterlab-light")
        expect(view).to_contain_text("succeeded", timeout=120_000)
    page = chromium.new_context(viewport=SIZE).new_page()
    saved = nbformat.read(server.root / "digits.ipynb", as_version=4)
    page.set_content(HTMLExporter().from_notebook_node(saved)[0])
    picture = page.locator(".torchdist-job")
    picture.scroll_into_view_if_needed()
    PICTURES.joinpath("still.png").write_bytes(picture.screenshot())
    page.context.close()


def in_notebook(chromium: Browser, server: Jupyter) -> None:
    """Logs of a running job in Notebook 7."""
    with running(chromium, server, "notebook", "logs", FAIL.replace("step == 30", "step == 300")) as (page, view):
        view.get_by_role("tab", name="Logs").click()
        expect(view).to_contain_text("step 20", timeout=60_000)
        view.scroll_into_view_if_needed()
        take(page, "notebook")
        expect(view).to_contain_text("succeeded", timeout=60_000)


def dark(chromium: Browser, server: Jupyter) -> None:
    """A rank that failed."""
    with running(chromium, server, "lab", "broken", FAIL) as (page, view):
        expect(view).to_contain_text("the loss of step 30", timeout=60_000)
        page.wait_for_timeout(1500)
        view.scroll_into_view_if_needed()
        take(page, "jupyterlab-dark")


def of_tabs(chromium: Browser, server: Jupyter, theme: str) -> None:
    """The view alone, with each of its tabs in front."""
    with running(chromium, server, "notebook", f"tabs-{theme}", TRAIN) as (_, view):
        expect(view.locator(".td-progress-text")).to_contain_text(re.compile("[34][0-9] of 60"), timeout=120_000)
        for tab in ("Curves", "Logs", "Ranks", "Communication", "Receipt"):
            view.get_by_role("tab", name=tab).click()
            panel = view.get_by_role("tabpanel", name=tab)
            if tab == "Communication":
                view.get_by_role("button", name="Record now").click()
                expect(panel.locator(".td-lane").first).to_be_visible(timeout=30_000)
            expect(panel.locator("canvas, table, [role=grid], .td-lanes").first).to_be_visible()
            PICTURES.joinpath(f"{tab.lower()}-{theme}.png").write_bytes(view.screenshot())
        expect(view).to_contain_text("succeeded", timeout=120_000)


def of_rich_output_and_failure(chromium: Browser, server: Jupyter, theme: str) -> None:
    """What a rank displayed beside its line; a failure whose traceback is folded in the log."""
    with running(chromium, server, "notebook", f"display-{theme}", DISPLAY) as (_, view):
        expect(view).to_contain_text("succeeded", timeout=120_000)
        view.get_by_role("tab", name="Logs").click()
        view.get_by_role("button", name="Show display 3 of rank 1").click()
        expect(view.locator(".td-logs-display img")).to_be_visible(timeout=30_000)
        PICTURES.joinpath(f"display-{theme}.png").write_bytes(view.screenshot())
    with running(chromium, server, "notebook", f"failure-{theme}", FAIL) as (_, view):
        expect(view.get_by_role("button", name=re.compile("Show . lines"))).to_be_attached(timeout=120_000)
        PICTURES.joinpath(f"failure-{theme}.png").write_bytes(view.screenshot())


def of_findings(chromium: Browser, server: Jupyter, theme: str) -> None:
    """A job that stalls, and one that failed with a cause that its exception does not say."""
    with running(chromium, server, "notebook", f"stall-{theme}", STALL) as (_, view):
        expect(view.locator(".td-waits")).to_contain_text("rank 2", timeout=120_000)
        expect(view).to_contain_text("stalled", timeout=120_000)
        PICTURES.joinpath(f"stall-{theme}.png").write_bytes(view.screenshot())
        view.get_by_role("button", name="Cancel", exact=True).click()
        view.get_by_role("button", name="Cancel job").click()
        expect(view).to_contain_text("cancelled", timeout=120_000)
    with running(chromium, server, "notebook", f"finding-{theme}", MISMATCH) as (_, view):
        expect(view.locator(".td-failure-cause")).to_be_visible(timeout=120_000)
        view.get_by_role("tab", name="Ranks").click()  # the log names directories of this machine
        PICTURES.joinpath(f"finding-{theme}.png").write_bytes(view.screenshot())


def take(page: Page, name: str) -> None:
    PICTURES.joinpath(f"{name}.png").write_bytes(page.screenshot())


if __name__ == "__main__":
    main()
