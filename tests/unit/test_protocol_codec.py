"""JSON that loses nothing: what goes in comes out, in one line of ASCII."""

from __future__ import annotations

import base64
import json
import math
import struct
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.protocol import codec

FEW = settings(max_examples=50, deadline=None)

TEXT = st.text(st.characters(), max_size=30)  # lone surrogates among them
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | TEXT.map(lambda text: "@" + text)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=20
)


def same(left: Any, right: Any) -> bool:
    """Equality in which NaN equals NaN and 1 does not equal 1.0 or True."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (left == right and math.copysign(1, left) == math.copysign(1, right)) or (
            math.isnan(left) and math.isnan(right)
        )
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


@FEW
@given(VALUES)
def test_what_goes_in_comes_out(value: Any) -> None:
    text = codec.dumps(value)
    assert text.isascii()
    assert "\n" not in text
    assert same(codec.loads(text), value)


@FEW
@given(VALUES)
def test_any_json_reader_can_read_it(value: Any) -> None:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    def check(number: str) -> int:
        assert abs(int(number)) <= codec.SAFE_INTEGER
        return int(number)

    json.loads(codec.dumps(value), parse_constant=refuse, parse_int=check)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, '"@nan"'),
        (-math.inf, '"@-inf"'),
        (2**53, '"@int:9007199254740992"'),
        (2**53 - 1, "9007199254740991"),
        ("@nan", '"@@nan"'),
        ("\udc80", r'"\udc80"'),
        ((1, 2), "[1,2]"),
        ({1: True}, '{"1":true}'),
    ],
)
def test_the_form(value: Any, text: str) -> None:
    assert codec.dumps(value) == text


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), [1j], {"a": print}])
def test_what_has_no_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="has no JSON form"):
        codec.dumps(value)


@FEW
@given(st.binary(max_size=60) | TEXT)
def test_what_is_no_json_is_a_value_error(data: bytes | str) -> None:
    try:
        codec.loads(data)
    except ValueError:
        return
    json.loads(data)


@FEW
@given(st.lists(st.floats(), max_size=99))
def test_a_column_of_numbers_comes_out_as_a_list(values: list[float]) -> None:
    text = codec.dumps({"y": array("d", values)})
    assert text == '{"y":"@f64:' + base64.b64encode(struct.pack(f"<{len(values)}d", *values)).decode() + '"}'
    assert same(codec.loads(text)["y"], values)


def test_a_damaged_column_is_no_value() -> None:
    for damaged in ("!", "AAAA"):
        with pytest.raises(ValueError):
            codec.loads(f'"@f64:{damaged}"')
