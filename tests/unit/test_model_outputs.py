"""What a model returns, opened and closed again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
    TransformedDistribution,
    transforms,
)

from jupyter_torchdist.protocol.errors import StrategyError
from jupyter_torchdist.strategies.core.outputs import changed, closed, numbers_in, opened
from jupyter_torchdist.strategies.core.scatter import tensors_in

ROWS = torch.arange(1.0, 13.0).view(4, 3)


def looked_at(distribution: Categorical) -> Categorical:
    assert distribution.probs.shape == distribution.logits.shape
    return distribution


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Normal(x, 1 + x),
        lambda x: Bernoulli(logits=x),
        lambda x: Binomial(5, logits=x),
        lambda x: OneHotCategorical(logits=x),
        lambda x: Beta(x, 2 * x),
        lambda x: Categorical(probs=x),
        lambda x: looked_at(Categorical(logits=x)),
        lambda x: looked_at(Categorical(probs=x)),
        lambda x: Independent(Normal(x, torch.ones(3)), 1),
        lambda x: MultivariateNormal(x, torch.eye(3) * 2),
        lambda x: MixtureSameFamily(Categorical(probs=x), Normal(x, torch.ones(3))),
    ],
)
def test_a_distribution_of_all_rows_is_made_of_those_of_parts(make: Callable[[Tensor], Distribution]) -> None:
    whole = make(ROWS)
    parts = [tensors_in(opened(make(rows))) for rows in ROWS.split(2)]
    each = iter([torch.cat(both) for both in zip(*parts, strict=True)])
    joined = changed(make(ROWS[:2]), lambda _: next(each))
    assert type(joined) is type(whole)
    assert joined.batch_shape == whole.batch_shape and joined.event_shape == whole.event_shape
    value = whole.sample()
    torch.testing.assert_close(joined.log_prob(value), whole.log_prob(value))


class Output:
    def __init__(self, y: Tensor, width: int) -> None:
        self.y, self.width, self.me = y, width, self


def test_objects_are_made_anew_and_those_of_before_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Output, "__module__", "__main__")
    given: dict[str, Any] = {"one": [Output(ROWS, 3)], "two": SimpleNamespace(y=ROWS, name="it"), "three": None}
    assert numbers_in(opened(given)) == [3, "it", None]
    made: Any = changed(given, lambda tensor: tensor + 1)
    torch.testing.assert_close(made["one"][0].y, ROWS + 1)
    torch.testing.assert_close(made["two"].y, ROWS + 1)
    assert type(made["one"][0]) is Output and made["one"][0].width == 3 and made["two"].name == "it"
    assert given["one"][0].y is ROWS and given["two"].y is ROWS


def test_what_has_no_tensors_is_left_as_it_is() -> None:
    for one in (SimpleNamespace(name="it"), "word", 3, None, print, slice(2), Normal):
        assert closed(opened(one)) is one


def closure() -> Callable[[], Tensor]:
    rows = ROWS + 1
    return lambda: rows.sum()


@pytest.mark.parametrize(
    "stranger",
    [
        TransformedDistribution(Normal(ROWS, 1.0), [transforms.ExpTransform()]),
        (rows for rows in ROWS),
        closure(),
        functools.partial(torch.add, ROWS),
    ],
)
def test_what_nobody_knows_how_to_join_is_refused(stranger: Any) -> None:
    with pytest.raises(
        StrategyError, match=r"it returns an? \w+, which cannot be put together from the results for parts of the batch"
    ):
        opened([stranger])
