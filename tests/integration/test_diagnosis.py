"""A failure that does not say its cause is told with it: real ranks, in the exception, in the verbs and in a shell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jupyter_torchdist import client
from jupyter_torchdist.cli import main
from jupyter_torchdist.kernel import failure
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.views import job_text

PATIENCE = 90.0

SIZES = """
import torch, torch.distributed as dist
dist.all_reduce(torch.ones(4 if dist.get_rank() == 0 else 8))
"""

UNUSED = """
import torch
class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.used(x)
model = torch.nn.parallel.DistributedDataParallel(Half())
for _ in range(2):
    model(torch.ones(2, 2)).sum().backward()
"""


def failed(source: str, notebook: dict[str, Any]) -> client.Job:
    job = client.submit(client.Request(source, "Cell In[3]", 2, Options(ranks=2), notebook))
    assert job.wait(PATIENCE).state == "failed"
    return job


@pytest.mark.timeout(240)
def test_a_rank_that_gloo_aborts(notebook: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The process ends by SIGABRT, and its log says why: everywhere the same sentence."""
    job = failed(SIZES, notebook)
    [found] = job.state.findings
    assert found.code == "collective-mismatch"
    assert found.sentence.startswith("Ranks call different collectives at the same point: ")
    error = job.exception()
    assert error is not None
    assert f"{found.sentence}\n  → {found.remedy}" in getattr(error, "__notes__", ())
    assert found.sentence in job_text.job_page(job.state, job.spec, job.plan, job.manifest, job.state.ended)
    assert main(["diagnose", job.id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == found.code
    assert main(["diagnose", job.id]) == 0
    assert f"fault collective-mismatch: {found.sentence[:40]}" in capsys.readouterr().out


@pytest.mark.timeout(240)
def test_an_exception_of_torch(notebook: dict[str, Any]) -> None:
    job = failed(UNUSED, notebook)
    [found] = job.state.findings
    assert found.code == "unused-parameters"
    rank = job.state.failures()[0]
    shown = "\n".join(failure.rank_failure(job.state, rank, {}))
    assert found.sentence in shown
    assert "find_unused_parameters=True" in shown


@pytest.mark.timeout(240)
def test_an_exception_of_the_cell_needs_no_more_words(
    notebook: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    job = failed("raise ValueError('bad batch')\n", notebook)
    assert job.state.findings == ()
    assert main(["diagnose", job.id]) == 0
    assert "raised ValueError: bad batch" in capsys.readouterr().out
