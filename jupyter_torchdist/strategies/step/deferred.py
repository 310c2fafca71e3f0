"""Lazy tensors, and the record of the operations of user code on them.

A forward may return its outputs as ``Deferred``. User code computes a loss from them. Each function call is recorded
(by ``__torch_function__``) and run on fake tensors for its shapes. Then there are two cases. (1) ``backward()`` is
called on a recorded scalar: the record tells how the loss depends on the outputs, and the forward can still choose how
to compute both. (2) Something needs a value (``item()``, ``print``, a hook, a custom ``autograd.Function``): the
forward and the recorded operations run at once. Both cases are exact. Afterwards the tensors are ordinary: the same
objects, with values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...torch_private.places import FakeTensor, FakeTensorMode, TorchDispatchMode
from ...torch_private.tensors import make_wrapper_subclass
from ..core.patches import Patches
from ..core.scatter import map_tensors, tensors_in

_OF_SHAPE = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex"),
        *("__len__", "element_size", "get_device", "is_contiguous"),
    }
)
_PROPERTIES = frozenset(
    {"shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_sparse", "nbytes"}
)
_IN_PLACE: dict[str, Callable[..., Any]] = {
    name: function
    for names, function in (
        (("add_", "__iadd__"), torch.add),
        (("sub_", "__isub__"), torch.sub),
        (("mul_", "__imul__"), torch.mul),
        (("div_", "__itruediv__", "__idiv__"), torch.div),
    )
    for name in names
}
"""In-place operations that are common on a loss (``loss /= steps``), with their out-of-place forms."""

_OWN = ("record", "number")
_COUNTED_HERE = 3
"""References to a tensor in our own code: the list, the loop, the argument of ``getrefcount``."""


class ValueSource(Protocol):
    """The forward behind deferred outputs."""

    def now(self, why: str) -> Sequence[Tensor]:
        """Compute the outputs, differentiable. ``why``: the name of the operation that needs them."""

    def backward(self, loss: Deferred, grad: Tensor | None) -> bool:
        """Compute forward, loss and gradients. False: only the forward was computed."""


@dataclass(frozen=True)
class Ref:
    """Stands for a recorded tensor."""

    number: int


@dataclass(frozen=True)
class External:
    """Stands for a tensor from outside the record."""

    place: int


@dataclass(frozen=True)
class Node:
    """One recorded function call, and the numbers of its results."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    numbers: tuple[int, ...]
    graded: bool
    autocast: tuple[str, bool, torch.dtype]

    def run(self, values: dict[int, Tensor], externals: Sequence[Tensor]) -> None:
        """Add the results to ``values``."""

        def real(part: Any) -> Any:
            if isinstance(part, Ref):
                return values[part.number]
            return externals[part.place] if isinstance(part, External) else part

        kind, enabled, dtype = self.autocast
        with torch.set_grad_enabled(self.graded and torch.is_grad_enabled()), torch.autocast(kind, dtype, enabled):
            results = tensors_in(self.function(*mapped(self.args, real), **mapped(self.kwargs, real)))
        values.update(zip(self.numbers, results, strict=True))


