"""A browser for the session, a page and a server for each test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, find_browser, jupyter

EXTENSION = "share/jupyter/labextensions/jupyter-torchdist/package.json"


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    """Skips the tests where there is no browser, or no front end was built."""
    if find_browser() is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    if not (Path(sys.prefix) / EXTENSION).exists():
        pytest.skip("the front end is not built: make front (it needs npm)")
    with sync_playwright() as started:
        yield started


@pytest.fixture
def browser(playwright: Playwright, home: Path) -> Iterator[Browser]:
    """Debian's Chromium, without a head. One a test: its helpers come and go, and none may be left."""
    # Chromium refuses its sandbox to root, as in most containers.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    browser = playwright.chromium.launch(executable_path=find_browser(), args=arguments)
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page with nothing remembered from other tests."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    yield context.new_page()
    context.close()


@pytest.fixture
def server(browser: Browser, home: Path, tmp_path: Path) -> Iterator[Jupyter]:
    """A Jupyter server over this test's jobs."""
    with jupyter(tmp_path / "jupyter") as started:
        yield started


@pytest.fixture
def running_job(home: Path) -> Iterator[FakeJob]:
    """A job of two ranks that runs, by hand."""
    with FakeJob(now=time.time(), label="Cell In[7]") as job:
        job.running()
        yield job
