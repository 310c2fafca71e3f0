"""DeepSpeed's engine for the model of an unmodified cell (ZeRO, Rajbhandari et al., https://arxiv.org/abs/1910.02054).

The engine is made at the first training forward. The forward goes through it, with the rows divided (``divided``): each
rank has the gradient of its rows times the number of ranks, and the engine's mean is the single-device gradient.
``backward()`` becomes ``engine.backward``, the cell's ``optimizer.step()`` becomes ``engine.step``, which calls the
same optimizer on ZeRO's flat partitions. See https://deepspeed.readthedocs.io/en/latest/training.html.
"""

from __future__ import annotations

import importlib.metadata
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...protocol.errors import StrategyError
from ..core import loading
from ..core.context import ParallelContext
from ..core.patches import Patches
from ..core.scatter import tensors_in
from ..loop.loops import Loops
from ..parallel.fsdp import DTYPES
from ..sharded.trained_parameters import Optimized
from .calls import REFUSED, clipping, imported, in_halves, take_over, total_of
from .guard import guard
from .states import States
from .values import ELEMENTWISE, Filled, filled, has_scheduler

INSTALL = "pip install 'jupyter_torchdist[deepspeed]', or choose --strategy fsdp, which shards as ZeRO does"
KNOWN = "0.19."
"""The versions whose gradient buffers ``_averaged`` and ``_norm`` can read."""

INSTEAD = "use --strategy fsdp or ddp"


def check_installed() -> None:
    """Raise ``StrategyError`` if no known version of DeepSpeed is installed for this Python."""
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise StrategyError("--strategy deepspeed: DeepSpeed is not installed for the ranks' Python", INSTALL) from None
    if not version.startswith(KNOWN):
        raise StrategyError(
            f"DeepSpeed {version} is installed, but gradients can be accumulated and clipped here only with {KNOWN}x",
            INSTALL,
        )


def of(context: ParallelContext, optimized: Optimized, loops: Loops) -> Engine | None:
    """The engine for ``--strategy deepspeed``; None for others. Raises ``StrategyError`` if it cannot be used."""
    if context.plan.name != "deepspeed":
        return None
    check_installed()
    if context.plan.checkpoint is not None:
        raise StrategyError(
            "--checkpoint cannot save the state of --strategy deepspeed, which is divided among the ranks",
            "leave --checkpoint out, or use --strategy fsdp",
        )
    return Engine(context, optimized, loops)


