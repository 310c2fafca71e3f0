"""A Jupyter server, and a browser's page as the tests use it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import psutil
from playwright.sync_api import Error, Locator, Page, expect

from tests.frugal import lean_path
from tests.leaks import wait_until

BROWSERS = ("chromium", "google-chrome")
"""Names of the browser's command, on Debian first. Playwright's own cannot be downloaded everywhere."""

SCREENSHOTS = Path(__file__).parents[2] / "out" / "screenshots"

START_TIMEOUT = 150.0
"""Seconds; the first start in a new environment compiles its modules, and the machine may be busy."""


def find_browser() -> str | None:
    """The browser's path."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@dataclass
class Jupyter:
    """A running server, with all that is its own below ``directory``."""

    directory: Path
    url: str
    token: str
    process: subprocess.Popen[bytes]
    folder: str = ""
    """Where this user's notebooks are, seen from the server; empty, or with a slash at its end."""

    @property
    def root(self) -> Path:
        """The directory of the notebooks."""
        return self.directory / "notebooks" / self.folder

    @property
    def settings(self) -> Path:
        """Of JupyterLab, as this user has made them."""
        return self.directory / "settings"

    @property
    def workspaces(self) -> Path:
        """What JupyterLab remembers of its layout."""
        return self.directory / "workspaces"

    def address(self, front_end: str, path: str) -> str:
        """Where a browser shows the notebook ``path``; ``front_end`` is ``lab`` or ``notebook``."""
        place = {"lab": "lab/tree/", "notebook": "notebooks/"}[front_end]
        return f"{self.url}{place}{self.folder}{path}?token={self.token}"

    def write(
        self,
        path: str,
        *sources: str,
        outputs: dict[int, list[dict[str, Any]]] | None = None,
        kernel: str = "python3",
    ) -> str:
        """A notebook of these cells; ``outputs`` of some of them."""
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        for number, of_cell in (outputs or {}).items():
            cells[number].outputs = [nbformat.from_dict(output) for output in of_cell]
        notebook = nbformat.v4.new_notebook(cells=cells)
        notebook.metadata["kernelspec"] = {"name": kernel, "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.root / path)
        return path

    @contextlib.contextmanager
    def of_one_test(self, folder: str) -> Iterator[Jupyter]:
        """The server as if it were new: an empty folder, no settings and no layout; its kernels end with the block."""
        for kept in (self.settings, self.workspaces):
            shutil.rmtree(kept, ignore_errors=True)
        write_first_settings(self.settings)
        own = replace(self, folder=f"{folder}/")
        own.root.mkdir()
        try:
            yield own
        finally:
            self.end_kernels()

    def kernels(self) -> list[dict[str, Any]]:
        """Those that run, as the server tells of them."""
        return list(self._ask("GET", "api/kernels"))

    def end_kernels(self) -> None:
        """End every session and kernel, whoever began it."""
        assert wait_until(self._has_ended_kernels), f"kernels that do not end: {self.kernels()}"

    def _has_ended_kernels(self) -> bool:
        """False when the server fails at one, which is just being started again."""
        try:
            for session in self._ask("GET", "api/sessions"):
                self._ask("DELETE", f"api/sessions/{session['id']}")
            for kernel in self.kernels():  # those that have no notebook
                self._ask("DELETE", f"api/kernels/{kernel['id']}")
        except urllib.error.HTTPError:
            return False
        return True

    def _ask(self, method: str, path: str) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, None, headers, method=method)) as answer:
            return json.loads(answer.read() or "null")


