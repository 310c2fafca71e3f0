"""Context parallelism: each rank of ``cp`` keeps its part of every sequence, in the repeated blocks of a model.

Before an attention an all-to-all gives each rank whole sequences for its heads. After it another all-to-all gives back
all heads for its tokens (DeepSpeed-Ulysses, Jacobs et al., https://arxiv.org/abs/2309.14509). So causal masks stay
valid. Layers before and after the blocks (positions, embeddings, the head) see whole sequences. Only PyTorch's
``F.scaled_dot_product_attention`` is replaced: another implementation of attention is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ...protocol.errors import StrategyError
from ...torch_private.training import checkpointing
from ..core import blocks, loading
from ..core.context import ParallelContext
from ..core.patches import Patches
from ..core.scatter import tensors_in
from ..core.side_effects import Belongings
from .sequences import Tokens, around_forward, average_after_backward, hidden_in, refuse_copies

_OWN_ATTENTION = "use F.scaled_dot_product_attention in the blocks, or --strategy fsdp"


def check(model: nn.Module, context: ParallelContext) -> None:
    """Raise ``StrategyError`` for a model without one stack of repeated blocks, or with ``nn.MultiheadAttention``."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise StrategyError(
                f"cp cannot divide {name or type(model).__name__}: torch.nn.MultiheadAttention checks its masks "
                "against the tokens that it is given, which are a part of the sequence",
                _OWN_ATTENTION,
            )
    stack = blocks.repeated(model)
    if not stack:
        raise StrategyError(
            f"cp divides the sequence within repeated blocks, and {type(model).__name__} has none", _OWN_ATTENTION
        )
    names = {module: name for name, module in model.named_modules()}
    parents = sorted({names[block].rpartition(".")[0] for block in stack})
    if len(parents) > 1:
        raise StrategyError(
            f"cp divides one stack of blocks; {type(model).__name__} has {len(parents)}: {', '.join(parents)}",
            "use --strategy fsdp",
        )


def apply(model: nn.Module, context: ParallelContext) -> None:
    """Divide the sequence in the blocks of ``model``. All ranks must call it; they start with rank 0's weights."""
    group, everybody = context.mesh["cp"].get_group(), dist.group.WORLD
    assert everybody is not None
    if not loading.someone_lacks_weights(model, everybody, context.device):
        loading.broadcast_states(model, everybody, context.device)
    stack = blocks.repeated(model)
    tokens = Tokens(group, "cp")
    _divide(stack, tokens, _Ulysses(group, tokens))
    _watch(model, tokens)
    average_after_backward(model, group, set())
    refuse_copies(model, "cp")
    context.say(
        f"cp: {len(stack)} blocks ({type(stack[0]).__name__}) compute 1/{group.size()} of every sequence a rank"
    )


