"""In the user's language: a language pack of JupyterLab's is asked for our words by both plugins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook, jupyter, write_settings
from tests.browser.test_output import an_output
from tests.frugal import lean_path

WORDS = {
    "": {"domain": "jupyter_torchdist", "language": "de-DE", "plural_forms": "nplurals=2; plural=(n != 1);"},
    "Distributed Jobs": ["Verteilte Aufträge"],
    "Show Distributed Jobs": ["Verteilte Aufträge zeigen"],
    "Cancel": ["Abbrechen"],
    "running": ["läuft"],
    "%1 job": ["%1 Auftrag", "%1 Aufträge"],
    "%1, %2 running": ["%1, davon %2 in Arbeit"],
    "%1 distributed job": ["%1 verteilter Auftrag", "%1 verteilte Aufträge"],
}
"""A few of ours; vitest sees that there are no others."""


def a_language_pack(directory: Path) -> Path:
    """As ``pip install jupyterlab-language-pack-de-DE`` leaves one, with our words alone."""
    package, information = directory / "pack_de", directory / "pack_de-1.0.dist-info"
    catalogue = package / "locale" / "de_DE" / "LC_MESSAGES" / "jupyter_torchdist.json"
    catalogue.parent.mkdir(parents=True)
    information.mkdir()
    catalogue.write_text(json.dumps(WORDS))
    (package / "__init__.py").touch()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: pack-de\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[jupyterlab.languagepack]\nde_DE = pack_de\n")
    return directory


@pytest.fixture
def server(browser: Browser, home: Path, tmp_path: Path) -> Iterator[Jupyter]:
    """Somebody's who has chosen German."""
    path = os.pathsep.join([str(a_language_pack(tmp_path / "packs")), lean_path()])
    with jupyter(tmp_path / "jupyter", environ={"PYTHONPATH": path}) as started:
        write_settings(started.settings, "translation-extension/plugin", locale="de_DE")
        yield started


def test_our_words_are_those_of_a_language_pack(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    outputs = {0: [an_output(running_job.spec.job)]}
    notebook = Notebook.open(page, server, "lab", server.write("german.ipynb", "pass", outputs=outputs))
    view = notebook.view(0)
    expect(view.locator(".td-header .td-state")).to_have_text("läuft")
    expect(view.get_by_role("button", name="Abbrechen", exact=True)).to_be_visible()
    page.get_by_role("button", name="1 verteilter Auftrag", exact=True).click()
    expect(page.get_by_role("tab", name="Verteilte Aufträge")).to_be_visible()
    expect(page.locator(".td-panel-count")).to_have_text("1 Auftrag, davon 1 in Arbeit")
    label = page.evaluate("() => window.jupyterapp.commands.label('torchdist:show-jobs')")
    assert label == "Verteilte Aufträge zeigen"
    notebook.picture("words")
    assert not notebook.errors
