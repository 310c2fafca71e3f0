"""Tells hooks, methods and classes of the user from those that a strategy added to a module."""

from __future__ import annotations

from torch import nn

OURS = __name__.split(".core.")[0]
_FOREIGN = (OURS, "torch.distributed", "torch.nn.parallel")
"""Packages whose hooks and classes come from a strategy, never from a user."""

INSTEAD_OF_A_COPY = (
    "keep copy.deepcopy(model.state_dict()), which is whole, or copy the model before its first training step; or use "
    "--strategy ddp"
)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The user's class of ``module``, without the classes that a strategy has put before it."""
    found = type(module)
    while len(bases := found.__bases__) == 2 and is_foreign(bases[0]):
        found = bases[1]
    return found


def is_foreign(thing: object) -> bool:
    """Whether a hook, method or class comes from a strategy; a wrapper also counts by the module of its code."""
    thing = getattr(thing, "hook", thing)  # torch's own wrapper of a state dict's hook
    made_in = getattr(thing, "__globals__", {}).get("__name__", "")  # functools.wraps changes __module__
    return any(
        home == room or home.startswith(f"{room}.")
        for home in (made_in, getattr(thing, "__module__", None) or "")
        for room in _FOREIGN
    )
