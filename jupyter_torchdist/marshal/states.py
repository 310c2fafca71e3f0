"""The state of an object without its identity: read in a rank and put into the notebook's own object in place."""

from __future__ import annotations

import copyreg
import itertools
import sys
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import byvalue, classes, generated
from .rebuild import Scope, Storage
from .tensors import is_tensor

if TYPE_CHECKING:
    from .pickler import Pickler


SHARED = (
    "the cell wrote to a NumPy array or a tensor that shares memory with another one in the notebook, but not on the "
    "ranks: there the other one kept its values. If the cell wrote to both, the notebook has one of the writes"
)


@dataclass
class State:
    """The content of an update record. ``kind`` says how it is put back.

    ``items``: items of a container. ``state``: the state from ``__reduce_ex__``. ``rest``: parts that cannot be put
    back in place (class and constructor arguments) but may refer to objects that changed.
    """

    kind: str
    items: Any = None
    state: Any = None
    rest: Any = None
    setter: Any = None
    keeps: tuple[str, ...] = ()
    """Attributes of code that are not told: the other process keeps what it has there."""
    become: type | None = None

    def for_update(self, become: type | None) -> State:
        """The state without ``rest``, and the new class if the object changed its class."""
        return replace(self, rest=None, become=become)

    def part_of_code(self) -> dict[str, Any]:
        """What a cell may have set on a class, a function or a scope; empty for other objects."""
        found: dict[str, Any] = {"class": self.items, "scope": self.items, "function": self.state}.get(self.kind, {})
        return found

    def without(self, names: Iterable[str]) -> State:
        """The state of code without some of ``part_of_code``: the other process keeps what it has there."""
        lost = tuple(names)
        kept = {name: item for name, item in self.part_of_code().items() if name not in lost}
        keeps = (*self.keeps, *lost)
        return (
            replace(self, state=kept, keeps=keeps)
            if self.kind == "function"
            else replace(self, items=kept, keeps=keeps)
        )


def state_of(value: Any, pickler: Pickler) -> State:
    """The object's own state. Raises what the object's reducers raise."""
    kind = type(value)
    if isinstance(value, Storage):
        return State("storage", Storage(value.untyped, value.start, value.stop))
    if kind in _CODE or isinstance(value, type):
        return _code_state(value, pickler)
    if is_tensor(kind) and not _is_lazy(value):
        return _tensor_state(value)
    if _is_array(value):
        return State("array", value.view())
    container = _container(value)
    if container is not None:
        return State(container, _items(container, value), _attributes(value))
    if kind is itertools.count:
        return State("count", _next_and_step(value))
    reduced = pickler.reducer_override(value)
    if reduced is NotImplemented:
        reducer = pickler.dispatch_table.get(kind)
        reduced = reducer(value) if reducer else value.__reduce_ex__(5)
    if isinstance(reduced, str):
        return State("constant", rest=reduced)
    func, arguments, state, listed, mapped, setter = (*reduced, None, None, None, None, None)[:6]
    rest = [func, arguments, list(listed or ()), list(mapped or ())]
    if state is None:
        return State("constant", rest=rest)
    return State("plain" if _plain_state(kind) and setter is None else "state", state=state, rest=rest, setter=setter)


_CODE = (types.FunctionType, types.CellType, Scope)


def _code_state(value: Any, pickler: Pickler) -> State:
    """What a cell may change of a class, a function, a variable of a closure, or a scope."""
    if isinstance(value, type):
        own = classes.attributes_of(value)
        told = generated.without_generated(value, own)[0] if pickler.portable else own
        rest = type(value), value.__bases__
        return State("class", told, classes.members_of(value), rest, keeps=tuple(own.keys() - told.keys()))
    if isinstance(value, types.CellType):
        return State("cell", _contents(value))
    if isinstance(value, Scope):
        return State("scope", dict(value.items()))
    parts = {name: getattr(value, name) for name in _OF_FUNCTIONS}
    scope = pickler.scopes.get(id(value.__globals__))
    attributes = {"".join(name): item for name, item in vars(value).items()}
    return State("function", parts, attributes, (value.__closure__, scope))


