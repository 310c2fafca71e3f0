"""For tests that start nothing."""

from __future__ import annotations

import pytest

from jupyter_torchdist.capture import carried
from jupyter_torchdist.states import Found


@pytest.fixture(autouse=True)
def nothing_beside_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pytest and other tests set in this process (seeds, handlers of logs) is no state of a notebook."""
    monkeypatch.setattr(carried, "differing", lambda _place: Found({}, ()))
