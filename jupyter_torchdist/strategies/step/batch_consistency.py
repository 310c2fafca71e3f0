"""Checks that all ranks have the same batch before each rank takes its rows.

Values from an unseeded generator, the order of a set or a clock differ between ranks. The rows of different batches
would be joined to a wrong batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...protocol.errors import StrategyError
from ..analysis.kinds import tensors_within

ENOUGH = 2**16
"""About how many elements of a tensor are compared."""

Print = list[tuple[str, float, float]]
"""For each tensor: dtype and shape, a sum with a different weight for every position, and its tolerance."""

_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
"""Relative tolerance of the sum: results of the same computation may differ, for example on two kinds of GPUs."""


@torch.no_grad()
def fingerprint(values: Any) -> Print:
    """A small fingerprint of all tensors in ``values``; for equal tensors it is equal up to rounding."""
    tensors = tensors_within(values)
    return [
        _of(tensor)
        for tensor in tensors
        if tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested
    ]


def _of(tensor: torch.Tensor) -> tuple[str, float, float]:
    values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    flat = values.reshape(-1)[:: max(1, values.numel() // ENOUGH)].double().nan_to_num(0.0, 0.0, 0.0)
    places = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
    weights = (places * 0.6180339887498949).frac() + 0.5
    name = f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
    within = _ROUNDING.get(tensor.dtype, 1e-12)
    return name, float((flat * weights).sum()), within * float((flat.abs() * weights).sum())


def check_alike(found: Sequence[Print], what: str) -> None:
    """Raise ``StrategyError`` if a rank's fingerprint differs from the first; ``what``: a name for the data."""
    for rank, other in enumerate(found):
        if len(other) != len(found[0]) or not all(map(_close, other, found[0])):
            raise StrategyError(
                f"ranks 0 and {rank} have different {what}: {_difference(found[0], other)}",
                "seed every generator (numpy.random.default_rng(0), torch.Generator().manual_seed(0)), "
                "sort sets and directory listings, take nothing from a clock or from the rank; "
                "--strategy none for code that gives each rank its own data",
            )


def _close(one: tuple[str, float, float], other: tuple[str, float, float]) -> bool:
    return one[0] == other[0] and abs(one[1] - other[1]) <= max(one[2], other[2])


def _difference(one: Print, other: Print) -> str:
    for mine, its in zip(one, other, strict=False):
        if mine[0] != its[0]:
            return f"{mine[0]} and {its[0]}"
        if not _close(mine, its):
            return f"a tensor of {mine[0]} has other values"
    return f"{len(one)} tensors and {len(other)}"
