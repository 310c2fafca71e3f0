"""The Communication tab: hosts and transports, collectives by rank, network and GPUs; what ranks record when asked."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Page, expect

from jupyter_torchdist.node.gauges import Board
from jupyter_torchdist.protocol.gauges import Gauges, Traffic
from jupyter_torchdist.store.files import publish_json
from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook
from tests.browser.test_output import an_output
from tests.unit.test_feed_communication import LINE, entered, recorded

RECORD = """\
%%distribute --ranks 2 --name recorded
import time, torch
from torch import distributed as dist
for step in range(3000):
    time.sleep(0.2 if dist.get_rank() else 0)
    dist.all_reduce(torch.ones(4))
    print(f"step {step}")
"""


def test_a_job_of_two_hosts(server: Jupyter, page: Page, home: Path) -> None:
    with FakeJob(now=time.time() - 50, ranks=4, nodes=2) as job:
        nodes = tuple(
            replace(node, host=f"gpu{place}", gpus=("GPU-a", "GPU-b"), address=f"10.0.0.{place}", interface="eth0")
            for place, node in enumerate(job.plan.nodes, 1)
        )
        publish_json(job.paths.plan, replace(job.plan, nodes=nodes, backend="nccl").to_json())
        job.running()
        for rank in range(4):
            channel = LINE.format("00/0 : 0[0] -> 1[1]", "P2P/CUMEM/read")
            job.rank(rank).prints(channel + LINE.format("00/0 : 3[1] -> 0[0] [receive]", "NET/IB/0/GDRDMA"))
            late = 0.02 if rank == 2 else 0.0
            recorded(job, rank, *(entered(number, number / 20 + late) for number in range(1, 31)))
        path = server.write("communication.ipynb", "pass", outputs={0: [an_output(job.spec.job)]})
        page.set_viewport_size({"width": 900, "height": 1100})
        notebook = Notebook.open(page, server, "lab", path)
        view = notebook.view(0)
        view.get_by_role("tab", name="Communication").click()
        tab = view.get_by_role("tabpanel", name="Communication")
        expect(tab).to_contain_text("⇄ P2P/CUMEM (from GPU to GPU)")
        expect(tab).to_contain_text("between hosts: NET/IB/0/GDRDMA (InfiniBand or RoCE, straight from the memory")
        expect(tab).to_contain_text("Rank 2 entered last in 30 of 30 collectives, most often 20 ms after")
        expect(tab.locator(".td-lane svg")).to_have_count(4)
        boards = [Board(job.paths, node.name) for node in nodes]
        for turn in range(1, 200):
            for place, board in enumerate(boards):
                gauges = {rank: Gauges(gpu=40 + turn % 50 + rank) for rank in nodes[place].ranks}
                board.write(gauges, {"eth0": Traffic(120_000_000, 40_000_000)})
            page.wait_for_timeout(200)
            if tab.locator(".td-load").count() and turn > 40:
                break
        charts = tab.locator(".td-load figcaption")
        expect(charts).to_contain_text(["network, gpu1", "GPU use, gpu1", "network, gpu2", "GPU use, gpu2"])
        expect(charts.first).to_contain_text("up to 120 MB/s")
        expect(tab.locator(".td-load").first).to_contain_text("eth0 sent 40 MB/s")
        view.locator(".td-grip").dblclick()
        notebook.picture("hosts")
        tab.get_by_role("button", name=re.compile("rank ?2")).click()
        expect(view.get_by_role("tab", name="Logs")).to_have_attribute("aria-selected", "true")
        assert not notebook.errors


def test_ranks_record_when_they_are_asked(server: Jupyter, page: Page, home: Path) -> None:
    notebook = Notebook.open(page, server, "lab", server.write("r.ipynb", "%load_ext jupyter_torchdist", RECORD))
    notebook.kernel_ready()
    notebook.run(0)
    notebook.run(1)
    view = notebook.view(1)
    expect(view).to_contain_text("step 20", timeout=60_000)
    view.get_by_role("tab", name="Communication").click()
    tab = view.get_by_role("tabpanel", name="Communication")
    expect(tab).to_contain_text("⇄ Gloo, TCP on lo")
    expect(tab).to_contain_text("Nothing is recorded yet.")
    tab.get_by_role("button", name="Record now").click()
    expect(tab).to_contain_text("Rank 1 entered last in", timeout=20_000)
    expect(tab.get_by_role("button", name="Record now")).to_be_enabled(timeout=20_000)
    tab.get_by_text("As a table").click()
    expect(tab.get_by_role("row").nth(1)).to_contain_text("of 4 float32")
    view.get_by_role("button", name="Cancel", exact=True).click()
    view.get_by_role("button", name="Cancel job").click()
    expect(view).to_contain_text("cancelled", timeout=60_000)
    expect(tab.get_by_role("button", name="Record now")).to_be_hidden()
    assert not notebook.errors