@contextlib.contextmanager
def jupyter(
    directory: Path,
    *options: str,
    base_url: str = "/",
    port: int = 0,
    python: str = sys.executable,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Jupyter]:
    """A server with its home, settings and notebooks below ``directory``; it and its kernels end with the block.

    ``port`` 0: one that is free. ``python``: of the environment that it is installed in. ``environ``: variables that
    are other than this process's.
    """
    root, token = directory / "notebooks", "a-token"
    runtime, log = directory / "runtime", directory / "server.log"
    for made in (root, runtime, directory / "home"):
        made.mkdir(parents=True, exist_ok=True)
    write_first_settings(directory / "settings")
    environment = {
        **os.environ,
        "HOME": str(directory / "home"),
        "JUPYTER_CONFIG_DIR": str(directory / "config"),
        "JUPYTER_DATA_DIR": str(directory / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_SETTINGS_DIR": str(directory / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(directory / "workspaces"),
        "PYTHONPATH": lean_path(),
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]),
        **(environ or {}),
    }
    command = [
        python, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--LabApp.expose_app_in_browser=True", "--JupyterNotebookApp.expose_app_in_browser=True",
        f"--ServerApp.root_dir={root}", f"--IdentityProvider.token={token}", f"--ServerApp.base_url={base_url}",
        *options,
    ]  # fmt: skip
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=root, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    try:
        yield Jupyter(directory, _address_of(process, runtime, log), token, process)
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server: its kernels in peace, itself by force when nothing else is left of it.

    Jupyter's loop may end while an idle worker thread of anyio's waits for it, which then keeps the process for ever.
    """
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: process.poll() is not None or not _children(process.pid), timeout=20)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)
    process.kill()
    process.wait()


def _children(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]


def write_first_settings(settings: Path) -> None:
    """No news, and nothing else from the network."""
    write_settings(settings, "apputils-extension/notification", fetchNews="false", checkForUpdates=False)


def write_settings(settings: Path, of: str, **values: Any) -> None:
    """The user's settings of a plugin of JupyterLab's, such as ``apputils-extension/themes``."""
    file = settings / "@jupyterlab" / f"{of}.jupyterlab-settings"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values))


def _address_of(process: subprocess.Popen[bytes], runtime: Path, log: Path) -> str:
    """Where the server listens; it writes that down shortly before it does."""
    info = runtime / f"jpserver-{process.pid}.json"
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, ValueError, ConnectionError):
            url = str(json.loads(info.read_text())["url"])
            address = urlsplit(url)
            socket.create_connection((address.hostname, address.port or 80), timeout=5).close()
            return url
        time.sleep(0.05)
    raise AssertionError(f"the Jupyter server did not start:\n{log.read_text()}")


@dataclass
class Notebook:
    """A page that shows one notebook."""

    page: Page
    name: str
    front_end: str
    errors: list[str] = field(default_factory=list)
    """What went wrong in our scripts; Notebook 7 itself has a ``TypeError`` on a page's first load."""

    @classmethod
    def open(cls, page: Page, server: Jupyter, front_end: str, path: str) -> Notebook:
        """The notebook, drawn."""
        notebook = cls(page, f"{front_end}-{Path(path).stem}", front_end)
        page.on("pageerror", notebook._error)
        page.goto(server.address(front_end, path))
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        return notebook

    def _error(self, error: Error) -> None:
        if "jupyter-torchdist" in (error.stack or ""):
            self.errors.append(error.stack or str(error))

    def cell(self, number: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def kernel_ready(self) -> None:
        """Wait for a kernel that is idle."""
        idle = ".jp-Notebook-ExecutionIndicator[data-status='idle']"
        self.page.wait_for_selector(idle, state="attached", timeout=60_000)

    def run(self, number: int) -> None:
        """Begin to run a cell."""
        cell = self.cell(number)
        cell.locator(".cm-content").click()
        expect(cell.locator(".cm-focused")).to_be_visible()
        prompt = cell.locator(".jp-InputPrompt").first
        for _ in range(3):  # a cell that is just being set up takes no keys yet
            cell.locator(".cm-content").press("Control+Enter")
            with contextlib.suppress(AssertionError):
                expect(prompt).not_to_have_text("[ ]:", timeout=2000)
                return
        raise AssertionError(f"cell {number} does not run")

    def view(self, number: int) -> Locator:
        """The view of a job under a cell."""
        return self.cell(number).locator(".td-view")

    def in_theme(self, theme: str) -> None:
        """Change JupyterLab's theme, from now on."""
        change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"
        self.page.evaluate(change, theme)
        expect(self.page.locator(f"body[data-jp-theme-name='{theme}']")).to_be_attached()

    def dismiss(self, title: str) -> None:
        """Whenever JupyterLab shows a dialog of that title, press its last button and go on."""
        dialog = self.page.locator(".jp-Dialog").filter(has_text=title)
        press = "all => all.forEach(dialog => [...dialog.querySelectorAll('.jp-Dialog-button')].pop().click())"
        self.page.add_locator_handler(dialog, lambda: dialog.evaluate_all(press))  # some go by themselves

    def log_lines(self, view: Locator) -> list[str]:
        """The lines that the view's log shows, all of them, as its button copies them."""
        view.get_by_role("tab", name="Logs").click()
        self.page.bring_to_front()  # the clipboard is only for a page that has the focus
        self.page.evaluate("() => navigator.clipboard.writeText('')")
        view.get_by_text("Copy", exact=True).click()
        self.page.wait_for_function("async () => (await navigator.clipboard.readText()) !== ''")
        return str(self.page.evaluate("() => navigator.clipboard.readText()")).splitlines()

    def picture(self, name: str) -> Path:
        """A screenshot of the whole page."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{self.name}-{name}.png"
        path.write_bytes(self.page.screenshot())  # Playwright would write with a thread that stays
        return path
