"""Random object graphs cross and come back: shape, sharing, cycles and views hold, changes land in place."""

from __future__ import annotations

import io
import json
import types
from collections import OrderedDict, deque
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jupyter_torchdist import capture, marshal
from jupyter_torchdist.marshal import codes, mapping
from jupyter_torchdist.protocol.bundle import Blob, Manifest
from jupyter_torchdist.protocol.paths import Home

DEFINITIONS = """
class Node:
    def __init__(self): self.items = []
class Slotted:
    __slots__ = ("left", "right")
class Keeper(dict):
    pass
"""


class Builder:
    """Makes a graph out of numbers hypothesis draws; the same numbers make the same graph."""

    def __init__(self, data: Any, names: dict[str, Any]) -> None:
        self.data, self.names = data, names
        self.made: list[Any] = []
        self.storage = torch.arange(64.0)

    def value(self, depth: int) -> Any:
        kinds = ["atom", "atom", "seen", "tensor", "view", "array"]
        if depth:
            kinds += ["list", "dict", "set", "tuple", "ordered", "deque", "node", "slotted", "keeper"]
        kind = self.data.draw(st.sampled_from(kinds))
        made = getattr(self, f"_{kind}")(depth - 1)
        if kind not in ("atom", "seen"):
            self.made.append(made)
        return made

    def many(self, depth: int) -> list[Any]:
        return [self.value(depth) for _ in range(self.data.draw(st.integers(0, 3)))]

    def _atom(self, depth: int) -> Any:
        return self.data.draw(
            st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.floats(allow_nan=False))
        )

    def _seen(self, depth: int) -> Any:
        return self.data.draw(st.sampled_from(self.made)) if self.made else None

    def _tensor(self, depth: int) -> Any:
        return torch.full((self.data.draw(st.integers(0, 3)),), float(self.data.draw(st.integers(0, 9))))

    def _view(self, depth: int) -> Any:
        start = self.data.draw(st.integers(0, 60))
        return self.storage[start : start + self.data.draw(st.integers(0, 4))]

    def _array(self, depth: int) -> Any:
        return np.arange(self.data.draw(st.integers(0, 4)))

    def _list(self, depth: int) -> Any:
        made: list[Any] = []
        self.made.append(made)
        made += self.many(depth)
        return made

    def _dict(self, depth: int) -> Any:
        made: dict[Any, Any] = {}
        self.made.append(made)
        made.update(enumerate(self.many(depth)))
        return made

    def _set(self, depth: int) -> Any:
        return set(self.data.draw(st.lists(st.integers(0, 9), max_size=3)))

    def _tuple(self, depth: int) -> Any:
        return tuple(self.many(depth))

    def _ordered(self, depth: int) -> Any:
        return OrderedDict((str(index), item) for index, item in enumerate(self.many(depth)))

    def _deque(self, depth: int) -> Any:
        return deque(self.many(depth), maxlen=5)

    def _node(self, depth: int) -> Any:
        made = self.names["Node"]()
        self.made.append(made)
        made.items = self.many(depth)
        made.me = made
        return made

    def _slotted(self, depth: int) -> Any:
        made = self.names["Slotted"]()
        made.left = self.value(depth)
        return made

    def _keeper(self, depth: int) -> Any:
        made = self.names["Keeper"](a=self.value(depth))
        made.extra = self.value(depth)
        return made


