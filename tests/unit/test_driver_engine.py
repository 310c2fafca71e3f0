"""What a driver knows of its engine's submission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.driver.engine import Engine, begun
from jupyter_torchdist.protocol.events import Event
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.state import fold
from jupyter_torchdist.testing import FAKE_ENGINE, FakeLauncher, FakeSubmission, a_plan, a_spec


@pytest.mark.parametrize(("word", "queued"), [("running", ""), ("queued", "position 1")])
def test_a_driver_that_takes_up_a_job_says_what_has_changed_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, queued: str
) -> None:
    monkeypatch.setenv(FAKE_ENGINE, str(tmp_path))
    plan = a_plan(a_spec())
    submission = FakeSubmission(tmp_path, f"{plan.job}-1")
    events = [
        Event("job.launched", 1.0, data={"token": submission.token, "attempt": 1}),
        Event("job.engine", 2.0, data={"state": "queued", "position": 3, "reason": ""}),
    ]

    def say(kind: str, **data: Any) -> None:
        events.append(Event(kind, 3.0, data=data))

    submission.tell(word, 1 if word == "queued" else None)
    Engine(FakeLauncher, say).attach(plan, events)
    assert fold(events).queued == queued
    told = len(events)
    Engine(FakeLauncher, say).attach(plan, events)
    assert len(events) == told, "nothing has changed"


def test_a_submission_that_cannot_be_taken_back_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAKE_ENGINE, str(tmp_path))
    plan = a_plan(a_spec())
    said: list[tuple[str, Mapping[str, Any]]] = []
    FakeSubmission(tmp_path, f"{plan.job}-1").tell("running")
    engine = Engine(FakeLauncher, lambda kind, **data: said.append((kind, data)))
    engine.attach(plan, [])

    def broken(submission: FakeSubmission) -> None:
        raise RuntimeError("scancel: no such job")

    monkeypatch.setattr(FakeSubmission, "cancel", broken)
    engine.cancel()
    (kind, data), *_ = said
    assert kind == "job.note"
    assert data["text"] == "the launcher could not remove the job, so look for it there: scancel: no such job"


@pytest.mark.parametrize(("line", "since"), [("--ranks 1 --wait", 7.0), ("--ranks 1", 1.0)])
def test_the_time_of_a_job_that_waited_for_its_turn_begins_with_it(line: str, since: float) -> None:
    """Also for a driver that takes the job up: the time in the queue is not in ``--timeout``."""
    spec = replace(a_spec(), options=parse_options(line), created=1.0)
    events = [Event("job.engine", 2.0, data={"state": "queued"}), Event("job.engine", 7.0, data={"state": "running"})]
    assert begun(spec, events) == since
    assert begun(spec, events[:1]) == 1.0
