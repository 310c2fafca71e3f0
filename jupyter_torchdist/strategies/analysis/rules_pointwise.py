"""Elementwise operations: rows remain rows; totals remain totals under linear operations only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .lattice import SAME, Den, Kind, MixesError, Noise, NoRuleError, Rows, Same, Total
from .numerals import Origin
from .rules import ATTENUATED, IGNORED, Call, elementwise, even_operand, refuse_totals, rule

_TINY = 1e-6


@rule("clone", "detach", "alias", "neg", "positive", "contiguous", "lift", "view_as_real", "view_as_complex", "real")
def _linear(call: Call) -> Kind:
    return call.kind(call["self"])


@rule("_to_copy", "to", "_autocast_to_full_precision", "_autocast_to_reduced_precision")
def _cast(call: Call) -> Kind:
    kind = call.kind(call["self"])
    rounds = call["self"].is_floating_point() and not call.out.is_floating_point()
    if isinstance(kind, Total) and rounds and not torch.equal(call["self"].double(), call.out.double()):
        raise MixesError(f"rounds a {kind.name}")
    return kind


@rule("fill", "zero")
def _fill(call: Call) -> Kind:
    """Rows filled with one value are still rows."""
    kind = call.kind(call["self"])
    value = call.kind(call.get("value"))
    if isinstance(kind, Rows) and isinstance(value, Same):
        return Rows(kind.dim, kind.owners)
    if isinstance(kind, Total):
        return SAME if isinstance(value, Same) else value
    return value if isinstance(value, Total) else elementwise(call, call.tensors, call.out.dim())


@rule("copy")
def _copy(call: Call) -> Kind:
    target, source = call["self"], call["src"]
    kind, given = call.kind(target), call.kind(source)
    if isinstance(given, Rows):
        dim = given.dim - source.dim() + target.dim()
        if target.size(dim) != source.size(given.dim):
            raise MixesError("broadcasts samples against samples: compare the shapes")
        return Rows(dim, given.owners, given.over)
    if isinstance(kind, Rows) and isinstance(given, Same | Noise):
        own = kind.dim - target.dim() + source.dim()
        if own >= 0:
            even_operand(call, source, given, own, kind.owners)
        return Rows(kind.dim, kind.owners)
    return given


@rule("add", "sub", "rsub", "_foreach_add")
def _add(call: Call) -> Kind:
    sides = [call["self"], call["other"]]
    kinds = [call.kind(side) for side in sides]
    totals = [kind for kind in kinds if isinstance(kind, Total)]
    if not totals:
        return elementwise(call, call.tensors, call.out.dim())
    if any(isinstance(kind, Rows) for kind in kinds):
        raise MixesError(f"combines each sample with a {totals[0].name}")
    if len(totals) == 2:
        return _both(call, totals[0], totals[1])
    return _with_constant(call, totals[0], next(s for s, k in zip(sides, kinds, strict=True) if k is not totals[0]))


def _both(call: Call, one: Total, other: Total) -> Kind:
    if one.floored or other.floored:
        raise MixesError("adds a sum that has a lower bound")
    counts = one.counts & other.counts
    if one.den is None or other.den is None:
        if one.den is not other.den:
            raise MixesError("adds a sum over the batch to a mean over the batch")
        return Total(None, counts)
    if one.den.token == other.den.token:
        return Total(one.den, counts)
    if one.den.counts_samples and other.den.counts_samples and (one.den.full or other.den.full):
        call.notes.add(IGNORED)
        return Total(other.den if one.den.full else one.den, counts)
    raise MixesError("adds two means with different divisors")


def _with_constant(call: Call, total: Total, constant: Any) -> Kind:
    """A constant may be added to a mean; to a sum only zero, or a tiny number that keeps a divisor from zero."""
    if total.den is not None:
        return total
    learnt = isinstance(constant, torch.Tensor) and (constant.requires_grad or constant.numel() > 1)
    if not learnt:
        value = abs(float(constant))
        if value == 0 or total.floored:
            return total
        if not call.out.requires_grad and not call["self"].requires_grad and value <= _TINY * _least(call.out):
            call.notes.add(ATTENUATED)
            return Total(None, total.counts, floored=True)
    raise MixesError("adds a term that does not depend on the batch to a sum over it")


def _least(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().min())


@rule("clamp_min", "clamp", "maximum")
def _floor(call: Call) -> Kind:
    """``clamp(min=1)`` of a sum that is a divisor only: where the bound applies, the rank has nothing to divide."""
    kind = call.kind(call["self"])
    if not isinstance(kind, Total) or kind.den is not None or call.get("max") is not None:
        return elementwise(call, call.tensors, call.out.dim())
    if call["self"].requires_grad or not torch.equal(call["self"], call.out):
        refuse_totals(call.name, kind)
    if any(isinstance(call.kind(tensor), Rows | Total) for tensor in call.tensors if tensor is not call["self"]):
        raise MixesError(f"bounds a {kind.name}")
    return Total(None, kind.counts, floored=True)


@rule("mul", "_foreach_mul")
def _mul(call: Call) -> Kind:
    kinds = {"self": call.kind(call["self"]), "other": call.kind(call["other"])}
    totals = [name for name, kind in kinds.items() if isinstance(kind, Total)]
    if not totals:
        return _over(call, list(kinds.values())) or elementwise(call, call.tensors, call.out.dim())
    name = totals[0]
    other = "self" if name == "other" else "other"
    kind, factor = kinds[name], kinds[other]
    assert isinstance(kind, Total)
    if isinstance(factor, Rows) or len(totals) == 2:
        raise MixesError(f"multiplies a {kind.name} by something that depends on the batch")
    return _scaled(call, kind, call[other], divides=False)


def _over(call: Call, kinds: Sequence[Kind]) -> Kind | None:
    """A share of a sum (``w / w.sum()``) times rows is a share of the same sum."""
    shares = [kind for kind in kinds if isinstance(kind, Rows) and kind.over is not None]
    if not shares:
        return None
    if len(shares) == 2:
        raise MixesError("multiplies two shares of sums over the batch")
    whole = {id(kind): Rows(kind.dim, kind.owners) for kind in shares}
    unshared = _Unshared(call, whole)
    result = elementwise(unshared, call.tensors, call.out.dim())  # type: ignore[arg-type]  # it stands for a call
    assert isinstance(result, Rows)
    return Rows(result.dim, result.owners, shares[0].over)


class _Unshared:
    """A call in which shares of a sum count as plain rows."""

    def __init__(self, call: Call, whole: dict[int, Rows]) -> None:
        self.follower, self.suspects = call.follower, call.suspects
        self.name, self.notes, self.writes, self.before = call.name, call.notes, call.writes, call.before
        self._call, self._whole = call, whole

    def kind(self, tensor: torch.Tensor) -> Kind:
        kind = self._call.kind(tensor)
        return self._whole.get(id(kind), kind)


@rule("div", "true_divide")
def _div(call: Call) -> Kind:
    above, below = call.kind(call["self"]), call.kind(call["other"])
    if call.get("rounding_mode") is not None:
        return elementwise(call, call.tensors, call.out.dim())
    if isinstance(below, Total):
        return _ratio(call, above, below)
    if not isinstance(above, Total):
        return _over(call, [above]) or elementwise(call, call.tensors, call.out.dim())
    if isinstance(below, Rows):
        raise MixesError(f"divides a {above.name} by each sample's value")
    return _scaled(call, above, call["other"], divides=True)


def _ratio(call: Call, above: Kind, below: Total) -> Kind:
    divisor = call["other"]
    if divisor.requires_grad:
        raise MixesError(f"divides by a {below.name} that is itself trained")
    if divisor.numel() != 1:
        raise MixesError(f"divides by a {below.name} of several elements")
    den = Den(call.follower.number(divisor), divisor.detach())
    return _divided(above, below, den)


def _divided(above: Kind, below: Total, den: Den) -> Kind:
    """``above / below``, where ``den`` has the value of ``below``."""
    if below.den is not None:
        if not isinstance(above, Total) or above.den is None or above.den.token != below.den.token:
            raise MixesError("divides by a mean over the batch")
        return Total(Den(den.token, den.value * below.den.value))
    if isinstance(above, Rows) and above.over is None:
        return Rows(above.dim, above.owners, den)
    if isinstance(above, Total) and above.den is None and not above.floored:
        return Total(den)
    raise MixesError("divides by a sum over the batch something that is not such a sum")


def _scaled(call: Call, total: Total, factor: Any, *, divides: bool) -> Kind:
    """A total scaled by a constant. Handles numbers that may be a count of this rank's samples."""
    if isinstance(factor, torch.Tensor):
        if factor.numel() > 1 or factor.requires_grad or factor.dim() > 0:
            return total
        factor = factor.item()
    if not isinstance(factor, (int, float)) or isinstance(factor, bool):
        return total
    if not factor:
        raise MixesError("divides by zero" if divides else "multiplies by zero")
    read = call.follower.read_number(factor)
    if read is not None and call.follower.origin(factor) is not Origin.LITERAL:
        return _by_read_number(call, total, factor, read, divides=divides)
    size = _whole_number(factor if divides else 1 / factor)
    if total.den is not None:
        counted = any(size == count for count, _ in total.counts)
        if (size == call.follower.samples() or counted) and isinstance(factor, int):
            _doubt_unless_literal(call, factor)
        return total
    if size is not None:
        return _by_size(call, total, factor, size)
    if call.in_python and not call.follower.is_known(factor):
        _doubt_unless_literal(call, factor)  # ``n_tokens + 1e-8``, ``sqrt(B)``
    return total


