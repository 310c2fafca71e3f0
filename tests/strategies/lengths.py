"""Context parallelism: equal to one device, and what it cannot divide."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jupyter_torchdist.strategies.core.context import ParallelContext
from jupyter_torchdist.strategies.parallel import context_parallel, restore
from jupyter_torchdist.strategies.parallel.sequences import Tokens

from . import models
from .languages import LENGTH, WIDTH, WORDS, Apart, Language
from .models import adamw, step
from .ranks import CLOSE, SAID, assert_close, context, counted_calls, hooks_of, mean, refusal
from .splitting import LANGUAGES
from .unchanged import equal, language, under

STEPS = 3


def cp(**options: Any) -> ParallelContext:
    return context({"cp": dist.get_world_size()}, **options)


def check_languages_train_as_on_one_device() -> None:
    for name in ("apart", "tied"):
        which = LANGUAGES[name]
        losses, weights = models.alone(which, STEPS)
        model = which.model()
        hooks = hooks_of(model)
        context_parallel.check(model, cp())
        context_parallel.apply(model, cp())
        optimizer = adamw(list(model.parameters()))
        for number, (inputs, targets) in enumerate(which.batches(STEPS)):
            loss = mean(step(model, optimizer, inputs, targets, after=lambda: None))
            assert abs(loss - losses[number]) < CLOSE, (number, loss, losses[number])
        assert_close(model.state_dict(), weights)
        restore.restore(model)
        assert hooks_of(model) == hooks
        assert not [part for part in model.modules() if {"forward", "__deepcopy__"} & vars(part).keys()]


def check_blocks_keep_a_part_of_the_tokens_and_exchange_them_twice_an_attention() -> None:
    model, shapes = Language(), []
    context_parallel.apply(model, cp())
    model.get_submodule("layers.0.mlp").register_forward_hook(lambda _m, inputs, _out: shapes.append(inputs[0].shape))
    with counted_calls("all_to_all_single") as calls:
        output = model(torch.randint(WORDS, (2, LENGTH)))
    assert shapes == [(2, LENGTH // dist.get_world_size(), WIDTH)] and output.shape == (2, LENGTH, WORDS)
    assert calls == {"all_to_all_single": 4}  # two attentions: query, key and value together, and back
    assert any("2 blocks (Layer)" in line for line in SAID)


def check_lengths_that_do_not_divide_are_whole_where_no_gradient_is_wanted() -> None:
    """A text that grows word by word, after the training."""
    torch.manual_seed(4)
    model = Language()
    text = torch.randint(WORDS, (2, LENGTH))
    lengths = [1, 5, LENGTH, 3]
    with torch.no_grad():
        expected = [model(text[:, :length]) for length in lengths]
    context_parallel.apply(model, cp())
    with torch.no_grad():
        for one, length in zip(expected, lengths, strict=True):
            torch.testing.assert_close(model(text[:, :length]), one, atol=CLOSE, rtol=CLOSE)
    assert model(text).shape == (2, LENGTH, WORDS)


def check_masks_and_heads_of_keys_mean_what_they_meant() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(1)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    q, k, v = (one.chunk(world, 2)[rank] for one in (query, key, value))
    for mask in (None, torch.randn(6, 6), torch.randn(2, 1, 6, 6), torch.randn(2, 4, 6, 6)):
        options: Any = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": True}
        expected = F.scaled_dot_product_attention(query, key, value, **options)
        with ulysses():
            ours = F.scaled_dot_product_attention(q, k, v, **options)
        torch.testing.assert_close(ours, expected.chunk(world, 2)[rank])


def check_queries_keys_and_values_may_be_of_several_types_under_autocast() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(2)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(query, key, value)
        q, k, v = (one.chunk(world, 2)[rank] for one in (query, key, value))
        with counted_calls("all_to_all_single") as calls, ulysses():
            ours = F.scaled_dot_product_attention(q, k, v)
    assert calls == {"all_to_all_single": 4}
    torch.testing.assert_close(ours, expected.chunk(world, 2)[rank])


class Turned(nn.Module):
    """A block whose queries and keys are turned by their positions (RoPE)."""

    own: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("own", rotations(2 * LENGTH), persistent=False)

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        """``beside``: what is told of the positions, or how a block finds them itself."""
        batch, length, _ = x.shape
        if isinstance(beside, Tensor) and not beside.is_complex():
            beside = rotations(LENGTH)[beside]
        elif beside == "counted":
            beside = rotations(LENGTH)[torch.arange(length)]
        elif beside == "looked up":
            beside = self.own[:length]
        elif beside == "made":
            beside = rotations(length)
        turns = beside.view(length, -1)
        query, key, value = self.qkv(x).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        query, key = (
            torch.view_as_real(torch.view_as_complex(one.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
            for one in (query, key)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def rotations(length: int) -> Tensor:
    speeds = 100.0 ** -torch.linspace(0, 1, WIDTH // 8)
    return torch.polar(torch.ones(length, WIDTH // 8), torch.outer(torch.tensor([*range(length)]).float(), speeds))


class Rotating(nn.Module):
    def __init__(self, beside: Any) -> None:
        super().__init__()
        self.beside = beside
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([Turned() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x, self.beside)
        return self.head(x)  # type: ignore[no-any-return]


def check_what_is_told_of_positions_is_cut_in_all_its_shapes() -> None:
    table = rotations(LENGTH)
    for beside in (table, table[None, :, None], table[None, None], table[:, None], torch.arange(LENGTH)):
        equal(cp(), language(lambda beside=beside: Rotating(beside)))  # type: ignore[misc]


def check_positions_that_a_block_finds_itself_are_refused() -> None:
    def of(how: str) -> str:
        return refusal(lambda: under(cp(), language(lambda: Rotating(how))))

    assert "counts the positions of its part of the sequence" in of("counted")
    assert "looks up the positions of its part of the sequence" in of("looked up")
    assert "cp would change what Rotating computes: output 0" in of("made")


def ulysses() -> Any:
    group = cp().mesh["cp"].get_group()
    return context_parallel._Ulysses(group, Tokens(group, "cp"))


def check_what_cannot_be_divided_is_refused() -> None:
    def of(model: nn.Module) -> str:
        return refusal(lambda: context_parallel.check(model, cp()))

    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)
    assert "torch.nn.MultiheadAttention" in of(encoder)
    assert "has none" in of(models.Mlp())
    both = nn.ModuleDict({"encoder": Language().layers, "decoder": Language().layers})
    assert "has 2: decoder, encoder" in of(both)
    model = Language()
    context_parallel.apply(model, cp())
    assert "5 tokens over" in refusal(lambda: model(torch.randint(WORDS, (2, 5))))
    assert "copy.deepcopy of Language" in refusal(lambda: copy.deepcopy(model))
    x, attention = torch.randn(2, 4, 4, 4), F.scaled_dot_product_attention
    with ulysses():
        assert "3 heads over" in refusal(lambda: attention(x[:, :3], x, x))
        assert "cannot divide attention to another sequence: 4 queries, 3 keys" in refusal(
            lambda: attention(x, x[:, :, :3], x[:, :, :3])
        )
        assert "has no dimension of heads" in refusal(lambda: attention(x[0], x[0], x[0]))
        assert "the mask [4, 4] does not fit sequences of 8" in refusal(lambda: attention(x, x, x, torch.ones(4, 4)))


class Again(Apart):
    """Computed again in the backward, as Transformers' layers are when they train."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class AgainAsBefore(Again):
    reentrant = True


def check_attentions_that_are_computed_again_are_divided_again() -> None:
    for attention in (Again, AgainAsBefore):
        equal(cp(), language(lambda attention=attention: Language(attention)))  # type: ignore[misc]


class Shifted(Apart):
    """A mixture with the token before that has no effect in the beginning, neither here nor behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(WIDTH))
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.share * F.pad(x[:, :-1], (0, 0, 1, 0)))


def check_parameters_that_begin_at_zero_hide_nothing() -> None:
    built: list[Language] = []

    def build() -> Language:
        built.append(Language(Shifted))
        return built[-1]

    assert "cp would change what Language computes: output 0" in refusal(lambda: under(cp(), language(build)))
    assert not any(one.share.any() or one.out.weight.any() for one in built[0].modules() if isinstance(one, Shifted))
