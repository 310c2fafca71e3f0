"""The parameters that the cell's optimizers train, and the objects that hold them."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..core import hooks, loading, optimizers
from ..core.holders import all_of, carry_attributes, hand_over
from .unsharded import shards_by_whole, shards_of


class Optimized:
    """The optimizers of a job, which stay the same objects, and copies of the models that they train.

    ``pending``: parameters that no distributed module has yet. On GPUs parameters move to ``device`` when their
    optimizer is built, so later tensors computed from them and the optimizer's state are there too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._copies: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = []
        self._kernels = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]]()
        """The kernels (``foreach``, ``fused``) that the cell chose for each optimizer's groups."""
        self._distributed: set[torch.Tensor] = set()
        self.pending: set[torch.Tensor] = set()
        self.replaced: dict[nn.Parameter, nn.Parameter] = {}
        """Parameters of the cell -> parameters that have replaced them."""
        self.unseen: dict[Any, nn.Parameter] = {}
        """The same, for replacements that the cell does not see."""

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        yield from [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def add_param_group(self, original: Callable[..., Any], optimizer: torch.optim.Optimizer, param_group: Any) -> None:
        """In place of ``Optimizer.add_param_group``, through which an optimizer gets all its parameters."""
        if isinstance(param_group, dict) and "params" in param_group:
            param_group["params"] = shards_of(param_group["params"])
        original(optimizer, param_group)
        self.note(optimizer)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the optimizer, or parameters that were added to it."""
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        for parameter in loading.trained_by(optimizer):
            if parameter not in self._distributed and parameter not in self.pending:
                self.pending.add(parameter)
                if self._device.type != "cpu" and parameter.device.type == "cpu":
                    parameter.data = parameter.data.to(self._device)

    def note_captured(self) -> None:
        """Record the optimizers in the bundle, which were built in the notebook."""
        for optimizer in all_of(torch.optim.Optimizer):
            self.note(optimizer)

    def are_in(self, module: nn.Module) -> bool:
        """Whether an optimizer trains a parameter of ``module`` that is not distributed yet."""
        return any(parameter in self.pending for parameter in module.parameters())

    def distributed(self, parameters: Collection[torch.Tensor]) -> None:
        """``parameters``, and their replacements, are distributed now."""
        self.pending -= set(parameters)
        self._distributed |= {*parameters, *self.replaced.values()}

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, in order. A parameter that two optimizers train is listed twice."""
        return [one for optimizer in self for one in loading.trained_by(optimizer)]

    def follow(
        self, replaced: Mapping[nn.Parameter, nn.Parameter], ours: Collection[Any], *, shown: bool = True
    ) -> None:
        """Replace parameters in optimizers and in other objects of the cell by the new ones.

        ``ours``: containers that keep the old ones. ``shown`` false: the cell does not see the new ones.
        """
        for optimizer in self:
            known = self._kernels.setdefault(optimizer, [])
            known += [_kernels(group) for group in optimizer.param_groups[len(known) :]]
            optimizers.remap(optimizer, replaced)
        hooks.follow(replaced)
        carry_attributes(replaced)
        if shown:
            hand_over(replaced, (*ours, self.replaced))
        optimizers.release(replaced)
        if shown:
            self.replaced |= replaced
        else:
            self.unseen |= replaced

    def originals(self, models: Iterable[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
        """The cell's own parameters, by their replacements: shards of ``models`` or gathered parameters."""
        own = {new: old for old, new in self.replaced.items()}
        return own | {whole: own[shard] for whole, shard in shards_by_whole(models).items() if shard in own}

    def give_back(self, originals: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Put the cell's own parameters back into its containers, and restore the optimizers' kernels."""
        for optimizer in self._kernels:
            self.show_kernels(optimizer, optimizer.param_groups)
        for places in (self.replaced, self.unseen):
            back = {new: old for old, new in places.items()}
            hooks.follow(back)
            carry_attributes(back)
        hand_over(originals, (self.replaced,), all_or_nothing=False)

    def show_kernels(self, optimizer: torch.optim.Optimizer, groups: Iterable[dict[str, Any]]) -> None:
        """Set in ``groups`` the kernels that the cell chose."""
        for group, kernels in zip(groups, self._kernels.get(optimizer, ()), strict=False):  # groups may have been added
            group.update(kernels)

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has loaded a state dict, whose groups set the kernels that the cell chooses."""
        if optimizer in self._kernels:
            self._kernels[optimizer] = [_kernels(group) for group in optimizer.param_groups]
            optimizers.one_by_one_where_mixed(optimizer)

    @property
    def deepcopy(self) -> object:
        """``nn.Module.__deepcopy__``. Copies (averaged weights, target networks) are sharded with their model."""
        copies = self._copies

        def deepcopied(module: nn.Module, memo: dict[int, Any]) -> Any:
            reconstruct: Any = copy._reconstruct  # type: ignore[attr-defined]  # what copy.deepcopy does by itself
            copied = reconstruct(module, memo, *module.__reduce_ex__(4))
            copies.append((weakref.ref(module), weakref.ref(copied)))
            return copied

        return _OfInstances(deepcopied)

    def copies(self) -> list[nn.Module]:
        """All copies that ``copy.deepcopy`` made of modules and of their parts."""
        return [copied for _, known in self._copies if (copied := known()) is not None]

    def copies_of(self, root: nn.Module) -> list[nn.Module]:
        """The copies of ``root`` that no optimizer trains. A trained copy is distributed when it is called."""
        living = [copied() for source, copied in self._copies if source() is root]
        return [one for one in living if one is not None and not self.are_in(one)]


class _OfInstances:
    """A method that a class does not show: ``parametrize`` gives a class its own ``__deepcopy__`` if there is none."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Callable[..., Any]:
        if module is None:
            raise AttributeError("__deepcopy__")
        return functools.partial(self._method, module)


def _kernels(group: dict[str, Any]) -> dict[str, Any]:
    """The kernels of an optimizer's group. Groups with shards and plain parameters need other kernels temporarily."""
    return {name: group[name] for name in ("foreach", "fused") if name in group}
