"""What ranks take, in the Ranks tab and in the panel: while they run, after their end, and on a narrow page."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Page, expect

from jupyter_torchdist.protocol.gauges import Gauges
from jupyter_torchdist.protocol.plan import NodePlan
from jupyter_torchdist.store.files import publish_json
from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook
from tests.browser.test_output import an_output

CARDS = ("GPU-2c9f0a3e-11b2-4f6e-9d1e-0123456789ab", "GPU-5d1b77c0-11b2-4f6e-9d1e-0123456789ab")
SEEN = Gauges(102, 2_340_000_000, 2_500_000_000, 93, 62_000_000_000, 64_000_000_000, 80_000_000_000)


def test_what_ranks_take(server: Jupyter, page: Page, home: Path) -> None:
    with FakeJob(now=time.time() - 50) as job:
        publish_json(job.paths.plan, replace(job.plan, nodes=(NodePlan("node0", (0, 1), CARDS),)).to_json())
        job.running().takes(rank0=SEEN)
        path = server.write("gauges.ipynb", "pass", outputs={0: [an_output(job.spec.job)]})
        page.set_viewport_size({"width": 700, "height": 700})
        notebook = Notebook.open(page, server, "lab", path)
        view = notebook.view(0)
        view.get_by_role("tab", name="Ranks").click()
        ranks = view.get_by_role("tabpanel", name="Ranks")
        first = ranks.get_by_role("row").nth(1)
        for words in ("102 %", "2.34 GB", "GPU-2c9f0a3e", "93 %", "62 of 80 GB"):
            expect(first.get_by_role("cell", name=words, exact=True)).to_have_count(1)
        expect(ranks.get_by_role("row").nth(2).get_by_role("cell").last).to_have_text("")

        last = ranks.get_by_role("button", name="GPU memory")
        expect(last).not_to_be_in_viewport(ratio=0.9)
        ranks.hover()
        page.mouse.wheel(2000, 0)
        expect(last).to_be_in_viewport(ratio=0.9)
        notebook.picture("narrow")

        page.set_viewport_size({"width": 1280, "height": 800})
        page.get_by_role("tab", name="Distributed Jobs").click()
        expect(page.locator(".td-row")).to_contain_text("GPU 62 of 80 GB")
        notebook.picture("panel")
        job.ended()
        expect(first).to_contain_text("peak 2.5 GB")
        expect(first).to_contain_text("peak 64 of 80 GB")
        expect(page.locator(".td-row")).not_to_contain_text("GB")
        notebook.picture("ended")
        assert not notebook.errors
