"""Selects the units of a model that are sharded, checkpointed or compiled: by repetition, by class or by size."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from ...protocol.errors import StrategyError

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers of layers; they are not blocks themselves."""

_WORTH = 0.1
"""Repeated blocks are units only if together they hold at least this fraction of the model's parameters."""


def repeated(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in the order of their definition: twelve layers of a GPT, both stacks of a transformer.

    Repeated blocks are siblings of one class that have child layers. Of nested blocks (experts within a layer) only
    the outermost count: every rank runs them in every step, as FSDP's collectives need. May be empty.
    """
    total = _size([model])
    found: list[list[nn.Module]] = []
    inside: set[nn.Module] = set()
    for parent in model.modules():  # parents come before their children
        for siblings in _siblings(parent):
            if not inside.intersection(siblings) and _size(siblings) >= _WORTH * total:
                found.append(siblings)
                inside.update(module for sibling in siblings for module in sibling.modules())
    return [block for siblings in found for block in siblings]


def _siblings(parent: nn.Module) -> list[list[nn.Module]]:
    by_class: dict[type, list[nn.Module]] = {}
    for child in parent.children():
        if not isinstance(child, _LISTS) and any(True for _ in child.children()):
            by_class.setdefault(type(child), []).append(child)
    return [siblings for siblings in by_class.values() if len(siblings) > 1 and _size(siblings)]


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for parameter in {p for module in modules for p in module.parameters()})


def of_classes(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Every module below ``model`` whose class, or a base class of it, has one of these names.

    Raises ``StrategyError``, with a list of the existing classes, if no module has one of the names.
    """
    by_name: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind is not nn.Module and issubclass(kind, nn.Module):
                by_name.setdefault(kind.__name__, []).append(module)
    missing = [name for name in names if name not in by_name]
    if missing:
        own = sorted({type(module).__name__ for module in model.modules()} - {"ModuleList", "ModuleDict"})
        raise StrategyError(
            f"no module of class {' or '.join(missing)} in {type(model).__name__}",
            f"the classes there are: {', '.join(own)}",
        )
    wanted = {module for name in names for module in by_name[name]} - {model}
    return [module for module in model.modules() if module in wanted]


def by_size(model: nn.Module, minimum: int) -> list[nn.Module]:
    """Modules with at least ``minimum`` parameters, chosen by the size-based rule of FSDP1 (the smallest such)."""
    units: set[nn.Module] = set()

    def left_after(module: nn.Module) -> int:
        """The number of parameters of ``module`` outside its units; a module with enough of them becomes a unit."""
        left = size = _size([module])
        if size >= minimum and not isinstance(module, nn.MultiheadAttention):
            left -= sum(_size([child]) - left_after(child) for child in module.children())
        if left >= minimum and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            units.add(module)
            return 0
        return left

    left_after(model)
    return [module for module in model.modules() if module in units and module is not model]