class OperationRecord:
    """The record of one forward. ``fakes``: its outputs as fake tensors, of fake mode ``mode``."""

    def __init__(
        self, source: ValueSource, fakes: Sequence[Tensor], mode: FakeTensorMode, device: torch.device
    ) -> None:
        self._source, self._mode, self._device = source, mode, device
        self._fakes: list[Tensor] = []
        self._living: list[Deferred] = []
        self._versions: list[int] = []
        self._values: dict[int, Tensor] | None = None
        self.nodes: list[Node] = []
        self.externals: list[Tensor] = []
        self.outputs = [self._new(fake) for fake in fakes]

    def _new(self, fake: Tensor) -> Deferred:
        tensor = Deferred(fake, self._device)
        tensor.record, tensor.number = self, len(self._fakes)
        self._fakes.append(fake)
        if self._values is None:
            self._living.append(tensor)
        return tensor

    @property
    def done(self) -> bool:
        """Whether the values are computed."""
        return self._values is not None

    def fake(self, tensor: Deferred) -> Tensor:
        return self._fakes[tensor.number]

    def value(self, tensor: Deferred, why: str) -> Tensor:
        """The value of a recorded tensor; computes all values if necessary."""
        number = tensor.number
        if self._values is None:
            self.come(self._source.now(why))
        assert self._values is not None
        return self._values[number]

    def backward(self, loss: Deferred, grad: Tensor | None) -> bool:
        """See ``ValueSource.backward``."""
        self.check_externals()
        return self._source.backward(loss, grad)

    def come(self, outputs: Sequence[Tensor], known: dict[int, Tensor] | None = None) -> None:
        """Set the outputs' values, and run the recorded operations. ``known``: results that exist already."""
        if self._values is not None:
            return
        self.check_externals()
        self._values = {**dict(enumerate(outputs)), **(known or {})}
        for node in self.nodes:
            if not all(number in self._values for number in node.numbers):
                node.run(self._values, self.externals)
        self._settle()

    def come_alone(self, known: dict[int, Tensor]) -> None:
        """Set only these values: nothing else is used any more."""
        self._values = dict(known)
        self._settle()

    def _settle(self) -> None:
        """Turn the user's tensors into ordinary ones where Python allows it; others forward to their values."""
        assert self._values is not None
        taken: dict[int, Tensor] = {}
        for tensor in self._living:
            number = tensor.number
            value = self._values.get(number)
            if value is not None and id(value) not in taken and _become(tensor, value):
                taken[id(value)] = tensor
        self._values = {number: taken.get(id(value), value) for number, value in self._values.items()}
        self._living, self.nodes, self.externals, self.outputs = [], [], [], []

    def wanted(self, loss: Deferred) -> bool:
        """Whether user code still holds another recorded tensor than ``loss``."""
        self.outputs = []
        return any(tensor is not loss and sys.getrefcount(tensor) > _COUNTED_HERE for tensor in self._living)

    def check_externals(self) -> None:
        """Raises ``RuntimeError`` if an external tensor was written after it was recorded."""
        for tensor, version in zip(self.externals, self._versions, strict=True):
            if _version(tensor) != version:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)}, from which the loss is computed, was changed in place "
                    "before backward(): change a copy, or use -O schedule=gpipe"
                )

    # ----------------------------------------------------------------------------------------------------- recording

    def called(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a function call, and return deferred results; ``NotImplemented`` if values are needed."""
        name = getattr(function, "__name__", "")
        written = args[0] if name in _IN_PLACE and isinstance(args[0], Deferred) else None
        if written is not None:
            if written.dim() or any(Ref(written.number) in _parts((node.args, node.kwargs)) for node in self.nodes):
                return NotImplemented  # a view of it may have been taken
            function = _IN_PLACE[name]
        elif _writes(name) or "out" in kwargs or not self._takes((args, kwargs)):
            return NotImplemented
        fakes = map_tensors((args, kwargs), lambda one: one.record.fake(one) if isinstance(one, Deferred) else one)
        try:
            with self._mode, _NoChance():  # type: ignore[no-untyped-call]
                results = function(*fakes[0], **fakes[1])
        except Exception:  # noqa: BLE001  # on real values it may succeed, or raises the right error
            return NotImplemented
        made = tensors_in(results)
        if not made or not all(isinstance(tensor, FakeTensor) for tensor in made):
            return NotImplemented
        first = len(self._fakes)
        self._note(function, args, kwargs, tuple(range(first, first + len(made))))
        if written is None:
            return map_tensors(results, self._new)
        written.number = first
        self._fakes.append(made[0])
        return written

    def _note(self, function: Any, args: Any, kwargs: Any, numbers: tuple[int, ...]) -> None:
        def stand_in(one: Any) -> Any:
            if isinstance(one, Deferred):
                return Ref(one.number)
            if not isinstance(one, Tensor):
                return one
            for place, known in enumerate(self.externals):
                if known is one:
                    return External(place)
            self.externals.append(one)
            self._versions.append(_version(one))
            return External(len(self.externals) - 1)

        kind = self._device.type
        autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        given = mapped(args, stand_in), mapped(kwargs, stand_in)
        self.nodes.append(Node(function, *given, numbers, torch.is_grad_enabled(), autocast))

    def _takes(self, values: Any) -> bool:
        """Whether all other tensors have values and require no gradient, and no other record is involved."""
        for one in tensors_in(values):
            if isinstance(one, Deferred):
                if one.record is not self:
                    return False
            elif one.is_meta or isinstance(one, FakeTensor | nn.Parameter) or one.requires_grad:
                return False
        return True


class Deferred(Tensor):
    """A tensor of an ``OperationRecord``."""

    record: OperationRecord
    number: int

    @staticmethod
    def __new__(cls, fake: Tensor, device: torch.device) -> Deferred:
        made: Deferred = make_wrapper_subclass(
            cls, fake.shape, strides=fake.stride(), dtype=fake.dtype, device=device, requires_grad=False
        )
        return made

    def __init__(self, fake: Tensor, device: torch.device) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "backward":
            return _backward(*args, **kwargs)
        found = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, Deferred)]
        waiting = [tensor for tensor in found if not tensor.record.done]
        if waiting:
            if name == "__get__" and func.__self__.__name__ in _PROPERTIES:
                return getattr(waiting[0].record.fake(waiting[0]), func.__self__.__name__)
            if name in _OF_SHAPE:
                return func(waiting[0].record.fake(waiting[0]), *args[1:], **kwargs)
            ready = settled((args, kwargs), name, but=waiting[0].record)
            answer = waiting[0].record.called(func, *ready)
            if answer is not NotImplemented:
                return answer
        args, kwargs = settled((args, kwargs), name)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = settled((args, kwargs or {}), str(func))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return settled(self, "pickle").__reduce_ex__(protocol)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def settled(values: Any, why: str, but: OperationRecord | None = None) -> Any:
    """``values`` with deferred tensors replaced by ordinary ones, except tensors of the record ``but``."""

    def real(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Deferred) or (tensor.record is but and not tensor.record.done):
            return tensor
        return tensor.record.value(tensor, why.strip("_"))

    if not any(isinstance(one, Deferred) for one in tensors_in(values)):
        return values
    return map_tensors(values, real)


def backward(original: Callable[..., Any], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``torch.autograd.backward``: a recorded loss is computed together with its gradients."""
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    loss = losses[0] if len(losses) == 1 else None
    if isinstance(loss, Deferred) and not loss.record.done and loss.dim() == 0 and not _asks_for_more(*args, **kwargs):
        grad = grad_tensors if grad_tensors is None or isinstance(grad_tensors, Tensor) else grad_tensors[0]
        if loss.record.backward(loss, grad):
            return None
    return original(settled(tensors, "backward"), settled(grad_tensors, "backward"), *args, **kwargs)


def _backward(
    loss: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Replaces ``Tensor.backward``."""
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


def _asks_for_more(
    retain_graph: Any = None, create_graph: bool = False, grad_variables: Any = None, inputs: Any = None
) -> bool:
    """Whether the other arguments of ``torch.autograd.backward`` ask for more than a plain backward."""
    return create_graph or grad_variables is not None or inputs is not None


def _writes(name: str) -> bool:
    dunder = name.startswith("__")
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not dunder) or name.startswith("__i")


class _NoChance(TorchDispatchMode):
    """Raises ``RuntimeError`` if random numbers are drawn."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError("draws random numbers")
        return func(*args, **(kwargs or {}))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild containers with ``change`` applied to all their items."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change) for item in value)
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


def _parts(value: Any) -> list[Any]:
    found: list[Any] = []
    mapped(value, found.append)
    return found


def _become(tensor: Deferred, value: Tensor) -> bool:
    """Turn the object into an ordinary tensor. False if the value has weak references or is held outside Python."""
    kept = {name: held for name, held in vars(tensor).items() if name not in _OWN}
    try:
        torch.utils.swap_tensors(tensor, value)
    except RuntimeError:
        return False
    vars(tensor).update(kept)
    return True


def install(patches: Patches) -> None:
    """Patch functions that bypass ``__torch_function__``, so that they support deferred tensors."""
    patches.around(torch.autograd, "backward", backward)
    own: Any = vars(torch.autograd.Function)["apply"]  # implemented in C from PyTorch 2.15 on

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        """A custom function needs values: its forward is not seen by ``__torch_function__``."""
        args, kwargs = settled((args, kwargs), cls.__name__)
        return own.__get__(None, cls)(*args, **kwargs)

    patches.put(torch.autograd.Function, "apply", classmethod(applied))
