"""What stands for VS Code: a page with ipywidgets' own manager, on a real kernel of a real server.

Its script is ``labextension/test/webview/page.ts``; what it does as VS Code does is said there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Error, Locator, Page, expect

from tests.browser.frontend import SCREENSHOTS, Jupyter
from tests.lacking import lacking

FRONT_END = Path(__file__).parents[2] / "labextension"
ESBUILD = FRONT_END / "node_modules" / ".bin" / "esbuild"
ANYWIDGET = Path(sys.prefix) / "share" / "jupyter" / "nbextensions" / "anywidget" / "index.js"

DARK = """:root { color-scheme: dark; --vscode-foreground: #cccccc; --vscode-editor-background: #1f1f1f;
--vscode-descriptionForeground: #9d9d9d; --vscode-sideBar-background: #181818; --vscode-panel-border: #2b2b2b;
--vscode-list-hoverBackground: #2a2d2e; --vscode-focusBorder: #0078d4; --vscode-errorForeground: #f85149;
--vscode-font-family: sans-serif; --vscode-font-size: 13px; }
body { background: var(--vscode-editor-background); color: var(--vscode-foreground); }"""
"""Some of the variables of VS Code's dark theme, as a webview has them."""


def build(directory: Path) -> str:
    """Put the page together in ``directory``; the option of a server that serves it below ``static/``."""
    if not ESBUILD.exists():
        lacking("the page needs labextension/node_modules: make front (it needs npm)")
    source = FRONT_END / "test" / "webview" / "page.ts"
    loaders = ["--loader:.css=empty", "--loader:.svg=text", "--banner:js=var __webpack_public_path__;"]
    command = [str(ESBUILD), str(source), "--bundle", "--minify", *loaders, "--log-level=error"]
    subprocess.run([*command, f"--outfile={directory / 'page.js'}"], check=True)
    shutil.copy(ANYWIDGET, directory / "anywidget.js")
    for name, style in (("light", ""), ("dark", DARK)):
        head = f"<!doctype html><meta charset=utf-8><style>{style}</style>"
        (directory / f"{name}.html").write_text(f"{head}<body class=vscode-{name}><script src=page.js></script>")
    return f"--ServerApp.extra_static_paths={directory}"


class Webview:
    """The page, with a kernel of its own; every cell that it runs stands below the one before."""

    def __init__(self, page: Page, server: Jupyter, theme: str = "light", *, colab: bool = False) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", self._error)
        page.goto(f"{server.url}static/{theme}.html?token={server.token}{'&colab' if colab else ''}")
        page.wait_for_function("window.notebook", timeout=60_000)
        self.value("%load_ext jupyter_torchdist")

    def _error(self, error: Error) -> None:
        self.errors.append(error.stack or str(error))

    def run(self, code: str) -> Locator:
        """Begin a cell; the place of its outputs."""
        self.page.evaluate("code => notebook.run(code)", code)
        return self.page.locator(".cell").last

    def value(self, code: str) -> str:
        """What ``code`` prints, once the kernel is free."""
        return str(self.page.evaluate("code => notebook.value(code)", code))

    def picture(self, name: str) -> None:
        """A screenshot of the page."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        (SCREENSHOTS / f"webview-{name}.png").write_bytes(self.page.screenshot())


def ended(cell: Locator) -> None:
    """Wait for a cell's end."""
    expect(cell).to_have_attribute("data-ended", "true", timeout=60_000)
