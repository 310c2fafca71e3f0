"""The built wheel in an empty environment, without node: what a user has after ``pip install`` (``make soak``)."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree, which

import pytest
from playwright.sync_api import Page, expect

from jupyter_torchdist import __version__
from tests.browser.frontend import Jupyter, Notebook, jupyter
from tests.browser.test_life import state_is
from tests.browser.test_panel import open_panel
from tests.integration.test_wheel import ROOT, build_wheel
from tests.notebook import plain

CELL = """\
%%distribute --ranks 2
import os
print("rank", os.environ["RANK"], "of the wheel", flush=True)
"""

WHERE = """\
%load_ext jupyter_torchdist
import jupyter_torchdist
from jupyter_torchdist.kernel.show import ready
print(jupyter_torchdist.__file__)
print("a widget:", ready(get_ipython()) is not None)
"""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class Installed:
    """An environment with nothing but the wheel and what it asks for, and commands that see nothing else."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "environment"
        venv.create(self.directory, with_pip=True)
        self.bin = self.directory / "bin"
        self.environ = {"PATH": str(self.bin), "PYTHONPATH": "", "JUPYTER_CONFIG_DIR": str(directory / "config")}
        self.constraints = str(ROOT / "constraints.txt")

    def pip(self, *what: str) -> None:
        self.run("pip", "--disable-pip-version-check", "install", "--quiet", "--constraint", self.constraints, *what)

    def run(self, command: str, *words: str) -> str:
        """What it says, to whichever stream, without colours and with one space between words."""
        environ = {**os.environ, **self.environ}
        done = subprocess.run([self.bin / command, *words], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return " ".join(plain(done.stdout + done.stderr).split())


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installed]:
    """As the README says: torch first, then ours, here with the front end that it was built for."""
    wheel = build_wheel(tmp_path)
    environment = Installed(tmp_path)
    environment.pip("torch")
    environment.pip(f"{wheel}[demo]")
    yield environment
    rmtree(environment.directory)  # nearly two gigabytes


@pytest.fixture
def server(installed: Installed, own_runtime: Path, tmp_path: Path) -> Iterator[Jupyter]:
    python = str(installed.bin / "python")
    with jupyter(tmp_path / "jupyter", python=python, environ=installed.environ) as started:
        yield started


def test_the_wheel_alone_is_enough(installed: Installed, server: Jupyter, page: Page) -> None:
    assert not any(which(command, path=installed.environ["PATH"]) for command in ("node", "npm"))
    assert f"jupyter-torchdist v{__version__} enabled OK" in installed.run("jupyter", "labextension", "list")
    assert f"jupyter_torchdist {__version__} OK" in installed.run("jupyter", "server", "extension", "list")

    notebook = Notebook.open(page, server, "lab", server.write("wheel.ipynb", WHERE, CELL))
    notebook.kernel_ready()
    notebook.run(0)
    expect(notebook.cell(0)).to_contain_text(str(installed.directory), timeout=60_000)
    expect(notebook.cell(0)).to_contain_text("a widget: True", timeout=60_000)
    notebook.run(1)
    view = notebook.view(1)
    state_is(view, "succeeded")
    assert sorted(notebook.log_lines(view)) == [f"[rank {rank}] rank {rank} of the wheel" for rank in (0, 1)]
    open_panel(page)
    expect(page.locator(".td-row")).to_contain_text("succeeded")
    notebook.picture("installed")
    assert not notebook.errors