class Engine:
    """The only model and optimizer of a cell, which DeepSpeed trains after ``make`` was called."""

    def __init__(self, context: ParallelContext, optimized: Optimized, loops: Loops) -> None:
        self._context, self._optimized, self._loops = context, optimized, loops
        self.root: nn.Module | None = None
        self._engine: Any = None
        self._filled: Filled
        self._optimizer: torch.optim.Optimizer
        self._states: States
        self._trained: list[nn.Parameter] = []
        self._used: set[int] = set()
        self._ever: set[int] = set()
        self._gradients = _NONE
        self._forwards = 0
        self._norm_wanted: float | None = None
        self._hooked: list[weakref.ref[Tensor]] = []
        self.within = False
        """Whether DeepSpeed is running: then calls of torch do not come from the cell."""

    # ------------------------------------------------------------------------------------------------------- making

    def check(self, root: nn.Module) -> None:
        """Raise ``StrategyError`` if DeepSpeed cannot train ``root`` as on one device. Nothing is changed."""
        if self.root is not None:
            what = "parameters that its optimizer was given later" if root is self.root else "a second model"
            raise StrategyError(f"DeepSpeed has its engine already, and this cell trains {what}", INSTEAD)
        optimizers = list(self._optimized)
        if len(optimizers) != 1:
            raise StrategyError(
                f"DeepSpeed trains one model by one optimizer; this cell has {len(optimizers)} optimizers", INSTEAD
            )
        optimizer, own = optimizers[0], set(root.parameters())
        if any(parameter not in own for parameter in loading.trained_by(optimizer)):
            raise StrategyError(
                f"the optimizer trains parameters outside {type(root).__name__}, the first model that was called",
                f"call one module that holds all of them, or {INSTEAD}",
            )
        if any(parameter.is_meta for parameter in own):
            raise StrategyError("DeepSpeed is given models with weights; this one is on the meta device", INSTEAD)
        allowed = self._context.plan.options["config"].get("zero_allow_untested_optimizer")
        if not isinstance(optimizer, ELEMENTWISE) and not allowed:
            raise StrategyError(
                f"{type(optimizer).__name__} may look at a parameter as a whole, and ZeRO gives it flat pieces",
                f'use AdamW, write "zero_allow_untested_optimizer": true into the configuration, or {INSTEAD}',
            )
        if optimizer.state:
            raise StrategyError(
                f"this {type(optimizer).__name__} has trained already, and DeepSpeed begins with an empty state",
                f"build the optimizer in this cell, or {INSTEAD}",
            )
        if self._context.plan.compile:
            raise StrategyError("--compile and DeepSpeed do not go together here", "leave one of them out")

    def make(self, root: nn.Module) -> None:
        """``deepspeed.initialize`` for ``root``. All ranks must call it, with the same weights."""
        (optimizer,) = self._optimized
        self._filled = filled(self._context.plan, dist.get_world_size(), root, optimizer, self._loops.samples)
        if root.training is False:
            raise StrategyError("the first training forward of the model is in eval mode", "call model.train() before")
        deepspeed = imported(self._context.device)
        self._states = States(root, optimizer)
        self._trained = [one for one in loading.trained_by(optimizer) if one.requires_grad]
        self.root, self._optimizer = root, optimizer
        take_over(self, optimizer)
        with self._at_work():
            try:
                self._engine = deepspeed.initialize(model=root, optimizer=optimizer, config=self._filled.config)[0]
            except (AssertionError, ValueError, TypeError, NotImplementedError) as error:
                raise StrategyError(f"DeepSpeed refuses its configuration: {error}", "correct the JSON") from error
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._note_used)
        self._states.made()
        dtype = DTYPES.get(self._context.plan.precision)
        if dtype is not None:
            in_halves(root, dtype)
        if self.keeps_gradients:
            guard(root.parameters(), lambda: self.within)
        for remark in self._filled.remarks:
            self._context.say(remark)

    @property
    def made(self) -> bool:
        return self._engine is not None

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients and trained weights are in DeepSpeed's buffers, and not in the parameters."""
        return self._engine.optimizer is not self._optimizer

    def forward(self, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function that computes the training forward of ``module``."""
        if not self.made or module is not self.root:
            return original

        def run(*args: Any, **kwargs: Any) -> Any:
            self._forwards += 1
            with self._at_work():
                outputs = self._engine(*args, **kwargs)
            self._hooked += [weakref.ref(one) for one in tensors_in(outputs) if hasattr(one, _HOOK_MANAGERS)]
            return outputs

        return run

    # ------------------------------------------------------------------------------------------ what the cell calls

    def backward(
        self,
        original: Callable[..., Any],
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """``torch.autograd.backward``, by the engine. All ranks must call it."""
        if not self.made:
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        if create_graph or inputs is not None or grad_variables is not None:
            raise StrategyError("backward(create_graph=…, inputs=…) with DeepSpeed", INSTEAD)
        if self._gradients == _STEPPED:
            raise StrategyError(
                "gradients are kept over an optimizer step and added to; DeepSpeed clears them in its step",
                f"call optimizer.zero_grad() once a step, or {INSTEAD}",
            )
        if self._forwards == 0:
            raise StrategyError(
                "a second backward of one forward: DeepSpeed would count one of them",
                f"add the losses and call backward() once, or {INSTEAD}",
            )
        earlier = self._averaged() if self._gradients == _HELD else {}
        self._forwards, self._gradients = 0, _HELD
        with self._at_work():
            self._engine.backward(total_of(tensors, grad_tensors), retain_graph=bool(retain_graph))
        self._release_outputs()
        for group, tensors in earlier.items():
            for sum_, before in zip(self._engine.optimizer.averaged_gradients[group], tensors, strict=True):
                sum_ += before

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """``optimizer.step``, by the engine. All ranks must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._gradients == _NONE:
            return loss  # as on one device when no parameter has a gradient
        if self._gradients == _STEPPED:
            raise StrategyError("a second step with the same gradients: DeepSpeed cleared them in its step", INSTEAD)
        if self._filled.config.get("scheduler") is not None and has_scheduler(self._optimizer):
            raise StrategyError("DeepSpeed's configuration and the cell both have a scheduler", "leave one of them out")
        self._check_used()
        clipped, self._norm_wanted = self._norm_wanted, None
        if clipped is not None:
            self._engine.optimizer.clip_grad = clipped
        with self._at_work():
            self._engine.step()
        if clipped is not None:
            self._engine.optimizer.clip_grad = self._filled.clipping
        self._gradients = _STEPPED
        return loss

    def zero_grad(self) -> None:
        """``optimizer.zero_grad`` and ``model.zero_grad``: the engine's step has cleared gradients already."""
        if self._gradients == _HELD:
            raise StrategyError(
                "gradients are thrown away between backward() and step(); DeepSpeed keeps them in its own buffers",
                f"decide before backward(), or {INSTEAD}",
            )
        self._gradients = _NONE

    def clip(self, original: Callable[..., Any], parameters: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """``clip_grad_norm_``: compute the norm now; the engine's next step clips, once."""
        missing = {id(one) for one in self._trained} - {id(one) for one in parameters}
        if not self.made or not self.keeps_gradients or len(missing) == len(self._trained):
            return original(parameters, *args, **kwargs)
        wanted, kind, strict = clipping(*args, **kwargs)
        if missing or kind != 2.0:
            raise StrategyError("DeepSpeed clips by the Euclidean norm over all parameters that are trained", INSTEAD)
        if self._filled.clipping not in (0.0, wanted):
            raise StrategyError(
                f"DeepSpeed's gradient_clipping is {self._filled.clipping}, and the cell clips to {wanted}",
                'write "auto" there, or leave clip_grad_norm_ out',
            )
        if not self._engine.is_gradient_accumulation_boundary():
            raise StrategyError(
                "clip_grad_norm_ between accumulated gradients: DeepSpeed knows their norm only at the optimizer step",
                f'write "gradient_clipping": {wanted} into the configuration, and leave clip_grad_norm_ out',
            )
        with self._at_work():
            norm = self._norm()
        if strict and not torch.isfinite(norm):
            raise RuntimeError(f"The total norm of the gradients is {float(norm)}, so it cannot be clipped")
        self._norm_wanted = wanted
        return norm

    def refuse(self, what: str) -> Callable[..., Any]:
        """In place of a function that does not work with DeepSpeed's engine, once the engine is made."""

        def wrapped(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.made and self.keeps_gradients and not self.within:
                raise StrategyError(f"{what}: DeepSpeed has gradients and states in its own buffers", INSTEAD)
            return original(*args, **kwargs)

        return wrapped

    def install(self, patches: Patches) -> None:
        """Patch other functions of torch that would behave differently with an engine."""
        around = patches.around
        around(nn.Module, "state_dict", self._state_dict)
        around(nn.Module, "load_state_dict", self._load_state_dict)
        around(nn.Module, "zero_grad", self._zero_module)
        around(torch.optim.Optimizer, "state_dict", self._optimizer_state)
        for owner, name in REFUSED:
            around(owner, name, self.refuse(name))

    def finish(self) -> None:
        """Restore the model and the optimizer. All ranks must call it."""
        if self.made:
            with self._at_work():
                self._states.restore(self._engine)
            self._engine, self.root = None, None

    # ------------------------------------------------------------------------------------------------------- inside

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        before, self.within = self.within, True
        try:
            with self._loops.aside():
                yield
        finally:
            self.within = before

    def _is_root(self, module: nn.Module) -> bool:
        return self.made and self.keeps_gradients and not self.within and module is self.root

    def _state_dict(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """``Module.state_dict`` with full weights, in the precision of the optimizer step. All ranks must call it."""
        state = original(module, *args, **kwargs)
        if self._is_root(module):
            prefix = kwargs.get("prefix", "")
            names = {id(one): name for name, one in module.named_parameters()}
            whole = {names[id(one)]: value for one, value in self._states.weights()}
            for name, one in module.named_parameters(remove_duplicate=False):
                if prefix + name in state:
                    state[prefix + name] = whole[names[id(one)]]
        return state

    def _load_state_dict(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_root(module):
            raise StrategyError("load_state_dict of a model that DeepSpeed trains", "call it before the first step")
        return original(module, *args, **kwargs)

    def _zero_module(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if self._is_root(module):
            self.zero_grad()
        else:
            original(module, *args, **kwargs)

    def _optimizer_state(self, original: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
        """``Optimizer.state_dict``, complete on rank 0. All ranks must call it."""
        if not self.made or self.within or not self.keeps_gradients or optimizer is not self._optimizer:
            return original(optimizer)
        return self._states.state_dict()

    def _release_outputs(self) -> None:
        """Break reference cycles of DeepSpeed's hooks and outputs, which keep activations until the next gc."""
        for known in self._hooked:
            for manager in vars(output).pop(_HOOK_MANAGERS, ()) if (output := known()) is not None else ():
                manager.remove_hooks()
        self._hooked.clear()

    def _averaged(self) -> dict[int, list[Tensor]]:
        """Gradients of earlier backwards, which ZeRO 1 and 2 would overwrite in the last backward of a step."""
        zero = self._engine.optimizer
        if self._filled.stage not in (1, 2) or zero.cpu_offload or not self._engine.is_gradient_accumulation_boundary():
            return {}
        return {group: [one.clone() for one in parts] for group, parts in zero.averaged_gradients.items() if parts}

    def _norm(self) -> Tensor:
        """The norm of the gradients for the next step, over all ranks."""
        zero = self._engine.optimizer
        if hasattr(zero, "scaled_global_norm"):
            scaled = zero.scaled_global_norm()
        else:
            groups = zero._get_norm_groups()
            scaled = torch.stack([torch.as_tensor(one).float() for one in groups]).norm()
        return torch.as_tensor(scaled / zero.loss_scale).float().to(self._context.device)

    def _note_used(self, parameter: Tensor) -> None:
        self._used.add(id(parameter))

    def _check_used(self) -> None:
        """Raise ``StrategyError``, on all ranks, if one device would not change a parameter but ZeRO would."""
        if not self.keeps_gradients or not self._engine.is_gradient_accumulation_boundary():
            return
        used = torch.tensor(
            [id(one) in self._used for one in self._trained], dtype=torch.int32, device=self._context.device
        )
        dist.all_reduce(used, dist.ReduceOp.MAX, self._context.data_group)
        self._used.clear()
        decays = any(group.get("weight_decay") for group in self._optimizer.param_groups)
        names = loading.names_of(self.root) if self.root is not None else {}
        for number, (parameter, now) in enumerate(zip(self._trained, used.tolist(), strict=True)):
            if now:
                self._ever.add(number)
            elif decays or number in self._ever:
                raise StrategyError(
                    f"{names[parameter]} has no gradient in this step: a single device skips it, DeepSpeed changes it",
                    f"freeze it (requires_grad_(False)), or {INSTEAD}",
                )


_NONE, _HELD, _STEPPED = "none", "held", "stepped"
"""The state of the gradients of the last backward."""

_HOOK_MANAGERS = "_backward_hook_managers"
