"""How much a value weighs, for the limit of what comes back unasked."""

from __future__ import annotations

import types
from typing import Any, cast

import numpy
import pytest
import torch

from jupyter_torchdist import marshal
from jupyter_torchdist.ranks import results
from jupyter_torchdist.ranks.results import Sizes


def sizes(*captured: Any) -> Sizes:
    places = {id(value): index for index, value in enumerate(captured)}
    return Sizes(cast(marshal.Loaded, types.SimpleNamespace(places=places)))


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # a proxy, such as torch has some
        raise RuntimeError("do not touch")


def test_weights() -> None:
    model = torch.nn.Linear(10, 10)
    assert sizes().of(model) == 440
    assert sizes().of([torch.ones(4), numpy.ones(3), b"12", {"a": (torch.ones(1),)}]) == 16 + 24 + 2 + 4
    assert sizes().of(torch) == 0 and sizes().of("text" * 100) == 0
    assert sizes().of(Holder(x=torch.ones(2))) == 8
    assert sizes().of(torch.ones(1000)[:2]) == 4000


def test_shared_memory_counts_once() -> None:
    whole = torch.ones(100)
    several = sizes()
    assert several.of([whole, whole[:50]]) == 400
    assert several.of(whole.view(10, 10)) == 0


def test_what_was_captured_is_in_the_notebook_already() -> None:
    data = torch.ones(100)
    assert sizes(data).of(Holder(data=data)) == 0
    assert sizes(data).of(data) == 400


def test_a_list_that_holds_itself() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    assert sizes().of(loop) == 4


def test_what_is_too_large_stays_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "AUTO_LIMIT", 1000)
    nothing: Any = None
    loaded = cast(marshal.Loaded, types.SimpleNamespace(places={}, main={}))
    values = {"small": torch.ones(10), "large": torch.ones(1000), "last": torch.ones(20)}
    found = results.Results(0, nothing, loaded, nothing, nothing, results.Questions(lambda: None))
    chosen, left = found._within_limit(values)
    assert list(chosen) == ["small", "last"]
    assert [name for name, _ in left] == ["large"] and "--out large" in left[0][1]
