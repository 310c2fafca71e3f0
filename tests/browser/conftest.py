"""A browser and a server for the session; for each test a context of the one and a fresh start of the other."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import psutil
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect, sync_playwright

from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, find_browser, jupyter
from tests.lacking import lacking

EXTENSION = "share/jupyter/labextensions/jupyter-torchdist/package.json"


@pytest.fixture(scope="session")
def playwright(lasting: set[int]) -> Iterator[Playwright]:
    """Skips the tests where there is no browser, or no front end was built."""
    if find_browser() is None:
        lacking("no Chromium here: apt-get install chromium")
    if not (Path(sys.prefix) / EXTENSION).exists():
        lacking("the front end is not built: make front (it needs npm)")
    expect.set_options(timeout=30_000)  # milliseconds; a busy machine takes more than Playwright's five seconds
    before = _children()
    with sync_playwright() as started:
        lasting |= _children() - before  # the browser and its helpers are below Playwright's own process
        yield started


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """Debian's Chromium, without a head."""
    # Chromium refuses its sandbox to root, as in most containers.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    browser = playwright.chromium.launch(executable_path=find_browser(), args=arguments)
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A link to the data directory of the test that runs: what a server of the session has for its own."""
    return tmp_path_factory.mktemp("homes") / "now"


@pytest.fixture(autouse=True)
def home(home: Path, homes: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """``TORCHDIST_HOME`` of this test, under the name by which the server knows it."""
    home.mkdir(mode=0o700)
    if homes.is_symlink():
        homes.unlink()
    elif homes.exists():  # a process of a test that failed made it anew
        rmtree(homes)
    homes.symlink_to(home)
    with monkeypatch.context() as patch:
        patch.setenv("TORCHDIST_HOME", str(homes))
        yield homes
    homes.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def lasting_environment(homes: Path, shared_runtime: Path) -> Iterator[None]:
    """Where a server looks that outlives a test, while it is started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDIST_HOME", str(homes))
        patch.setenv("TORCHDIST_RUNTIME_DIR", str(shared_runtime))
        patch.setenv("TORCHDIST_SCRATCH", str(shared_runtime / "scratch"))
        patch.setenv("TORCHDIST_SUCCESSORS", "0")  # no job here compiles: what that needs takes seconds to import
        yield


@pytest.fixture(scope="session")
def lasting_server(
    browser: Browser, lasting_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Jupyter]:
    """The Jupyter server of all tests that need none of their own: it takes seconds to start."""
    with jupyter(tmp_path_factory.mktemp("jupyter")) as started:
        yield started


@pytest.fixture
def server(lasting_server: Jupyter, home: Path, tmp_path: Path) -> Iterator[Jupyter]:
    """A Jupyter server over this test's jobs, in which nobody has worked before."""
    with lasting_server.of_one_test(tmp_path.name) as fresh:
        yield fresh


@pytest.fixture(scope="session")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """What all pages share: JupyterLab's scripts are compiled once. Animations would be drawn by the CPU."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 900},
        permissions=["clipboard-read", "clipboard-write"],
        reduced_motion="reduce",
    )
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, home: Path) -> Iterator[Page]:
    """A page with nothing remembered from other tests."""
    page = context.new_page()
    yield page
    if page.url.startswith("http"):
        page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    page.close()
    context.clear_cookies()


@pytest.fixture
def running_job(home: Path) -> Iterator[FakeJob]:
    """A job of two ranks that runs, by hand."""
    with FakeJob(now=time.time(), label="Cell In[7]") as job:
        job.running()
        yield job
