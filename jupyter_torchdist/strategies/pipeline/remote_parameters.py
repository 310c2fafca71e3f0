"""Parameters of other pipeline stages, as the cell sees them: no values, no gradients, and an error when one is read.

The cell's operations on them compute no values on this rank; the ranks that hold them compute the values. Random
numbers for them (a layer that is reset) are also drawn here and dropped, so all ranks keep the same random numbers.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer

from ...protocol.errors import StrategyError
from ...torch_private.places import DisableTorchFunctionSubclass
from ...torch_private.tensors import TENSOR_FILE, parse_to
from ...usercode.frames import is_ours, is_users
from ..core.patches import Patches
from ..core.scatter import map_tensors, tensors_in
from ..parallel.fsdp import OF_PLAIN_ONES, in_backward

_IN_PLACE = frozenset(
    ("normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_", "random_")
)
_NEW = frozenset((torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.dropout, torch.normal))
_NUMBERS = frozenset(("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__format__", "__array__"))
_OF_SHAPES = frozenset(
    (
        *("expand_as", "view_as", "reshape_as", "resize_as_", "broadcast_tensors"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "zeros_like", "ones_like", "empty_like", "full_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    )
)
"""Functions that use only the shape or dtype of a tensor."""
_MOVES = frozenset(("to", "cpu", "cuda", "type_as"))
_COPIED = frozenset(("__deepcopy__", "__reduce_ex__"))
_HINT = "use --strategy ddp or fsdp, where every rank has what the cell reads"
_TORCH = os.path.dirname(torch.__file__) + os.sep
_MACHINERY = frozenset((nn.parameter.__file__, nn.modules.module.__file__, TENSOR_FILE))
"""Source files of torch that make parameters from parameters and depend on their classes."""


def install(patches: Patches) -> None:
    """Patch torch while user code runs. ``nn.init`` is patched, because it draws by more than tensor methods."""

    def begun(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, (Away, Elsewhere)):
            return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        original(_in_memory(tensor), *args, **kwargs)
        return tensor

    def loaded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
            return original(*args, **kwargs)

    patches.around(nn.Module, "load_state_dict", loaded)
    for name in vars(nn.init):
        if name.endswith("_") and not name.startswith("_"):
            patches.around(nn.init, name, begun)


class Away(Tensor):
    """A tensor that the cell computed from values on other ranks.

    Libraries count as the cell. torch's own modules get the types that they expect: parameters, plain tensors.
    """

    home = torch.device("cpu")
    """The device of this rank."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1).f_code.co_filename
        name = getattr(function, "__name__", "")
        with DisableTorchFunctionSubclass():
            if name in _COPIED or (is_ours(caller) and name not in _IN_PLACE and function not in _NEW):
                return function(*args, **kwargs)
            args, kwargs = map_tensors((args, kwargs), _as_of_now)
            if name in _IN_PLACE or function in _NEW:
                return _drawn(function, args, kwargs)
            by_torch = caller.startswith(_TORCH)
            if name in _NUMBERS and not by_torch:
                raise StrategyError("the cell reads a number from parameters of other pipeline stages", _HINT)
            if name in _MOVES and (moved := _moved(name, args, kwargs)) is not None:
                return moved if caller in _MACHINERY else _away(moved)
            try:
                made = function(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as error:
                if by_torch or (said := explain(error)) is None:
                    raise
                raise said from error
            _check_made_of_values(name, made, args, kwargs)
            return made if caller in _MACHINERY else map_tensors(made, _away)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """For the cell the device of this rank, so that it builds tensors there; for torch the meta device."""
        asks = sys._getframe(1).f_code.co_filename
        with DisableTorchFunctionSubclass():
            own: torch.device = Tensor.device.__get__(self)
        return own if own.type != "meta" or asks.startswith(_TORCH) or is_ours(asks) else Away.home

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class Elsewhere(nn.Parameter):
    """A parameter of a stage on other ranks: its meta tensor, or the original that the cell kept, with old values."""

    __torch_function__ = Away.__torch_function__
    device = Away.device

    @property
    def grad(self) -> Tensor | None:
        if _is_read_by_the_cell(sys._getframe(1)):
            raise StrategyError(
                "the cell reads the gradient of a parameter of another pipeline stage, which is on another rank",
                "torch.nn.utils' clip_grad_norm_ and clip_grad_value_ see all stages; else use --strategy ddp or fsdp",
            )
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Ignored: only the gradient on the parameter's own ranks counts."""


class StateOfStages(defaultdict[Any, Any]):
    """``Optimizer.state`` with the entries of this rank's stages only. It refuses reads by the cell."""

    def _refused(name: str) -> Any:  # type: ignore[misc]
        own = getattr(defaultdict, name)

        def read(self: StateOfStages, *args: Any) -> Any:
            if _is_read_by_the_cell(sys._getframe(1)):
                raise StrategyError(
                    "the cell reads an optimizer's state, but this rank has only the entries of its own stages",
                    "optimizer.state_dict()['state'] has the entries of all stages; or use --strategy ddp or fsdp",
                )
            return own(self, *args)

        return read

    __getitem__, __iter__, __len__, __contains__ = map(_refused, ("__getitem__", "__iter__", "__len__", "__contains__"))
    keys, values, items, get = map(_refused, ("keys", "values", "items", "get"))


def explain(error: BaseException) -> StrategyError | None:
    """Explains an error of torch by values that are on other ranks; None for another error."""
    if not isinstance(error, (RuntimeError, NotImplementedError)):
        return None
    if OF_PLAIN_ONES.search(str(error)) and in_backward(error):
        return StrategyError(
            "this backward needs parameters as they were before the model's first call, which cut it into stages "
            f"({error})",
            _HINT,
        )
    if "meta" not in str(error):
        return None
    return _without_values(str(error))


def without_values(names: Mapping[str, Any]) -> list[str]:
    """Names of the cell whose values are on other ranks: tensors, or lists, dicts and tuples of them."""
    return [name for name, value in names.items() if any(tensor.is_meta for tensor in tensors_in(value))]


def _is_read_by_the_cell(frame: FrameType | None) -> bool:
    """Whether user code reads it, but not in an optimizer: optimizers skip parameters without gradients."""
    if frame is None or not is_users(frame.f_code.co_filename):
        return False
    while frame is not None:
        if frame.f_code.co_filename == optimizer.__file__:
            return False
        frame = frame.f_back
    return True


def _without_values(what: str) -> StrategyError:
    return StrategyError(f"parameters of other pipeline stages have no values on this rank ({what})", _HINT)


def _check_made_of_values(name: str, made: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise ``StrategyError`` if a result has values but an argument has none: torch checks only the first argument.

    For functions on lists, each element is checked.
    """
    if name in _OF_SHAPES:
        return
    rows: list[tuple[Any, Any]] = [(made, (args, kwargs))]
    if name.startswith("_foreach_") and args:
        each = [*args, *kwargs.values()]
        rows = [
            (target, [one[place] if isinstance(one, (list, tuple)) else one for one in each])
            for place, target in enumerate(args[0] if made is None else made)
        ]
    for result, given in rows:
        if any(one.is_meta for one in tensors_in(given)) and any(not one.is_meta for one in tensors_in(result)):
            raise _without_values(f"{name} of them and of a tensor that has values on this rank")


def _moved(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """A tensor without values has none on another device either. ``x.to(parameter)`` uses its device and dtype."""
    others = tensors_in((args[1:], kwargs))
    if not args[0].is_meta:
        moved: Tensor | None = args[0].to(Away.home, others[0].dtype) if others and others[0].is_meta else None
        return moved
    if name != "to":
        return args[0] if not others else None
    asked = parse_to(*args[1:], **{key: one for key, one in kwargs.items() if key != "copy"})
    same: Tensor = args[0].to(asked[1] or args[0].dtype)
    return same


def _as_of_now(tensor: Tensor) -> Tensor:
    """The tensor without its old values, because the parameter has been trained on other ranks since."""
    return torch.empty_like(tensor, device="meta") if isinstance(tensor, Elsewhere) and not tensor.is_meta else tensor


def _away(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Away) if type(tensor) is Tensor and tensor.is_meta else tensor


def _drawn(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Draw into real memory of the same shape, so that the same amount is drawn; returns a tensor without values."""
    targets: list[Tensor] = []

    def in_memory(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        targets.append(tensor)
        return _in_memory(tensor)

    args, kwargs = map_tensors((args, kwargs), in_memory)
    with torch.no_grad():
        drawn = function(*args, **kwargs)
    return _away(torch.empty_like(drawn, device="meta")) if function in _NEW else targets[0]


def _in_memory(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
