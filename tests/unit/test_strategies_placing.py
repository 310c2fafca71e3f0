"""Where the samples of a model's inputs may be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jupyter_torchdist.strategies.step.placing import Dims, elsewhere, in_front, narrowed, samples_in


def of(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


def test_in_front_are_those_of_that_many_that_are_no_parameters() -> None:
    tensors = [*of((4, 3), (4,), (3, 4), ()), nn.Parameter(torch.zeros(4))]
    assert in_front(tensors, 4) == (0, 0, None, None, None)


@pytest.mark.parametrize(
    ("tensors", "total", "wanted"),
    [
        pytest.param(of((4, 6), (2, 4, 8)), 4, [(0, 1), (1, None)], id="hidden states"),
        pytest.param(
            of((6, 4), (5, 4), (6, 6), (4, 6)),
            6,
            [(0, None, 0, 1), (1, 1, None, 0), (1, None, None, None)],
            id="time first, masks",
        ),
        pytest.param(of((6, 6), (6, 6)), 6, [(1, 1), (1, None)], id="as many samples as time"),
        pytest.param(of((2, 4, 4)), 4, [(1,)], id="two dimensions of as many"),
        pytest.param(of((5,)), 5, [], id="one dimension alone"),
    ],
)
def test_where_else_they_may_be(tensors: list[torch.Tensor], total: int, wanted: list[Dims]) -> None:
    assert elsewhere(tensors, total) == wanted


def test_samples_are_taken_along_their_dimension() -> None:
    x, hidden, mask = torch.rand(4, 6), torch.rand(2, 4, 8), torch.rand(6, 6)
    dims = (0, 1, None)
    assert samples_in([x, hidden, mask], dims) == 4
    part = narrowed((x, {"hidden": hidden}, [mask]), dims, 1, 3)
    torch.testing.assert_close(part, (x[1:3], {"hidden": hidden[:, 1:3]}, [mask]))
