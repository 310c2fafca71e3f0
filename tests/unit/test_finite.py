"""The guard's look at gradients on the CPU: it changes nothing, and finds what is not finite."""

from __future__ import annotations

import pytest
import torch

from jupyter_torchdist.strategies.step.finite import _measured
from jupyter_torchdist.torch_private.tensors import all_finite

CPU = torch.device("cpu")
ODD = [0.0, -0.0, 1e-45, -1e-40, 3e38]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_look_changes_no_bit_and_is_no_change_to_autograd(dtype: torch.dtype) -> None:
    values = torch.cat([torch.tensor(ODD), torch.randn(1000)]).clamp(-6e4, 6e4).to(dtype)
    before, version = values.clone(), values._version
    assert all_finite([values, torch.randn(3, 4).t(), torch.zeros(0)])
    assert torch.equal(values.view(torch.uint8), before.view(torch.uint8)) and values._version == version
    for number in (float("nan"), float("inf"), float("-inf")):
        assert not all_finite([torch.ones(2), torch.tensor([1.0, number]).to(dtype)])


def finite(*gradients: torch.Tensor) -> list[bool] | None:
    numbers = _measured(gradients, CPU)
    return None if numbers is None else torch.isfinite(numbers).tolist()


def test_each_gradient_has_a_number_that_is_finite_if_it_is() -> None:
    odd = [torch.ones(2), torch.tensor([1.0, float("inf")]), torch.tensor([float("nan")]), torch.tensor([3e38, 3e38])]
    assert finite(*odd) == [True, False, False, True]
    assert finite(odd[0], odd[3]) is None
    assert finite(torch.ones(1).expand(5), odd[1]) == [True, False], "shared memory"
    assert finite(torch.ones(1).expand(5)) == [True]
    assert finite(torch.ones(2, dtype=torch.complex64)) == [True]
    assert finite() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_parts_of_a_bucket(dtype: torch.dtype) -> None:
    bucket = torch.zeros(100, dtype=dtype)
    parts = list(bucket.split(10))
    assert all_finite(parts)
    bucket[42] = torch.finfo(dtype).max
    bucket[43] = torch.finfo(dtype).max
    assert all_finite(parts), "the sum is infinite, no element is"
    for number in (float("nan"), float("inf")):
        bucket[42] = number
        assert not all_finite(parts)
    assert all_finite(parts[:4]), "the other part of the bucket is not asked for"
    words = torch.zeros(100, dtype=torch.int64)
    assert not all_finite([*words.view(torch.float64)[:99].fill_(float("inf")).split(10)])
