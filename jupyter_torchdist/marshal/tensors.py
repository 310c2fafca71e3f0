"""How tensors travel: each storage once, out of band, and views over it. Does not import torch by itself."""

from __future__ import annotations

import pickle
import sys
from typing import Any

from . import rebuild
from .mapping import view_memory
from .rebuild import Storage

_ALIGN = 64
_NARROW = 1 << 20
"""Bytes. A larger storage travels in part if the captured views use less than half of it."""


class Storages:
    """The storages that one pickler met, one object for each, so that views share it again after loading."""

    def __init__(self, extents: dict[int, tuple[int, int]] | None = None) -> None:
        self._narrow = dict(extents or {})
        self._by_data: dict[int, Storage] = {}
        self._device: dict[int, Any] = {}
        self.extents: dict[int, tuple[int, int, int]] = {}
        self.moved: set[str] = set()
        """Devices whose tensors were copied to the CPU."""

    def share(self, known: dict[int, Storage]) -> None:
        """Use these ``Storage`` objects for tensors over the same memory."""
        self._by_data.update(known)
        self._narrow.update({key: (item.start, item.stop) for key, item in known.items()})

    def of(self, untyped: Any) -> Storage:
        key = untyped._cdata
        found = self._by_data.get(key)
        if found is None:
            on_cpu = untyped
            if untyped.device.type != "cpu":
                self.moved.add(str(untyped.device))
                self._device[key] = untyped
                on_cpu = untyped.cpu()
            start, stop = self._narrow.get(key, (0, on_cpu.nbytes()))
            found = self._by_data[key] = Storage(on_cpu, start, stop)
        return found

    def use(self, key: int, total: int, low: int, high: int) -> None:
        before = self.extents.get(key)
        if before is not None:
            low, high = min(low, before[1]), max(high, before[2])
        self.extents[key] = (total, low, high)

    def narrow(self) -> dict[int, tuple[int, int]]:
        """For storages of which the views use less than half: the part that they use, in bytes."""
        return {
            key: (low, high)
            for key, (total, low, high) in self.extents.items()
            if total > _NARROW and (high - low) * 2 < total and key not in self._narrow
        }


def is_tensor(kind: type) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "Tensor") and issubclass(kind, torch.Tensor)


def reduce_tensor(value: Any, storages: Storages) -> Any:
    """The reduction of a dense tensor on the CPU, CUDA or MPS; NotImplemented means that torch reduces the tensor."""
    torch: Any = sys.modules["torch"]
    from ..torch_private.places import DisableTorchFunctionSubclass

    with DisableTorchFunctionSubclass():
        if not _plain(value, torch):
            return NotImplemented
        dense = value.detach() if type(value) is not torch.Tensor or value.requires_grad else value
        if dense.is_conj() or dense.is_neg():
            dense = dense.resolve_conj().resolve_neg()
        untyped = dense.untyped_storage()
        storage = storages.of(untyped)
        item = dense.element_size()
        low, high = _extent(dense, item)
        storages.use(untyped._cdata, untyped.nbytes(), low, high)
        offset = max(0, dense.storage_offset() - storage.start // item)
        arguments = (
            type(value), storage, dense.dtype, offset, tuple(dense.shape), tuple(dense.stride()), value.requires_grad,
        )  # fmt: skip
        grad = value.grad if value.is_leaf else None
        hooks = _hooks(value) if value.is_leaf else {}
        state = (grad, vars(value), hooks) if grad is not None or vars(value) or hooks else None
        if state is None:
            return rebuild.tensor, arguments
        return rebuild.tensor, arguments, state, None, None, rebuild.set_tensor


def _hooks(value: Any) -> dict[str, Any]:
    """Hooks on the tensor's gradient. torch's own pickling omits them; a parameter would then train without them."""
    found = {name: getattr(value, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    return {name: hooks for name, hooks in found.items() if hooks}


def _plain(value: Any, torch: Any) -> bool:
    from ..torch_private.tensors import has_own_dispatch, is_functional

    kind = type(value)
    wrapper = has_own_dispatch(kind) and kind is not torch.Tensor
    own = "__reduce_ex__" in vars(kind) and kind is not torch.nn.Parameter and kind is not torch.Tensor
    return (
        not wrapper
        and not own
        and not torch.nn.parameter.is_lazy(value)
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda", "mps")
        and not value.is_quantized
        and not value.is_nested
        and not is_functional(value)
    )


def _extent(dense: Any, item: int) -> tuple[int, int]:
    """First and last byte (rounded outwards) that the view uses of its storage."""
    if dense.numel() == 0:
        return 0, 0
    reach = sum((count - 1) * step for count, step in zip(dense.shape, dense.stride(), strict=True))
    low, high = dense.storage_offset() * item, (dense.storage_offset() + reach + 1) * item
    return low - low % _ALIGN, high


def is_optimizer(kind: Any) -> bool:
    torch = sys.modules.get("torch")
    optim = getattr(torch, "optim", None)
    return optim is not None and issubclass(kind, optim.Optimizer) and kind.__reduce_ex__ is object.__reduce_ex__


def reduce_optimizer(value: Any) -> Any:
    """torch's own state omits step hooks and the scheduler's mark on ``step`` (without it, the scheduler's first
    ``step()`` would warn)."""
    build, arguments, state = value.__reduce_ex__(5)[:3]
    hooks = {name: item for name, item in vars(value).items() if name.startswith("_optimizer_") and item}
    watched = hasattr(vars(value).get("step"), "_wrapped_by_lr_sched")
    extra = (hooks, watched, getattr(value, "_opt_called", None))
    return build, arguments, (state, extra), None, None, rebuild.set_optimizer


def is_parametrized(kind: type) -> bool:
    """Whether the class was made for one module by ``torch.nn.utils.parametrize`` (weight_norm, spectral_norm)."""
    return kind.__module__ == "torch.nn.utils.parametrize" and kind.__name__.startswith("Parametrized")


def reduce_parametrized(value: Any) -> Any:
    """torch refuses to pickle such a module because its class has no name; its base and its state are enough."""
    made_from = type(value).__bases__[0]
    return rebuild.bare_instance, (made_from,), dict(vars(value)), None, None, rebuild.set_parametrized


def reduce_storage(storage: Storage) -> Any:
    if storage.size == 0:
        return rebuild.storage, (b"",)
    view = view_memory(storage.address, storage.size, storage.untyped)
    return rebuild.storage, (pickle.PickleBuffer(view),)