def _by_read_number(call: Call, total: Total, factor: float, read: tuple[Kind, Hashable], *, divides: bool) -> Kind:
    kind, number = read
    if isinstance(kind, Same | Noise):
        return total
    if not divides or not isinstance(kind, Total):
        raise MixesError(f"scales a {total.name} by a number read from the batch")
    return _divided(total, kind, Den(number, float(factor)))


def _whole_number(value: float) -> int | None:
    """``abs(value)`` as an int if it is a whole number from 1 on, else None."""
    if not 1 <= abs(value) < 2**53 or abs(abs(value) - round(abs(value))) > 1e-9 * abs(value):
        return None
    return round(abs(value))


def _by_size(call: Call, total: Total, factor: float, size: int) -> Kind:
    """A sum divided by a whole number: a mean if the number counts the summed elements and is no literal."""
    samples = call.follower.samples()
    dens = {den for count, den in total.counts if count == size}
    if size == samples:
        dens.add(call.samples_token_of(samples))
    origin = Origin.SIZE if not call.in_python else call.follower.origin(factor)
    known = call.follower.is_known(size)
    if origin is Origin.LITERAL or (known and not dens) or (size == 1 and not dens):
        return total
    if len(dens) == 1 and origin is Origin.SIZE and not known:
        return Total(dens.pop(), total.counts)
    call.suspects.add(call.follower.suspect(factor))
    return total


