"""JSON of declared types: what fits comes back, what does not is refused with its place."""

from __future__ import annotations

import contextlib
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import ChannelError
from jupyter_torchdist.protocol.typed import Malformed, Record, decode, decoder
from jupyter_torchdist.protocol.wire.messages import AGENT_SAYS, DRIVER_SAYS, understood

FEW = settings(max_examples=200, deadline=None)


@dataclass(frozen=True)
class Part(Record):
    name: str
    size: int = 0


@dataclass(frozen=True)
class Thing(Record):
    number: int
    share: float = 0.0
    on: bool = False
    word: Literal["a", "b"] = "a"
    parts: tuple[Part, ...] = ()
    pair: tuple[str, int] | None = None
    by_rank: dict[int, Part] = field(default_factory=dict)
    any: Any = None


WHOLE = {
    "number": 3,
    "share": 1,
    "on": True,
    "word": "b",
    "parts": [{"name": "p", "size": 2}],
    "pair": ["x", 4],
    "by_rank": {"7": {"name": "q"}},
    "any": [1, {}],
    "of a newer version": 5,
}


def test_what_fits_is_made_and_unknown_keys_are_passed_over() -> None:
    made = Thing.from_json(WHOLE)
    assert made == Thing(3, 1.0, True, "b", (Part("p", 2),), ("x", 4), {7: Part("q")}, [1, {}])
    assert type(made.share) is float
    assert Thing.from_json(codec.loads(codec.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"number": True}, "number: expected a whole number, not True"),
        ({"number": 1.5}, "number: expected a whole number, not 1.5"),
        ({"number": 10**400}, "number: expected a whole number, not a number of too many digits"),
        ({"share": float("inf")}, "share: expected a number, not inf"),
        ({"share": float("nan")}, "share: expected a number, not nan"),
        ({"share": "1"}, "share: expected a number, not '1'"),
        ({"on": 1}, "on: expected true or false, not 1"),
        ({"word": "c"}, "word: expected one of a, b, not 'c'"),
        ({"word": []}, "word: expected one of a, b, not a list"),
        ({"parts": [{"name": "p"}, {"size": 1}]}, "parts: 1: name is missing"),
        ({"parts": {"name": "p"}}, "parts: expected a list, not a dict"),
        ({"pair": ["x"]}, "pair: expected 2 items, not a list"),
        ({"by_rank": {"seven": {"name": "q"}}}, "by_rank: 'seven' is no number"),
        ({"by_rank": {"7": {}}}, "by_rank: 7: name is missing"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Malformed) as caught:
        Thing.from_json({**WHOLE, **change})
    assert str(caught.value) == words


@pytest.mark.parametrize("value", [None, 3, "x", [], [{}]])
def test_what_is_no_object(value: Any) -> None:
    with pytest.raises(Malformed, match="expected an object, not "):
        Thing.from_json(value)


def test_a_type_without_a_form_in_json_is_our_mistake() -> None:
    with pytest.raises(TypeError, match="has no JSON form"):
        decoder(set)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@FEW
@given(st.dictionaries(st.sampled_from(sorted(WHOLE)), JSON))
def test_nothing_but_malformed_is_raised(change: dict[str, Any]) -> None:
    with contextlib.suppress(Malformed):
        decode(Thing, {**WHOLE, **change})


@FEW
@given(st.sampled_from([DRIVER_SAYS, AGENT_SAYS]), st.data())
def test_a_frame_of_any_content_ends_its_channel_and_no_more(
    says: dict[str, type[Record]], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(says)))
    names = [*typing.get_type_hints(says[kind]), "other"]
    message = data.draw(st.dictionaries(st.sampled_from(names), JSON))
    with contextlib.suppress(ChannelError):
        understood(says, {"type": data.draw(st.just(kind) | JSON), **message})