def picture(root: Any) -> Any:
    """A graph as plain data: values, types, and which places hold the same object."""
    numbers: dict[int, int] = {}
    keep = []

    def draw(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return [type(value).__name__, repr(value)]
        if id(value) in numbers:
            return ["again", numbers[id(value)]]
        if not isinstance(value, tuple):  # equal ones may be one or several
            numbers[id(value)] = len(numbers)
        keep.append(value)
        name = type(value).__name__
        if isinstance(value, torch.Tensor):
            return [name, value.tolist(), value.storage_offset(), ["storage", shared(value)]]
        if isinstance(value, np.ndarray):
            return [name, value.tolist(), str(value.dtype)]
        if isinstance(value, dict):
            extra = draw(value.__dict__["extra"]) if hasattr(value, "__dict__") and "extra" in value.__dict__ else None
            return [name, [[draw(key), draw(item)] for key, item in value.items()], extra]
        if isinstance(value, (list, tuple, deque)):
            return [name, [draw(item) for item in value]]
        if isinstance(value, set):
            return [name, sorted(map(repr, value))]
        state = (
            vars(value)
            if hasattr(value, "__dict__")
            else {"left": getattr(value, "left", None), "right": getattr(value, "right", None)}
        )
        return [name, [[key, draw(item)] for key, item in state.items()]]

    storages: dict[int, int] = {}

    def shared(value: Any) -> int:
        if value.numel() == 0:
            return -1
        return storages.setdefault(value.untyped_storage().data_ptr(), len(storages))

    return draw(root)


def mutate(value: Any, seen: set[int], script: Any) -> None:
    """Change some of what can be changed, the same way wherever the same script is played."""
    if id(value) in seen or value is None or isinstance(value, (bool, int, float, str)):
        return
    seen.add(id(value))
    change = next(script)
    if isinstance(value, torch.Tensor):
        if change == 1 and value.numel():
            value += 1
        return
    if isinstance(value, np.ndarray):
        if change == 1:
            value += 1
        return
    children: list[Any] = []
    if isinstance(value, dict):
        children = list(value.values())
        if change == 1:
            value["new"] = [change]
        elif change == 2 and value:
            del value[next(iter(value))]
    elif isinstance(value, (list, deque)):
        children = list(value)
        if change == 1:
            value.append({"new": change})
        elif change == 2:
            value.clear()
        elif change == 3 and len(value) > 1:
            value[0] = value[1]
    elif isinstance(value, set):
        if change == 1:
            value.add("new")
    elif isinstance(value, tuple):
        children = list(value)
    else:
        attributes = vars(value) if hasattr(value, "__dict__") else {"left": value.left}
        children = list(attributes.values())
        if change == 1:
            value.left = "changed"
        elif change == 2 and "items" in attributes:
            del value.items
    for child in children:
        mutate(child, seen, script)


def _put(blobs: Path) -> Any:
    def put(content: bytes | memoryview) -> Blob:
        digest = sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return Blob(digest, memoryview(content).nbytes)

    return put


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_random_graph_crosses_changes_and_comes_back(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    home = Home(tmp_path_factory.mktemp("graph"))
    home.blobs.mkdir()
    notebook: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(DEFINITIONS, notebook)
    builder = Builder(data, notebook)
    notebook["a"], notebook["b"] = builder.value(3), builder.value(2)
    script = data.draw(st.lists(st.integers(0, 5), max_size=12))
    original = [notebook["a"], notebook["b"]]

    captured = capture.capture_cell("a, b, Node, Slotted, Keeper", "Cell In[1]", 1, notebook, cwd=home.root)
    manifest = capture.pack(captured, "job", _put(home.blobs))
    manifest = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert picture(original) == picture([notebook["a"], notebook["b"]])

    main = types.ModuleType("__main__")
    loaded = marshal.load_bundle(manifest, home.blobs, main)
    names = vars(main)
    assert picture([names["a"], names["b"]]) == picture(original)
    assert marshal.changed_names(loaded, main) == []

    loaded = marshal.load_bundle(manifest, home.blobs, main := types.ModuleType("__main__"))
    names = vars(main)
    mutate([names["a"], names["b"]], set(), iter([0, *script, *[0] * 1000]))
    names["c"] = [names["b"], names["a"]]
    wanted = picture([names["a"], names["b"], names["c"]])
    changed = marshal.changed_names(loaded, main)
    values = {name: names[name] for name in dict.fromkeys(["c", *changed])}
    home.job("job").root.mkdir(parents=True, exist_ok=True)
    dumped = marshal.dump_results(values, loaded, home.job("job"), 0)
    assert dumped.left == ()
    found = marshal.load_results(home.job("job"), 0, captured.memo, notebook)
    assert found.notes == ()
    notebook.update(found)
    assert picture([notebook["a"], notebook["b"], notebook["c"]]) == wanted
    for before, name in zip(original, "ab", strict=True):
        if isinstance(before, (list, dict, set, deque, torch.Tensor)) or type(before).__name__ in ("Node", "Slotted"):
            assert notebook[name] is before or name not in changed


@given(st.binary(max_size=2000), st.integers(0, 1999), st.integers(1, 255))
@settings(max_examples=50, deadline=None)
def test_any_changed_byte_changes_the_digest(content: bytes, place: int, flip: int) -> None:
    changed = bytearray(content or b"x")
    changed[place % len(changed)] ^= flip
    assert sha256(changed).digest() != sha256(content or b"x").digest()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)), max_size=5))
@settings(max_examples=50, deadline=None)
def test_written_pages_are_found(tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int]]) -> None:
    path = tmp_path_factory.mktemp("pages") / "file"
    path.write_bytes(b"\1" * 40 * 4096)
    maps = [mapping.map_private(path, 40 * 4096) for _ in range(3)]
    starts = [mapping.address_of(view) for view in maps]
    for page, value in writes:
        maps[1][min(page, 39) * 4096 + 5] = value
    pages = mapping.Pages((start, start + 40 * 4096) for start in starts)
    assert [pages.untouched(start + 4096) for start in starts] == [True, not writes, True]
    assert not pages.untouched(starts[0] - 1) or pages.find(starts[0] - 1)
    assert path.read_bytes() == b"\1" * 40 * 4096


def test_code_digests_ignore_where_the_code_stands() -> None:
    text = "def f(x):\n    'doc'\n    return [x, {'a', 'b'}, lambda: 3]"
    one: dict[str, Any] = {}
    two: dict[str, Any] = {}
    other: dict[str, Any] = {}
    exec(compile(text, "one", "exec"), one)
    exec(compile("\n\n\n" + text, "two", "exec"), two)
    exec(compile(text.replace("3", "4"), "two", "exec"), other)
    assert codes.code_digest(one["f"].__code__) == codes.code_digest(two["f"].__code__)
    assert codes.code_digest(one["f"].__code__) != codes.code_digest(other["f"].__code__)


def test_an_empty_buffer_and_a_large_in_band_value(tmp_path: Path) -> None:
    from jupyter_torchdist.marshal.pickler import Pickler

    stream = io.BytesIO()
    pickler = Pickler(stream, {})
    pickler.dump([torch.empty(0), np.empty(0), b"x" * 1_000_000, bytearray(0)])
    assert pickler.buffers == []