_OF_FUNCTIONS = ("__defaults__", "__kwdefaults__", "__doc__")


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def is_code(value: Any) -> bool:
    """Whether the value is code that travels by value, or belongs to such code."""
    if isinstance(value, (type, types.FunctionType)):
        return byvalue.carries(value)
    return isinstance(value, (types.CellType, Scope))


def _container(value: Any) -> str | None:
    for kind in (OrderedDict, dict, list, set, deque, bytearray):
        if isinstance(value, kind):
            return kind.__name__
    return "numbers" if isinstance(value, array) else None


def _items(container: str, value: Any) -> Any:
    if container == "OrderedDict":
        return list(OrderedDict.items(value))
    if container == "dict":
        return list(dict.items(value))
    if container == "set":
        return list(set.__iter__(value))
    if container in ("bytearray", "numbers"):
        return bytes(value)
    return list(value)


def _attributes(value: Any) -> dict[str, Any] | None:
    own = getattr(value, "__dict__", None)
    return dict(own) if own and own is not value else None


def _plain_state(kind: Any) -> bool:
    """Whether the state is exactly ``__dict__`` and slots, so that a missing attribute means a deleted one."""
    getstate = getattr(kind, "__getstate__", None)
    default = getstate is None or getstate is getattr(object, "__getstate__", None)
    return default and kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__


def _is_lazy(value: Any) -> bool:
    torch: Any = sys.modules["torch"]
    return bool(torch.nn.parameter.is_lazy(value))


def _tensor_state(value: Any) -> State:
    grad = value.grad if value.is_leaf else None
    return State("tensor", value.detach(), (value.requires_grad, grad, dict(vars(value))))


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def shared(targets: Mapping[int, Any], written: Container[int]) -> bool:
    """Whether an array or storage of a place in ``written`` lies in the memory of another one of ``targets``."""
    spans = sorted((*span, place) for place, target in targets.items() if (span := _span(target)))
    open_: list[tuple[int, int, int]] = []
    for start, end, place in spans:
        open_ = [one for one in open_ if one[1] > start]
        for _, _, other in open_:
            if (place in written or other in written) and _overlap(targets[place], targets[other]):
                return True
        open_.append((start, end, place))
    return False


def _overlap(one: Any, other: Any) -> bool:
    """Of two whose spans overlap; columns of one table do not."""
    if not (_is_array(one) and _is_array(other)):
        return True
    numpy = sys.modules["numpy"]
    try:
        return bool(numpy.shares_memory(one, other, max_work=1000))
    except RuntimeError:  # too hard to find out
        return True


def _span(target: Any) -> tuple[int, int] | None:
    if isinstance(target, Storage):
        return (target.address, target.address + target.size) if target.size else None
    if not _is_array(target) or not target.size:
        return None
    start = target.__array_interface__["data"][0]
    reach = [(count - 1) * step for count, step in zip(target.shape, target.strides, strict=True)]
    return start + sum(min(0, step) for step in reach), start + sum(max(0, step) for step in reach) + target.itemsize


def put(target: Any, state: State) -> None:
    """Give ``target`` the state, in place. Raises what the object's own ``__setstate__`` raises."""
    if state.become is not None:
        target.__class__ = state.become
    if state.kind == "storage":
        _put_storage(target, state.items)
    elif state.kind == "tensor":
        _put_tensor(target, state.items, *state.state)
    elif state.kind == "array":
        target[...] = state.items
    elif state.kind == "plain":
        _put_plain(target, state.state)
    elif state.kind in _PUT_CODE:
        _PUT_CODE[state.kind](target, state)
    elif state.kind == "state":
        _put_state(target, state.state, state.setter)
    elif state.kind == "count":
        _count_on(target, *state.items)
    elif state.kind != "constant":
        _put_items(target, state.kind, state.items)
        if state.state is not None:
            _replace(target.__dict__, state.state)


