"""An optimizer's state by parameter name, so that it can be loaded with another strategy, order or number of ranks.

``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` is not used: if there is no state yet, it takes a
step with zero gradients. Adam would count this step in the running training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate

from ..protocol.errors import CheckpointError
from .structures import Slot, apart, mapped

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and checkpoint_wrapper insert into names."""

Names = dict[torch.Tensor, str]
Sizes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Size and dtype of the tensors of a checkpoint, by name."""


def empty(sizes: Sizes, slot: Slot) -> torch.Tensor:
    """An uninitialised full tensor on the CPU."""
    size, dtype = sizes[slot.name]
    return torch.empty(size, dtype=dtype)


def clean(name: str) -> str:
    """The name of a parameter in the plain model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameter_names(models: Mapping[str, nn.Module]) -> Names:
    """A name for each parameter: the name of its model, a dot, and its name in the plain model."""
    names: Names = {}
    for label, model in models.items():
        for name, parameter in plain(model).named_parameters():
            names.setdefault(parameter, f"{label}.{clean(name)}")
    return names


def plain(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def place_of(group: int, number: int) -> str:
    """The name for a parameter that is known only by its indices."""
    return f"parameter.{group}.{number}"


def groups_of(optimizer: torch.optim.Optimizer, names: Names) -> list[dict[str, Any]]:
    """``param_groups`` with names instead of parameters. Parameters of no model are named by their indices."""
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names.get(item, place_of(at, number)) for number, item in enumerate(group["params"])],
        }
        for at, group in enumerate(optimizer.param_groups)
    ]


