"""What a driver knows of its engine's submission."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.driver.engine import Engine
from jupyter_torchdist.protocol.events import Event
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
    Engine(FakeLauncher, plan, say).attach(events)
    assert fold(events).queued == queued
    told = len(events)
    Engine(FakeLauncher, plan, say).attach(events)
    assert len(events) == told, "nothing has changed"


def test_a_submission_that_cannot_be_taken_back_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAKE_ENGINE, str(tmp_path))
    plan = a_plan(a_spec())
    said: list[tuple[str, Mapping[str, Any]]] = []
    FakeSubmission(tmp_path, f"{plan.job}-1").tell("running")
    engine = Engine(FakeLauncher, plan, lambda kind, **data: said.append((kind, data)))
    engine.attach([])

    def broken(submission: FakeSubmission) -> None:
        raise RuntimeError("scancel: no such job")

    monkeypatch.setattr(FakeSubmission, "cancel", broken)
    engine.cancel()
    (kind, data), *_ = said
    assert kind == "job.note"
    assert data["text"] == "the launcher could not remove the job, so look for it there: scancel: no such job"