def _divide(stack: list[nn.Module], tokens: Tokens, attention: _Ulysses) -> None:
    """Cut the inputs of the first block, join the outputs of the last; every block gets its part of other inputs."""

    def forward(block: nn.Module) -> Callable[..., Any]:
        def within(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if block is stack[0]:
                tokens.begins(hidden_in(args, kwargs, block), or_whole=not torch.is_grad_enabled())
            if tokens.are_whole:
                return original(*args, **kwargs)
            args, kwargs = tokens.cut_all((args, kwargs))
            with attention, _computed_again_within(attention):
                outputs = original(*args, **kwargs)
            if block is not stack[-1]:
                return outputs
            if not attention.calls:
                raise StrategyError(
                    f"{type(block).__name__} computes no F.scaled_dot_product_attention: its tokens would not see "
                    "those of other ranks",
                    _OWN_ATTENTION,
                )
            return tokens.join(outputs)

        return within

    for block in stack:
        around_forward(block, forward(block))


def _watch(model: nn.Module, tokens: Tokens) -> None:
    """Check that parts of a sequence leave ``model`` only through the last block."""
    name, takes_cache = type(model).__name__, "use_cache" in inspect.signature(model.forward).parameters

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tokens.in_flight, learns = False, torch.is_grad_enabled()
        tokens.stay_whole = not learns and _has_cache(kwargs)
        if takes_cache and not learns and not tokens.stay_whole:
            kwargs["use_cache"] = False  # the cache would hold only this rank's tokens
        belongings = None if learns else Belongings(model)
        outputs = original(*args, **kwargs)
        if tokens.in_flight:
            raise StrategyError(
                f"{name} left out the last of its blocks, where cp joins the ranks' tokens",
                "call all blocks, or use --strategy fsdp",
            )
        if belongings is not None and not tokens.are_whole:
            left = belongings.noted() | belongings.changed()
            where = next((one for one, value in left.items() if tensors_in(value)), None)
            if where is not None:
                raise StrategyError(
                    f"{name} keeps something in {where} (a cache, a hook), and with cp a rank would keep it only for "
                    "its own tokens",
                    "return it from the model's forward, or use --strategy fsdp",
                )
        return outputs

    around_forward(model, forward)


def _has_cache(kwargs: dict[str, Any]) -> bool:
    """Whether keys and values are kept for later tokens, by the argument names of Hugging Face's models."""
    caches = (value for name, value in kwargs.items() if name.startswith(("past_key_value", "cache", "layer_past")))
    return bool(kwargs.get("use_cache")) or any(value is not None for value in caches)


class _Ulysses(TorchFunctionMode):
    """``F.scaled_dot_product_attention`` over whole sequences, while each rank has a part of them.

    Raises ``StrategyError`` if a block computes positions for its part as if the part began at 0.
    """

    def __init__(self, group: dist.ProcessGroup, tokens: Tokens) -> None:
        super().__init__()
        self._group, self._tokens = group, tokens
        self.calls = 0
        """How many attentions were divided so far."""
        self.entered = 0

    def __enter__(self) -> _Ulysses:
        self.entered += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failed: Any) -> None:
        self.entered -= 1
        super().__exit__(*failed)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self._attention(func, *args, **(kwargs or {}))
        if func is torch.arange and _counted(*args, **(kwargs or {})) == self._tokens.part:
            self._refuse("counts the positions")
        elif func is torch.Tensor.__getitem__ and self._looks_up(*args):
            self._refuse("looks up the positions")
        return func(*args, **(kwargs or {}))

    def _looks_up(self, table: Tensor, index: Any) -> bool:
        """Whether it is ``table[:tokens]`` of a constant table: a parameter, or a tensor without gradient."""
        begins = any(
            isinstance(one, slice) and one.stop == self._tokens.part and not one.start and one.step in (None, 1)
            for one in (index if isinstance(index, tuple) else (index,))
        )
        is_constant = isinstance(table, nn.Parameter) or not table.requires_grad
        return begins and is_constant and torch.is_grad_enabled()

    def _refuse(self, what: str) -> NoReturn:
        raise StrategyError(
            f"cp: a block {what} of its part of the sequence, {self._tokens.part} tokens, as if it were the whole",
            "compute the positions before the blocks, and pass them (or what is computed from them) to the blocks as "
            "arguments (sequence x width); or use --strategy fsdp",
        )

    def _attention(
        self,
        func: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """``query``, ``key``, ``value``: batch x heads x this rank's tokens x width."""
        self._check(query, key)
        ranks, rank = int(self._group.size()), int(self._group.rank())
        whole = exchange((query, key, value), self._group, scatter=-3, gather=-2)
        if attn_mask is not None:
            if attn_mask.shape[-1] not in (1, whole[1].shape[-2]) or attn_mask.shape[-2] not in (1, whole[0].shape[-2]):
                raise StrategyError(
                    f"cp: the mask {list(attn_mask.shape)} does not fit sequences of {whole[0].shape[-2]} tokens",
                    "make the mask before the blocks, where sequences are whole",
                )
            if attn_mask.ndim >= 3 and attn_mask.shape[-3] > 1:
                attn_mask = attn_mask.chunk(ranks, -3)[rank]
        return exchange((func(*whole, attn_mask, *args, **kwargs),), self._group, scatter=-2, gather=-3)[0]

    def _check(self, query: Tensor, key: Tensor) -> None:
        ranks = int(self._group.size())
        if query.ndim < 4:
            raise StrategyError(
                f"cp divides attention heads, but a query of shape {list(query.shape)} has no dimension of heads",
                "give it batch x heads x sequence x width",
            )
        for what, tensor in (("heads", query), ("heads of keys", key)):
            if tensor.shape[-3] % ranks:
                raise StrategyError(
                    f"cp: {tensor.shape[-3]} {what} over {ranks} ranks do not divide evenly",
                    f"choose -O cp=N that divides {tensor.shape[-3]}",
                )
        if query.shape[-2] != key.shape[-2]:
            raise StrategyError(
                f"cp cannot divide attention to another sequence: {query.shape[-2]} queries, {key.shape[-2]} keys",
                "use --strategy fsdp",
            )


@contextmanager
def _computed_again_within(mode: _Ulysses) -> Iterator[None]:
    """Functions given to ``torch.utils.checkpoint`` in this context are also recomputed in ``mode``."""

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def again(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if mode.entered else mode:
                return function(*args, **kwargs)

        return again

    def given(original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(within(function), *args, **kwargs)

    patches, reentrant = Patches(), checkpoint.CheckpointFunction
    patches.around(*checkpointing(), given)
    patches.give(reentrant, "apply", functools.partial(given, reentrant.apply))
    try:
        yield
    finally:
        patches.undo()


def _counted(start: Any, end: Any = None, step: Any = 1, **_: Any) -> int | None:
    """The end of ``torch.arange`` if its arguments count from 0 in steps of 1; else None."""
    start, end = (0, start) if end is None else (start, end)
    return int(end) if start == 0 and step == 1 else None


def exchange(tensors: Sequence[Tensor], group: dist.ProcessGroup, *, scatter: int, gather: int) -> tuple[Tensor, ...]:
    """All-to-all: dimension ``scatter`` is divided among the ranks, ``gather`` is concatenated. Differentiable.

    One call for all tensors; if their dtypes differ (autocast), one call for each tensor.
    """
    if len({one.dtype for one in tensors}) > 1:
        return tuple(exchange((one,), group, scatter=scatter, gather=gather)[0] for one in tensors)
    result: tuple[Tensor, ...] = _Exchange.apply(group, scatter, gather, *tensors)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """The send buffer holds, for each rank, the parts of all tensors for it, one after the other."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, scatter: int, gather: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.scatter, ctx.gather = group, scatter, gather
        ranks = int(group.size())
        parts = [tensor.chunk(ranks, scatter) for tensor in tensors]
        sizes = [part[0].numel() for part in parts]
        sent = tensors[0].new_empty(ranks, sum(sizes))
        for part, places in zip(parts, sent.split(sizes, 1), strict=True):
            for one, place in zip(part, places, strict=True):
                place.view_as(one).copy_(one)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        del sent
        return tuple(
            torch.cat([place.view(part[0].shape) for place in places], gather)
            for part, places in zip(parts, received.split(sizes, 1), strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, *exchange(grads, ctx.group, scatter=ctx.gather, gather=ctx.scatter)


def explain(error: BaseException) -> StrategyError | None:
    """Explains an error of a block that was written for whole sequences; None for another error."""
    if isinstance(error, RuntimeError) and ("must match the size" in str(error) or "shape" in str(error)):
        return StrategyError(
            f"cp: a block combines its part of the sequence with the whole sequence: {str(error).splitlines()[0]}",
            "pass positions and masks into the blocks as arguments (sequence x width; 1 x sequence x width where a "
            "batch may have as many samples as tokens), or use --strategy fsdp",
        )
    return None