def capture(
    optimizer: torch.optim.Optimizer, label: str, names: Names, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The skeleton of an optimizer's state; its tensors are added to ``tensors``.

    With ``ZeroRedundancyOptimizer`` a rank has, and saves, only the state for its own share of the parameters.
    """
    groups = groups_of(optimizer, names)
    held = optimizer.optim.state if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state
    named = _named_parameters(optimizer, groups)
    state = {
        name: apart(dict(held[parameter]), f"{label}.state.{name}", tensors)
        for name, parameter in named.items()
        if parameter in held
    }
    return {"state": state, "groups": apart(groups, f"{label}.groups", tensors)}


def _named_parameters(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    return dict(zip((name for group in groups for name in group["params"]), parameters, strict=True))


def merged(skeletons: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the skeletons of all ranks: each may have only a part of the state, and in a pipeline of the groups."""
    first, *others = skeletons
    state, groups = dict(first["state"]), [dict(group) for group in first["groups"]]
    for other in others:
        state.update(other["state"])
        for at, group in enumerate(other["groups"]):
            if at < len(groups):
                known = groups[at]["params"]
                groups[at]["params"] = [*known, *(name for name in group["params"] if name not in known)]
            else:
                groups.append(dict(group))
    return {"state": state, "groups": groups}


class RestoringOptimizer:
    """An optimizer that is being loaded: the targets to read into, and their use (``finish``).

    Raises ``CheckpointError`` when the checkpoint's groups do not match the groups of this optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        label: str,
        names: Names,
        skeleton: dict[str, Any],
        sizes: Sizes,
    ) -> None:
        self.optimizer = optimizer
        self.groups = groups_of(optimizer, names)
        self.parameters = _named_parameters(optimizer, self.groups)
        skeleton = _placed(skeleton, self.groups)
        self.saved_groups = _matched(label, self.groups, skeleton["groups"])
        share = _share(optimizer)
        self.state = {
            name: mapped(entry, partial(self._target, name, sizes))
            for name, entry in skeleton["state"].items()
            if name in self.parameters and (share is None or self.parameters[name] in share)
        }
        self.options = [mapped(group, lambda slot: empty(sizes, slot)) for group in self.saved_groups]
        self.targets: dict[str, torch.Tensor] = {}
        for wanted, filled in ((skeleton["state"], self.state), (self.saved_groups, self.options)):
            _pair(wanted, filled, self.targets)

    def _target(self, name: str, sizes: Sizes, slot: Slot) -> torch.Tensor:
        """An empty tensor to read into. A tensor with the parameter's size is sharded like the parameter."""
        parameter = self.parameters[name].detach()
        size, dtype = sizes[slot.name]
        if size == parameter.size():
            return torch.empty_like(parameter, dtype=dtype)
        if not size or not isinstance(parameter, DTensor):
            device = "cpu" if not size else parameter.device
            return torch.empty(size, dtype=dtype, device=device)
        local = torch.empty(size, dtype=dtype, device=parameter.to_local().device)
        mesh = parameter.device_mesh
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def finish(self) -> None:
        """Give the optimizer what was read."""
        numbers = {name: number for number, name in enumerate(self.parameters)}
        count = iter(range(len(numbers)))
        groups = [
            {**options, "params": [next(count) for _ in group["params"]]}
            for options, group in zip(self.options, self.groups, strict=True)
        ]
        state: dict[int, Any] = {numbers[name]: entry for name, entry in self.state.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _share(optimizer: torch.optim.Optimizer) -> set[torch.Tensor] | None:
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return None
    return {parameter for group in optimizer.optim.param_groups for parameter in group["params"]}


def _pair(wanted: Any, filled: Any, targets: dict[str, torch.Tensor]) -> None:
    """Collect which target belongs to which slot, from two structures of the same form. ``filled`` may lack keys."""
    if isinstance(wanted, Slot):
        targets[wanted.name] = filled
    elif isinstance(filled, dict):
        for key, item in filled.items():
            _pair(wanted[key], item, targets)
    elif isinstance(filled, (list, tuple)):
        for one, other in zip(wanted, filled, strict=True):
            _pair(one, other, targets)


def _placed(skeleton: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Rename parameters that the checkpoint knows only by their indices to their names in ``groups``."""
    places = {
        place_of(at, number): name for at, group in enumerate(groups) for number, name in enumerate(group["params"])
    }
    return {
        "state": {places.get(name, name): entry for name, entry in skeleton["state"].items()},
        "groups": [
            {**group, "params": [places.get(name, name) for name in group["params"]]} for group in skeleton["groups"]
        ],
    }


def _matched(label: str, groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options saved for each of ``groups``, found by the names of its parameters."""
    home = {name: number for number, group in enumerate(saved) for name in group["params"]}
    chosen = []
    for group in groups:
        for name in group["params"]:
            if name not in home:
                raise CheckpointError(
                    f"{label} does not match the checkpoint: the checkpoint has no state for {name}",
                    "load with the optimizer over the same parameters, and with the models it belongs to",
                )
        numbers = {home.pop(name) for name in group["params"]}
        options = [_options(saved[number]) for number in sorted(numbers)]
        if any(repr(other) != repr(options[0]) for other in options):
            raise CheckpointError(
                f"{label} has the parameter {group['params'][0]} in one group with parameters that have "
                "different options (lr, …) in the checkpoint",
                "build the parameter groups as they were when the checkpoint was saved",
            )
        chosen.append(options[0] if options else _options(group))
    if home:
        raise CheckpointError(
            f"{label} does not match the checkpoint: it does not have {next(iter(home))}"
            + (f" and {len(home) - 1} more" if len(home) > 1 else ""),
            "load with the optimizer over the same parameters, and with the models it belongs to",
        )
    return chosen


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def by_place(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's ``state_dict()`` in our form. Parameters without a name are named by their index."""
    names: dict[Any, str] = {}
    groups = []
    for at, group in enumerate(state["param_groups"]):
        for place, key in enumerate(group["params"]):
            names[key] = f"model.{key}" if isinstance(key, str) else place_of(at, place)
        groups.append({**group, "params": [names[key] for key in group["params"]]})
    return {"state": {names[key]: entry for key, entry in state["state"].items()}, "groups": groups}
