"""A verdict on a loss is never wrong: what it says is compared with the gradients of a batch and of its parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from jupyter_torchdist.strategies.analysis import rules
from jupyter_torchdist.strategies.analysis.batchwise import BatchwiseTracker
from jupyter_torchdist.strategies.analysis.verdicts import Judgement, Verdict

from ..expressions import ENDINGS, OPERATIONS, Expression
from ..losses import (
    AMBIGUOUS,
    CASES,
    MEAN,
    MIXED,
    RATIO,
    SAME,
    SUM,
    UNKNOWN,
    Batch,
    Net,
    combined,
    gradient,
    judge,
    make_batch,
    make_net,
    nll,
)

SPLITS = [(3, 2), (4, 4), (5, 3), (2, 4)]
POSITIVE = {MEAN, SUM, RATIO, SAME}


@pytest.fixture(autouse=True)
def _quiet_and_single_threaded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of losses that are meant to be odd
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def net() -> Net:
    return make_net()


def parts_of(batch: Batch, sizes: tuple[int, int]) -> list[Batch]:
    return [batch.part(0, sizes[0]), batch.part(sizes[0], sum(sizes))]


def assert_true(loss: Callable[[Net, Batch], Tensor], net: Net, sizes: tuple[int, int]) -> list[Verdict]:
    """The verdicts of two ranks; where they are positive, the ranks' gradients make the whole batch's."""
    whole = make_batch(sum(sizes), seed=sum(sizes))
    verdicts = [judge(loss, net, part) for part in parts_of(whole, sizes)]
    judgements = {verdict.judgement for verdict in verdicts}
    if len(judgements) == 1 and judgements <= POSITIVE:
        truth = gradient(loss, net, whole)
        found = combined(verdicts, [gradient(loss, net, part) for part in parts_of(whole, sizes)])
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9, equal_nan=True)
    return verdicts


@pytest.mark.parametrize("name", CASES)
def test_losses_as_notebooks_write_them(name: str, net: Net) -> None:
    expected, loss = CASES[name]
    for sizes in SPLITS[:3]:
        assert {verdict.judgement for verdict in assert_true(loss, net, sizes)} == {expected}


STEP = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 5), st.integers(0, 6), st.integers(0, 4))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    steps=st.lists(STEP, min_size=1, max_size=5), ending=st.sampled_from(sorted(ENDINGS)), sizes=st.sampled_from(SPLITS)
)
def test_never_wrong(steps: list[tuple[str, int, int, int]], ending: str, sizes: tuple[int, int], net: Net) -> None:
    loss = Expression(steps, ending)
    whole = make_batch(sum(sizes), seed=sum(sizes))
    try:
        values = [gradient(loss, net, batch) for batch in (whole, *parts_of(whole, sizes))]
    except (RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError):
        assume(False)  # shapes that do not fit
        raise
    assume(all(bool(value.isfinite().all()) for value in values))
    verdicts = [judge(loss, net, part) for part in parts_of(whole, sizes)]
    assume(len({verdict.judgement for verdict in verdicts}) == 1)  # the strategy refuses where ranks disagree
    if verdicts[0].judgement in POSITIVE:
        torch.testing.assert_close(combined(verdicts, values[1:]), values[0], rtol=1e-8, atol=1e-8)


FOUND = [
    (2, 4, "sum", [("slice", 2, 4, 4)]),
    (2, 4, "mean", [("read_number", 4, 4, 3)]),
    (5, 5, "mean", [("root", 3, 4, 2), ("by_sorting", 5, 2, 2)]),
    (2, 4, "mean_of_squares", [("nonzero", 1, 5, 1)]),
    (3, 3, "mean_of_squares", [("slice_last", 4, 1, 4)]),
    (5, 5, "sum_over_numel", [("einsum", 3, 3, 2)]),
    (3, 3, "sum_over_numel", [("share", 4, 4, 4), ("share", 3, 4, 0)]),
    (2, 4, "sum_over_size", [("masked_select", 3, 5, 4)]),
    (4, 4, "sum_over_size", [("cdist", 1, 2, 1)]),
    (5, 5, "sum", [("shift", 2, 1, 2), ("expand_as", 1, 6, 0)]),
    (3, 3, "sum", [("share_of_ones_like", 2, 0, 2), ("ratio_of_items", 3, 3, 4), ("expand_as", 1, 6, 1)]),
    (4, 4, "sum_over_size", [("select_by_row", 2, 6, 3)]),
    (5, 3, "sum", [("over_other_size", 1, 2, 3), ("bce", 4, 4, 2), ("exp", 2, 1, 3), ("read_number", 0, 2, 2)]),
    (3, 2, "sum", [("sum_kept", 3, 2, 1), ("ones", 0, 6, 3)]),
    (4, 4, "mean_of_squares", [("masked_select", 0, 5, 4), ("over_len", 1, 0, 2)]),
    (3, 2, "sum", [("repeat", 3, 4, 1), ("over_size", 0, 3, 1), ("exp", 0, 4, 0)]),
]


@pytest.mark.parametrize(("one", "other", "ending", "steps"), FOUND)
def test_what_chance_once_found(
    one: int, other: int, ending: str, steps: list[tuple[str, int, int, int]], net: Net
) -> None:
    """Expressions on which an earlier state of the rules was wrong."""
    assert_true(Expression(steps, ending), net, (one, other))


def verdict_on(loss: Callable[..., Tensor], *batch: Tensor, **options: int) -> Verdict:
    with BatchwiseTracker(**options) as tracker:  # type: ignore[arg-type]
        tracker.enters(batch, samples=len(batch[0]))
        value = loss(*batch)
    return tracker.verdict(value)


def test_a_refusal_names_the_operation_and_the_line(net: Net) -> None:
    verdict = judge(CASES["info_nce"][1], net, make_batch(4))
    assert verdict.judgement is MIXED
    assert "mm multiplies every sample with every other" in verdict.reason
    assert verdict.place is not None and verdict.place.file.endswith("losses.py")


def test_normalisation_and_chance_are_noted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 2))
    x, y = torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 0, 1])
    verdict = verdict_on(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert verdict.judgement is MEAN
    assert verdict.notes == {rules.SYNCHRONISE, rules.RANDOM, rules.IGNORED}
    model.eval()
    assert verdict_on(lambda x, y: F.cross_entropy(model(x), y), x, y).notes == {rules.IGNORED}


def test_mixup_is_a_mean_that_pairs_at_random() -> None:
    torch.manual_seed(0)  # one order of four in 24 pairs nothing
    model = nn.Linear(4, 3)

    def mixup(x: Tensor, y: Tensor) -> Tensor:
        order = torch.randperm(x.size(0))
        out = model(0.7 * x + 0.3 * x[order])
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[order])

    verdict = verdict_on(mixup, torch.randn(4, 4), torch.tensor([0, 1, 2, 1]))
    assert verdict.judgement is MEAN
    assert rules.PAIRS in verdict.notes


def test_a_number_that_may_be_a_size_is_ambiguous(net: Net) -> None:
    def by(divisor: float) -> Callable[[Net, Batch], Tensor]:
        return lambda net, b: nll(net, b).sum() / divisor

    batch = make_batch(4)
    assert judge(by(4), net, batch).judgement is AMBIGUOUS  # the rank's samples, or four of something?
    assert judge(by(7), net, batch).judgement is AMBIGUOUS  # a constant, or a count of ours plus three?
    assert judge(by(8), net, batch, total=8).judgement is SUM  # the whole batch's samples
    assert judge(by(2.5), net, batch).judgement is AMBIGUOUS  # a constant, or a number made of one that was read?
    assert judge(lambda net, b: nll(net, b).sum() / 2.5, net, batch).judgement is SUM


def test_a_generator_s_noise_counts_as_samples() -> None:
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)

    def critics(x: Tensor) -> Tensor:
        fake = generator(torch.randn(len(x), 2)).detach()
        loss: Tensor = critic(fake).mean() - critic(x).mean()
        return loss

    assert verdict_on(critics, torch.randn(6, 4)).judgement is MEAN
    verdict = verdict_on(lambda x: -critic(generator(torch.randn(x.size(0), 2))).sum(), torch.randn(6, 4))
    assert verdict.judgement is SUM
    assert verdict.notes == {rules.RANDOM}


def test_values_from_python_are_not_trusted() -> None:
    model = nn.Linear(3, 1)
    rewards = [1.0, 0.5, 2.0, 0.1]
    verdict = verdict_on(lambda x: (model(x)[:, 0] * torch.tensor(rewards)).mean(), torch.randn(4, 3))
    assert verdict.judgement is UNKNOWN
    scaled = verdict_on(lambda x: model(x).mean() * x.std().item(), torch.randn(4, 3))
    assert scaled.judgement is MIXED


def test_gradients_taken_on_the_way_are_not_followed() -> None:
    model = nn.Linear(3, 1)

    def loss(x: Tensor) -> Tensor:
        value = model(x).mean()
        (slope,) = torch.autograd.grad(value, [model.weight], retain_graph=True)
        quotient: Tensor = value / slope.norm()
        return quotient

    assert verdict_on(loss, torch.randn(4, 3)).judgement is UNKNOWN


def test_an_optimizer_s_step_leaves_parameters_the_same() -> None:
    critic, generator = nn.Linear(4, 1), nn.Linear(2, 4)
    optimizer = torch.optim.Adam(critic.parameters())

    def step(x: Tensor) -> Tensor:
        critic(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss: Tensor = -critic(generator(x[:, :2])).mean()
        return loss

    assert verdict_on(step, torch.randn(4, 4)).judgement is MEAN


def test_a_batch_may_be_a_mapping_with_other_things() -> None:
    model = nn.Linear(3, 2)
    with BatchwiseTracker() as tracker:
        x, y, lengths = torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), torch.ones(9)
        tracker.enters({"x": x, "names": list("abcd"), "y": [y], "lengths": lengths}, samples=4)
        good = F.cross_entropy(model(x), y)
        other = good * lengths.mean()
    assert tracker.verdict(good).judgement is MEAN
    assert tracker.verdict(other).judgement is UNKNOWN


def test_one_sample_tells_little() -> None:
    verdict = verdict_on(lambda x: x.pow(2).mean(), torch.randn(1, 3, requires_grad=True))
    assert rules.ONE_SAMPLE in verdict.notes


def test_nothing_is_followed_after_the_block() -> None:
    with BatchwiseTracker() as tracker:
        x = torch.randn(4, 3)
        tracker.enters(x, samples=4)
    assert tracker.verdict(x.mean()).judgement is Judgement.SAME


def test_training_is_left_as_it_is() -> None:
    """The step under the tracker gives bit for bit what it gives without."""

    def train() -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    with BatchwiseTracker() as tracker:
        tracker.enters(torch.randn(6, 2), samples=6)
        followed = train()
    assert torch.equal(followed, train())
