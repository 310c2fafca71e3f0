"""Pipeline parallelism: each rank along ``pp`` holds and computes one stage of the model, microbatch by microbatch.

A cell's loop computes its loss after the forward, in code outside of the stages. So the automatic way is GPipe
(Huang et al., 2019, https://arxiv.org/abs/1811.06965). A forward runs all microbatches through the stages; the outputs
of the last stage are joined and sent to all ranks. The backward of this join runs the gradients back through the
stages. So any loss is the single-device loss, and gradients are summed over the microbatches. Schedules that begin
backwards before all forwards have ended must know the loss beforehand.

The model is changed in place: it keeps classes and names; parameters of other stages are on the meta device.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...protocol.errors import StrategyError
from ...protocol.options.strategy import chosen
from ...protocol.strategy import StrategyPlan
from ...torch_private.places import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from ..core import loading
from ..core.context import ParallelContext
from ..core.ownership import own_class
from ..core.patches import Patches
from ..core.rng import undone
from ..core.scatter import map_tensors, tensors_in
from ..parallel.fsdp import DTYPES
from ..sharded import norms
from ..step import deferred
from ..step.divided import _kind
from ..step.no_trace import no_trace
from ..step.views import Unwritten
from ..step.ways import Way
from . import remote_parameters
from .checks import microbatches, no_reentrant_checkpoints
from .flow import Flow, Planner, StageRun
from .inside import Inside
from .kept import hand_out, kept, left_behind, owner_of
from .passage import Passage
from .schedules import WHOLE_FORWARD, StageLayout, stages_a_rank
from .stand_ins import Fakes
from .trial import in_one_piece, ways_of_microbatches
from .units import Units, assigned, clock, marked, measured
from .wires import Wires

_OF_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def install(patches: Patches, plan: StrategyPlan) -> None:
    """Patch torch for the code around a model in stages."""
    if plan.degree("pp") > 1:
        remote_parameters.install(patches)
        if chosen(plan, "schedule") not in WHOLE_FORWARD:
            deferred.install(patches)


class Pipeline:
    """A model that is cut into stages."""

    def __init__(
        self,
        root: nn.Module,
        context: ParallelContext,
        samples: Callable[[], int | None] = lambda: None,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``samples``: the size of the current batch, if known. ``within``: context for forwards and backwards."""
        self.root, self._context, self._samples, self.within = root, context, samples, within
        self.group = context.mesh["pp"].get_group()
        self.rank, ranks = self.group.rank(), self.group.size()
        schedule, balance = chosen(context.plan, "schedule"), chosen(context.plan, "balance")
        self.layout = StageLayout(schedule, ranks, ranks * stages_a_rank(schedule, ranks, balance, marked(root)))
        self.wires = Wires(context)
        self._original = root.forward
        self._units = Units(root, self.layout.stages)
        self._fakes = Fakes(context.device)
        self._inside = None if schedule in WHOLE_FORWARD else Inside(self, context)
        self._calls: list[tuple[int, int]] = []
        self._flows: dict[Hashable, Flow] = {}
        self._ways: dict[Hashable, tuple[Way, ...]] = {}
        self._holders: dict[str, list[int]] = {}  # the ranks that hold each parameter
        self._shared: dict[str, list[int]] = {}  # entries of ``_holders`` with this rank and others
        self._names: dict[nn.Parameter, str] = {}
        self._unit_ranks: dict[int, list[int]] = {}
        self._ranks_of_buffers: dict[nn.Module, list[int]] = {}
        self._whole: dict[nn.Parameter, nn.Parameter] = {}
        self._keepers: dict[str, int] = {}  # ranks, by the attributes and buffers that forwards change
        remote_parameters.Away.home = context.device

    # ---------------------------------------------------------------------------------------------------- partition

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], ways: tuple[Way, ...] | None) -> None:
        """Choose the stages by a trial with these inputs, and free other stages' parameters. All ranks must call it.

        ``ways``: how parts of a batch give the whole outputs, as ``Divider`` found it for this kind of call.
        """
        loading.broadcast_states(self.root, self.group, self._context.device)
        if ways is None:
            ways = ways_of_microbatches(self._original, self.root, self._context, args, kwargs, self._samples())
        if ways is not None:
            self._ways[self._kind(args, kwargs)] = ways
        part_args, part_kwargs = self._cut((args, kwargs), self._rows(args, kwargs, len(ways or ()) > 0)[0])
        self._calls, changes = self._decided(part_args, part_kwargs)
        if changes and ways is not None:
            in_one_piece(self.root, self._context, f"its forward changes {changes[0]}, once for each microbatch")
            self._ways.clear()
            part_args, part_kwargs = args, kwargs
        flow = self._flow(part_args, part_kwargs)
        if flow.left_out:
            left_out = ", ".join(flow.left_out)
            self._context.say(
                f"the model's outputs have None for {left_out}: its tensors stay on the ranks of their stages"
            )
        names = loading.names_of(self.root)
        self._holders = {name: self._ranks(flow.holders.get(parameter, {0})) for parameter, name in names.items()}
        self._shared = {name: held for name, held in self._holders.items() if len(held) > 1 and self.rank in held}
        self._unit_ranks = {number: self._ranks(stages) for number, stages in flow.units.items()}
        self._ranks_of_buffers = {
            part: ranks for number, ranks in self._unit_ranks.items() for part in self._units.modules[number].modules()
        }
        self._keepers = {name: self._keeper(name) for name in changes}
        self._flows.clear()  # they refer to parameters that are replaced now
        self._fakes = Fakes(self._context.device)
        for parameter, places in loading.slots(self.root).items():
            if self.rank not in self._holders[names[parameter]]:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                loading.put(places, empty)
                self._whole[empty] = parameter
        self._names = loading.names_of(self.root)
        pipeline = self

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not pipeline.root:
                raise StrategyError(
                    f"a copy of {own_class(module).__name__} is called that was made while the model was in stages: a "
                    "rank has only the values of its own stages",
                    "build a new model and load the model's state dict, which has all values, into it; or use "
                    "--strategy ddp or fsdp",
                )
            return pipeline(args, kwargs)

        vars(self.root)["forward"] = MethodType(forward, self.root)

        def whole(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            pipeline._make_whole(module, state, prefix)

        for part in self.root.modules():
            part.register_state_dict_post_hook(whole)
        self._context.say(self._described())

    def _ranks(self, stages: Iterable[int]) -> list[int]:
        return sorted({self.layout.rank_of(stage) for stage in stages})

    def _decided(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[int, int]], list[str]]:
        """Unit and stage of each call, and attributes that the forward changes. Rank 0 measures and decides.

        Raises ``StrategyError`` if the forward stores values that the cell would miss on other stages' ranks.
        """
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                with no_trace(self.root) as belongings, undone(), self.precision(), no_reentrant_checkpoints():
                    now = functools.partial(clock, self._context.device)
                    costs = measured(self._units, now, lambda: self._original(*args, **kwargs))
                    keeps = kept(belongings)
                stage_of = assigned(self._units, costs, self.layout.stages, chosen(self._context.plan, "balance"))
                found = [([(cost.unit, stage) for cost, stage in zip(costs, stage_of, strict=True)], keeps)]
            except Exception as error:  # noqa: BLE001  # all ranks raise it
                found = [
                    error
                    if isinstance(error, StrategyError)
                    else StrategyError(
                        f"the model's forward fails where its layers are run one by one: {error!r}",
                        "let it ask for no gradients (torch.autograd.grad) and run any number of times, or use "
                        "--strategy ddp or fsdp",
                    )
                ]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], StrategyError):
            raise found[0]
        decided: tuple[list[tuple[int, int]], list[str]] = found[0]
        return decided

    def _described(self) -> str:
        sizes = {name: parameter.numel() for name, parameter in self.root.named_parameters()}
        each = [sum(sizes[name] for name, held in self._holders.items() if one in held) for one in self._all_ranks()]
        calls = [sum(1 for _, own in self._calls if self.layout.rank_of(own) == one) for one in self._all_ranks()]
        parts = ", ".join(f"{count} layers ({size:,} parameters)" for count, size in zip(calls, each, strict=True))
        where = "" if self.layout.stages == self.layout.ranks else f" on {self.layout.ranks} ranks"
        parted = microbatches(self._context) if self._ways else 1
        return (
            f"{type(self.root).__name__} in {self.layout.stages} stages{where}: {parts}; {parted} microbatches, "
            f"schedule {self.layout.schedule}"
        )

    def _all_ranks(self) -> range:
        return range(self.layout.ranks)

    # ------------------------------------------------------------------------------------------------------ forward

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the model, on all ranks of the pipeline. All ranks get the outputs."""
        ways = self._ways.get(self._kind(args, kwargs)) if torch.is_grad_enabled() else None
        rows = self._rows(args, kwargs, ways is not None)
        with self.precision(), self.at_work():
            passage = Passage(self, args, kwargs, rows, ways)
            inside = self._inside if torch.is_grad_enabled() and self.root.training else None
            outputs = passage.outputs() if inside is None else inside.outputs(passage)
        if self._keepers:
            hand_out(self.root, self._keepers, self.wires)
        return outputs

    def _keeper(self, name: str) -> int:
        """The rank that has an attribute that forwards change; for the root itself the rank of the last stage."""
        ranks = self._ranks_of_buffers.get(owner_of(self.root, name)[0])
        if ranks:
            return ranks[0]
        if self.layout.stages > self.layout.ranks:  # the root's own forward is run for each of a rank's stages
            raise left_behind(name)
        return self.layout.last_rank

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """In this context parameters of other stages are plain, because the cell does not use them."""
        self._show(nn.Parameter)
        try:
            yield
        finally:
            self._show(remote_parameters.Elsewhere)

    def let_go(self) -> None:
        """The cell has ended: make parameters of other stages plain."""
        self._show(nn.Parameter)

    def _show(self, kind: type[nn.Parameter]) -> None:
        for empty, before in self._whole.items():
            empty.__class__ = before.__class__ = kind

    def flow_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow:
        """The flow between the stages for inputs of this kind."""
        return self._flow(args, kwargs)

    def run_stage(
        self, flow: Flow, stage: int, received: dict[int, Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, dict[int, Tensor]]:
        """Run one stage on one microbatch: returns outputs (in the last stage), and tensors for the next stage."""
        run = StageRun(flow, stage, self._fakes, received)
        with _followed():
            outputs = run.run(self._original, self._units, args, kwargs)
        return outputs, run.passed

    def _make_whole(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Complete the state dict of ``module`` itself with values of other stages. All ranks must call it."""
        held = {name: self._holders[self._names[one]] for name, one in module._parameters.items() if one in self._names}
        held |= dict.fromkeys(module._buffers, self._ranks_of_buffers.get(module, []))
        for name, ranks in held.items():
            if prefix + name in state and 0 < len(ranks) < self.layout.ranks:
                state[prefix + name] = self.wires.of_holder(getattr(module, name), ranks[0])

    def make_optimizer_whole(self, optimizer: torch.optim.Optimizer, state: dict[int, Any]) -> None:
        """Complete ``state`` of ``Optimizer.state_dict`` with the entries of all stages. All ranks must call it."""
        names = self._names
        for place, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
            held = self._holders[names[parameter]] if parameter in names else range(self.layout.ranks)
            if len(held) < self.layout.ranks:
                mine = state.pop(place, None)
                found = self.wires.of_owner(mine, held[0])
                if found is not None:
                    state[place] = mine if mine is not None and self.rank in held else found

    def forget_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the state of other stages' parameters: it would become outdated here, and their ranks have it."""
        for parameter in self._whole:
            optimizer.state.pop(parameter, None)
        optimizer.state = remote_parameters.StateOfStages(dict, optimizer.state)

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank's stages train."""
        return [one for one in self.root.parameters() if one.requires_grad and not one.is_meta]

    def tied(self) -> list[tuple[nn.Parameter, list[int]]]:
        """Trained parameters that this rank and other ranks hold, each with all its ranks."""
        found = [(self.root.get_parameter(name), held) for name, held in self._shared.items()]
        return [(parameter, held) for parameter, held in found if parameter.requires_grad]

    def _flow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow:
        key = (_specification((args, kwargs)), self.root.training, torch.is_grad_enabled(), *_autocast(self._context))
        if key not in self._flows:
            planner = Planner(self._units, self._fakes, self._calls, self.layout.stages)
            try:
                with no_trace(self.root), undone(), _followed(), Unwritten((args, kwargs)):
                    with planner, self._units.run_by(planner):
                        outputs = self._original(*args, **kwargs)
                    self._flows[key] = planner.ends(outputs)
            except _OF_VALUES as error:
                raise StrategyError(
                    f"the model's forward branches on the values of its tensors ({error})",
                    "a stage knows only its own values: branch on shapes or on inputs, or use --strategy ddp or fsdp",
                ) from error
        return self._flows[key]

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        return _kind(self.root, (args, kwargs), tensors_in((args, kwargs)), self._total(args, kwargs))

    def _total(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        sizes = [tensor.size(0) for tensor in tensors_in((args, kwargs)) if tensor.dim()]
        known = self._samples()
        return known if known is not None and known in sizes else (sizes[0] if sizes else 0)

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], divided: bool) -> list[slice]:
        """The rows of each microbatch, of sizes as equal as possible; one microbatch if not ``divided``."""
        total = self._total(args, kwargs)
        parts = max(1, min(microbatches(self._context), total)) if divided else 1
        each, more = divmod(total, parts)
        ends = [each * (part + 1) + min(part + 1, more) for part in range(parts)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _cut(self, values: Any, rows: slice) -> Any:
        total = self._total(*values)
        whole = rows.stop - rows.start == total

        def part(tensor: Tensor) -> Tensor:
            if whole or not tensor.dim() or tensor.size(0) != total or isinstance(tensor, nn.Parameter):
                return tensor
            return tensor[rows]

        return map_tensors(values, part)

    def cut_inputs(self, values: Any, rows: slice) -> Any:
        """Arguments for the rows of one microbatch."""
        return self._cut(values, rows)

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast context of the plan."""
        dtype = DTYPES.get(self._context.plan.precision)
        return nullcontext() if dtype is None else torch.autocast(self._context.device.type, dtype)

    def as_given(self, output: Tensor) -> Tensor:
        """An output of a microbatch as user code sees it."""
        return output.float() if self.in_fp32 and output.dtype in (torch.float16, torch.bfloat16) else output

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The mode of all fake tensors."""
        return self._fakes.mode

    @property
    def in_fp32(self) -> bool:
        """Whether outputs are cast to fp32, as a loss expects them."""
        return self._context.plan.precision in DTYPES

    # ------------------------------------------------------------------------------------- after the user's backward

    def has(self, parameters: Sequence[Tensor]) -> bool:
        """Whether one of ``parameters`` belongs to this model, in any stage."""
        own = {id(parameter) for parameter in self.root.parameters()}
        return any(id(parameter) in own for parameter in parameters)

    def clip(self, parameters: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """``clip_grad_norm_`` by the norm over all stages; a tied parameter counts on the first rank that holds it."""
        others = {id(p) for name, p in self.root.named_parameters() if self._holders[name][0] != self.rank}
        own = [parameter for parameter in parameters if parameter.grad is not None]
        counted = [parameter.grad for parameter in own if id(parameter) not in others and parameter.grad is not None]
        norm = norms.total_norm(counted, _norm_type(args, kwargs), self.group)
        torch.nn.utils.clip_grads_with_norm_(own, _max_norm(args, kwargs), norm)
        return norm

    # ------------------------------------------------------------------------------------------------------- the end

    def restore(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Gather the model (without gradients) and the optimizers' state on rank 0. All ranks must call it.

        One parameter at a time. On other ranks parameters of other stages stay on the meta device.
        """
        vars(self.root).pop("forward", None)
        self.let_go()
        slots = loading.slots(self.root)
        names = loading.names_of(self.root)
        for parameter, places in slots.items():
            held = self._holders[names[parameter]]
            old = self._whole.get(parameter)
            value = self._to_first(None if old is not None else parameter.detach(), held)
            if old is None:
                continue
            old.requires_grad = parameter.requires_grad
            if value is not None:
                old.data = value
                loading.put(places, old)
            for optimizer in optimizers:
                _put_back(optimizer, parameter, old)
        for optimizer in optimizers:
            optimizer.state = defaultdict(dict, optimizer.state)
            self._gather_state(optimizer, names)
        for number, ranks in self._unit_ranks.items():
            for buffer in self._units.modules[number].buffers():
                value = self._to_first(buffer, ranks)
                if value is not None and self.rank not in ranks:
                    buffer.data.copy_(value)

    def _to_first(self, mine: Any, held: Sequence[int]) -> Any:
        """The value of the first rank in ``held``, on the pipeline's first rank; None on others."""
        return self.wires.to_first(mine, held[0])

    def _gather_state(self, optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> None:
        """Gather the state of the original parameters on rank 0."""
        by_old = {self._whole.get(parameter, parameter): name for parameter, name in names.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in by_old:
                    state = optimizer.state.get(parameter)
                    found = self._to_first(dict(state) if state else None, self._holders[by_old[parameter]])
                    if self.rank == 0 and found:
                        optimizer.state[parameter] = found

    @property
    def replaced(self) -> dict[nn.Parameter, nn.Parameter]:
        """The original parameters of other stages -> their replacements on this rank."""
        return {old: new for new, old in self._whole.items()}

    @property
    def originals(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The replacements on this rank -> the original parameters."""
        return self._whole


def _followed() -> AbstractContextManager[None]:
    return no_reentrant_checkpoints() if torch.is_grad_enabled() else nullcontext()


def _put_back(optimizer: torch.optim.Optimizer, new: nn.Parameter, old: nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["params"] = [old if parameter is new else parameter for parameter in group["params"]]
    optimizer.state.pop(new, None)


def _max_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(args[0] if args else kwargs["max_norm"])


def _norm_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0))


def _specification(values: Any) -> str:
    """Equal for arguments with which the forward does the same operations."""
    return repr(map_tensors(values, lambda t: (t.shape, t.dtype, t.requires_grad)))  # type: ignore[arg-type,return-value]


def _autocast(context: ParallelContext) -> tuple[Any, ...]:
    kind = context.device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
