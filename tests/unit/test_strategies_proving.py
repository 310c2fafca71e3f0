"""When a job proves its first steps."""

from __future__ import annotations

from jupyter_torchdist.strategies.core.proving import Proving


def test_it_is_said_once_from_the_first_entry_to_its_exit() -> None:
    said: list[float] = []
    proving = Proving(said.append)
    with proving:
        assert said == [0.0]
        with proving:
            pass
        assert said == [0.0]
    assert len(said) == 2 and said[1] > 0
    with proving:
        pass
    assert len(said) == 2
