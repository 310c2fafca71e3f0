"""``td.meta``: models that are built without memory, and get their initial values when they are distributed.

The tensor operations of building a model are recorded. Later they are replayed on real memory, in the same order and
from the same random state: the values are as if the model had been built normally. Complete parameters are
sharded one at a time, so a rank holds only those that are not complete yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...protocol.errors import StrategyError
from ...torch_private.places import TorchDispatchMode, tree_leaves, tree_map_only
from . import rank_context

_META = torch.device("meta")
_CPU = torch.device("cpu")


asked_for = False
"""Whether ``td.meta`` was used in a process that is not a rank; a rehearsal reads it."""


@contextmanager
def meta() -> Iterator[None]:
    """Models built within have no values until they are distributed, by ``--strategy`` or ``td.prepare``.

    Then they get their usual initial values, shard by shard; or the values that rank 0 has loaded in the meantime
    (``model.load_state_dict(…, assign=True)``). The random numbers of initialization are drawn only then.
    It has no effect in a process without a job, nor in a job of one rank.
    """
    global asked_for
    if rank_context.current is None or rank_context.current.alone:
        asked_for = True
        yield
        return
    record = BuildRecord(torch.get_rng_state(), torch.get_default_dtype())
    with _META, _Recording(record), _Constants():
        yield
    _records.append(record)


@dataclass(frozen=True)
class Outline:
    """Where a meta tensor lies in its storage; a view itself would keep its base alive."""

    storage: torch.UntypedStorage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Outline:
        where = tensor.untyped_storage(), int(tensor.storage_offset())
        return Outline(*where, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def key(self) -> int:
        """Identity of the storage; unique, because this object keeps the storage alive."""
        return int(self.storage._cdata)


@dataclass
class BuildCall:
    """One operation, with outlines of its meta inputs and outputs."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outputs: list[Any]

    def outlines(self) -> list[Outline]:
        leaves = tree_leaves((self.args, self.kwargs, self.outputs))
        return [leaf for leaf in leaves if isinstance(leaf, Outline)]


@dataclass
class BuildRecord:
    """All operations within one ``td.meta`` block, in order."""

    numbers: Tensor
    """State of torch's generator at the start of the block."""
    dtype: torch.dtype
    calls: list[BuildCall] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    """For each storage, the index of the last call that uses it."""
    wanted: Counter[int] = field(default_factory=Counter)
    """For each storage, how many tensors will still be requested."""
    replay: Replay | None = None

    def note(self, call: BuildCall) -> None:
        outlines = call.outlines()
        for outline in outlines:
            self.last[outline.key] = len(self.calls)
        if outlines:
            self.calls.append(call)

    def value(self, tensor: Tensor) -> Tensor:
        if self.replay is None:
            self.replay = Replay(self)
        return self.replay.value(tensor)


_records: list[BuildRecord] = []