def _put_class(target: type, state: State) -> None:
    classes.set_attributes(target, state.items, state.state)
    classes.remove_others(target, {**state.items, **dict.fromkeys(state.keeps)})


def _put_function(target: types.FunctionType, state: State) -> None:
    for name, value in state.items.items():
        if getattr(target, name) is not value:
            setattr(target, name, value)
    kept = {name: vars(target)[name] for name in state.keeps if name in vars(target)}
    _replace(vars(target), {**kept, **state.state})


def _put_cell(target: types.CellType, state: State) -> None:
    if state.items:
        target.cell_contents = state.items[0]
    elif _contents(target):
        del target.cell_contents


def _put_scope(target: Scope, state: State) -> None:
    target.names.update(state.items)


_PUT_CODE: dict[str, Callable[[Any, State], None]] = {
    "class": _put_class, "function": _put_function, "cell": _put_cell, "scope": _put_scope,
}  # fmt: skip


def _put_storage(target: Storage, new: Storage) -> None:
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        _flat(torch, target).copy_(_flat(torch, new))


def _flat(torch: Any, storage: Storage) -> Any:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.untyped.device)
    return empty.set_(storage.untyped, storage.start, (storage.size,), (1,))


def _put_tensor(target: Any, new: Any, requires_grad: bool, grad: Any, attributes: dict[str, Any]) -> None:
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        alike = target.shape == new.shape and target.dtype == new.dtype and target.layout == new.layout
        if not alike or not _copied(target, new):
            target.data = new
    if target.is_leaf:
        target.requires_grad_(requires_grad)
        target.grad = grad
    _replace(vars(target), attributes)


def _copied(target: Any, new: Any) -> bool:
    try:
        target.copy_(new)
    except RuntimeError:  # an expanded or inference tensor refuses writes
        return False
    return True


def _next_and_step(count: Any) -> tuple[Any, Any]:
    """The next number of an ``itertools.count``, and what is added each time."""
    following, *step = count.__reduce__()[1]
    return following, step[0] if step else 1


def _count_on(count: Any, wanted: Any, step: Any) -> None:
    """Take the numbers that the ranks took. Nothing else can be done to it."""
    for _ in range(round((wanted - _next_and_step(count)[0]) / step) if step else 0):
        next(count)


def _put_plain(target: Any, state: Any) -> None:
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if hasattr(target, "__dict__"):
        _replace(target.__dict__, attributes or {})
    known: dict[str, Any] = slots or {}
    for name in copyreg._slotnames(type(target)):  # type: ignore[attr-defined]
        if name in known:
            object.__setattr__(target, name, known[name])
        elif hasattr(target, name):
            object.__delattr__(target, name)


def _put_state(target: Any, state: Any, setter: Any) -> None:
    if setter is not None:
        setter(target, state)
    elif hasattr(target, "__setstate__"):
        target.__setstate__(state)
    elif isinstance(state, tuple) and len(state) == 2:
        target.__dict__.update(state[0] or {})
        for name, value in (state[1] or {}).items():
            setattr(target, name, value)
    else:
        target.__dict__.update(state)


def _put_items(target: Any, kind: str, items: Any) -> None:
    if kind == "list":
        list.__setitem__(target, slice(None), items)
    elif kind == "bytearray":
        bytearray.__setitem__(target, slice(None), items)
    elif kind == "numbers":
        del target[:]
        target.frombytes(items)
    elif kind == "set":
        set.clear(target)
        set.update(target, items)
    elif kind == "deque":
        deque.clear(target)
        deque.extend(target, items)
    else:
        base: Any = OrderedDict if kind == "OrderedDict" else dict
        base.clear(target)
        for key, value in items:
            base.__setitem__(target, key, value)


def _replace(target: dict[str, Any], new: dict[str, Any]) -> None:
    for name in target.keys() - new.keys():
        del target[name]
    target.update(new)
