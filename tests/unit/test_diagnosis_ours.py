"""What is said of a job of ours whose logs tell no cause."""

from __future__ import annotations

import pytest

from jupyter_torchdist.diagnosis import ours
from jupyter_torchdist.protocol.state import JobState


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("lost", "The job is lost: it was cancelled in Slurm (scancel)"),
        ("timed_out", "The job has timed out: it was cancelled in Slurm (scancel)"),
        ("failed", "The job failed: it was cancelled in Slurm (scancel)"),
    ],
)
def test_the_reason_of_the_job_is_said_where_no_log_tells_one(state: str, sentence: str) -> None:
    (finding,) = ours.diagnose([], JobState("j", state=state, reason="it was cancelled in Slurm (scancel)"))
    assert (finding.code, finding.severity, finding.sentence) == ("undetermined", "fault", sentence)


@pytest.mark.parametrize(("state", "reason"), [("lost", ""), ("cancelled", "stopped on request"), ("succeeded", "")])
def test_a_job_without_a_fault_has_no_finding(state: str, reason: str) -> None:
    assert ours.diagnose([], JobState("j", state=state, reason=reason)) == []