class _Recording(TorchDispatchMode):
    def __init__(self, record: BuildRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        given_args, given_kwargs = tree_map_only(Tensor, _outlined, (args, kwargs))
        self._record.note(BuildCall(func, given_args, given_kwargs, [_outlined(one) for one in tree_leaves(outputs)]))
        return outputs


class _Constants(TorchFunctionMode):
    """Records tensors made from Python values (``torch.tensor``): as a copy into an empty meta tensor."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = args and not isinstance(args[0], Tensor) and kwargs.get("device") is None
        if func not in (torch.tensor, torch.as_tensor, torch.asarray) or not given:
            return func(*args, **kwargs)
        constant = func(*args, **{**kwargs, "device": _CPU})
        with torch.no_grad():
            built = torch.empty_like(constant, device=_META).copy_(constant)
        return built.requires_grad_(constant.requires_grad)


class Replay:
    """Replays the operations of a record on the CPU, as far as values were requested."""

    def __init__(self, record: BuildRecord) -> None:
        self._record = record
        self._numbers = record.numbers
        self._next = 0
        self._real: dict[int, torch.UntypedStorage] = {}

    def value(self, tensor: Tensor) -> Tensor:
        """The values of a meta tensor, in new memory. Frees the storage after its last wanted tensor."""
        last = self._record.last[_key(tensor)]
        if self._next <= last:
            self._go_on(last + 1)
        value, key = self._view(Outline.of(tensor)).clone(), _key(tensor)
        self._record.wanted[key] -= 1
        if self._record.wanted[key] <= 0:
            self._real.pop(key, None)
        return value

    def _go_on(self, end: int) -> None:
        common, dtype = torch.get_rng_state(), torch.get_default_dtype()
        torch.set_rng_state(self._numbers)
        torch.set_default_dtype(self._record.dtype)
        try:
            with torch.no_grad():
                for number in range(self._next, end):
                    self._repeat(self._record.calls[number])
                    self._free(self._record.calls[number], number)
        finally:
            self._numbers, self._next = torch.get_rng_state(), end
            torch.set_rng_state(common)
            torch.set_default_dtype(dtype)

    def _repeat(self, call: BuildCall) -> None:
        args, kwargs = tree_map_only(Outline, self._view, (call.args, call.kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        outputs = tree_leaves(call.function(*args, **kwargs))
        for built, real in zip(call.outputs, outputs, strict=True):
            if isinstance(built, Outline):
                self._real.setdefault(built.key, real.untyped_storage())

    def _free(self, call: BuildCall, number: int) -> None:
        """Free storages that no later call uses and nobody will request."""
        for key in {outline.key for outline in call.outlines()}:
            if self._record.last[key] == number and self._record.wanted[key] <= 0:
                self._real.pop(key, None)

    def _view(self, outline: Outline) -> Tensor:
        storage = self._real.get(outline.key)
        if storage is None:
            raise StrategyError(
                f"a tensor of shape {list(outline.shape)} was on the meta device before `with td.meta():` began",
                "build all of the model within it",
            )
        empty = torch.empty(0, dtype=outline.dtype)
        return empty.set_(storage, outline.offset, outline.shape, outline.stride)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _outlined(value: Any) -> Any:
    return Outline.of(value) if isinstance(value, Tensor) and value.is_meta else value


def is_recorded(tensor: Tensor) -> bool:
    """Whether a tensor was built within ``meta``."""
    return tensor.is_meta and any(_key(tensor) in record.last for record in _records)


def value_of(tensor: Tensor) -> Tensor:
    """The values of a recorded tensor, on the CPU; other tensors are returned unchanged. Call in building order."""
    for record in _records if tensor.is_meta else ():
        if _key(tensor) in record.last:
            return record.value(tensor.detach())
    return tensor


def lacks_values(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def want(model: nn.Module) -> None:
    """Announce that each tensor of ``model`` will be requested once; the replay frees all others early."""
    for tensor in (*model.parameters(), *model.buffers()):
        for record in _records if tensor.is_meta else ():
            if _key(tensor) in record.last:
                record.wanted[_key(tensor)] += 1


def fill(model: nn.Module) -> None:
    """Give a model all its values, in place: parameters stay the same objects. Raises ``StrategyError``."""
    lacking = [
        name
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
        if tensor.is_meta and not is_recorded(tensor)
    ]
    if lacking:
        raise StrategyError(
            f"{len(lacking)} tensors of {type(model).__name__} have no values ({lacking[0]}): they are on the meta "
            "device",
            "build the model within `with td.meta():`, or load its weights (load_state_dict(…, assign=True))",
        )
    want(model)
    for parameter in list(model.parameters()):
        if parameter.is_meta:
            become(parameter, value_of(parameter))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = value_of(buffer)


def become(parameter: nn.Parameter, value: Tensor) -> None:
    """Give values to a meta parameter in place: all references to the parameter see them."""
    torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