def _doubt_unless_literal(call: Call, factor: float) -> None:
    if call.follower.origin(factor) is not Origin.LITERAL:
        call.suspects.add(call.follower.suspect(factor))


@rule("where")
def _where(call: Call) -> Kind:
    """No totals: a choice between them is refused."""
    kinds = [call.kind(call[name]) for name in ("condition", "self", "other")]
    if not any(isinstance(kind, Total) for kind in kinds):
        return elementwise(call, call.tensors, call.out.dim())
    raise MixesError("chooses between totals over the batch")


@rule("multinomial")
def _multinomial(call: Call) -> Kind:
    """Draws for each sample, with the sample's own weights."""
    kind = call.kind(call["self"])
    refuse_totals(call.name, kind)
    if not isinstance(kind, Rows) or kind.dim or call["self"].dim() != 2:
        raise MixesError("draws from the samples themselves")
    return Rows(0, kind.owners)


@rule("bernoulli", "normal", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
def _draw(call: Call) -> Kind:
    return elementwise(call, call.tensors, call.out.dim())


@rule("uniform", "exponential", "random", "geometric", "log_normal", "cauchy")
def _draw_into(call: Call) -> Kind:
    kind = call.kind(call["self"])
    refuse_totals(call.name, kind)
    return kind


@rule("native_dropout")
def _dropout(call: Call) -> Kind:
    return elementwise(call, [call["input"]], call.out[0].dim())


@rule("_local_scalar_dense", "is_nonzero", "equal")
def _read(call: Call) -> list[Kind]:
    return []


@rule("_fused_dropout", "rrelu_with_noise")
def _no_rule(call: Call) -> Kind:
    raise NoRuleError
