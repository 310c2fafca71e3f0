"""Little losses as notebooks write them, and the truth about each by splitting a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jupyter_torchdist.strategies.analysis.batchwise import BatchwiseTracker
from jupyter_torchdist.strategies.analysis.verdicts import Judgement, Verdict

MEAN, SUM, RATIO = Judgement.MEAN, Judgement.SUM, Judgement.RATIO
SAME, MIXED, AMBIGUOUS, UNKNOWN = Judgement.SAME, Judgement.MIXED, Judgement.AMBIGUOUS, Judgement.UNKNOWN


class Net(nn.Module):
    """Parameters of many shapes; each loss uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(4, 5)
        self.back = nn.Linear(5, 4)
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.group = nn.GroupNorm(1, 5)
        self.instance = nn.InstanceNorm2d(5, affine=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(4, 5, batch_first=True, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(4, 5)
        self.cell = nn.LSTMCell(4, 5)
        self.bilinear = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)  # type: ignore[no-any-return]


@dataclass
class Batch:
    """``n`` samples of every kind of input."""

    x: Tensor
    t: Tensor
    y: Tensor
    w: Tensor
    sequence: Tensor
    mask: Tensor
    tokens: Tensor
    labels: Tensor
    image: Tensor
    sign: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def part(self, first: int, last: int) -> Batch:
        return Batch(*(getattr(self, name)[first:last].clone() for name in self.__dataclass_fields__))


def make_batch(n: int, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(n, 6, generator=g) < 0.6
    mask[:, 0] = True
    labels = torch.randint(0, 5, (n, 6), generator=g).masked_fill(~mask, -100)
    return Batch(
        x=torch.randn(n, 4, generator=g, dtype=torch.float64),
        t=torch.randn(n, 5, generator=g, dtype=torch.float64),
        y=torch.randint(0, 5, (n,), generator=g),
        w=torch.rand(n, generator=g, dtype=torch.float64) + 0.1,
        sequence=torch.randn(n, 6, 4, generator=g, dtype=torch.float64),
        mask=mask,
        tokens=torch.randint(0, 7, (n, 6), generator=g),
        labels=labels,
        image=torch.randn(n, 3, 6, 6, generator=g, dtype=torch.float64),
        sign=torch.randint(0, 2, (n,), generator=g) * 2.0 - 1,
    )


def make_net() -> Net:
    torch.manual_seed(1)
    return Net().double()


Loss = Callable[[Net, Batch], Tensor]


def judge(loss: Loss, net: Net, batch: Batch, total: int | None = None) -> Verdict:
    with BatchwiseTracker(total=total) as tracker:
        tracker.enters(batch, samples=len(batch))
        value = loss(net, batch)
    return tracker.verdict(value)


def gradient(loss: Loss, net: Net, batch: Batch) -> Tensor:
    """Value and gradients of a loss, in one vector."""
    value = loss(net, batch)
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(value, parameters, allow_unused=True) if value.requires_grad else [None]
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=False)]
    return torch.cat([value.detach().double().reshape(1), *(part.reshape(-1) for part in parts)])


def combined(verdicts: list[Verdict], parts: list[Tensor]) -> Tensor:
    """One device's gradient from the ranks', as the verdicts say."""
    judgements = {verdict.judgement for verdict in verdicts}
    assert len(judgements) == 1, verdicts
    (judgement,) = judgements
    if judgement is SUM:
        return torch.stack(parts).sum(0)
    if judgement is SAME:
        return parts[0]
    weights = torch.tensor([float(verdict.weight or 0) for verdict in verdicts], dtype=torch.float64)
    counted = [
        part * weight for part, weight in zip(parts, weights, strict=True) if weight
    ]  # else NaN: it chose nothing
    return torch.stack(counted).sum(0) / weights.sum()


# ---------------------------------------------------------------------------------------------------- the losses

CASES: dict[str, tuple[Judgement, Loss]] = {}


def case(expected: Judgement) -> Callable[[Loss], Loss]:
    def add(loss: Loss) -> Loss:
        name = getattr(loss, "__name__", "")
        assert name not in CASES
        CASES[name] = (expected, loss)
        return loss

    return add


def cases(expected: Judgement, **losses: Loss) -> None:
    for name, loss in losses.items():
        assert name not in CASES
        CASES[name] = (expected, loss)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def nll(net: Net, b: Batch) -> Tensor:
    """A loss for each sample."""
    return F.cross_entropy(net(b.x), b.y, reduction="none")


cases(
    MEAN,
    sorted_values=lambda net, b: nll(net, b).sort().values.mean(),
    sorted_and_back=lambda net, b: (lambda order: (nll(net, b)[order][order.argsort()] * b.t.sum(1)).mean())(
        b.t.sum(1).argsort()
    ),
    cross_entropy=lambda net, b: F.cross_entropy(net(b.x), b.y),
    cross_entropy_smoothed=lambda net, b: F.cross_entropy(net(b.x), b.y, label_smoothing=0.1),
    cross_entropy_of_probabilities=lambda net, b: F.cross_entropy(net(b.x), b.t.softmax(-1)),
    nll_then_mean=lambda net, b: nll(net, b).mean(),
    two_cross_entropies=lambda net, b: F.cross_entropy(net.a(b.x), b.y) + 0.3 * F.cross_entropy(net.b(b.x), b.y),
    cross_entropy_and_mse=lambda net, b: F.cross_entropy(net.a(b.x), b.y) + F.mse_loss(net.b(b.x), b.t),
    mse=lambda net, b: F.mse_loss(net(b.x), b.t),
    mse_by_hand=lambda net, b: ((net(b.x) - b.t) ** 2).mean(),
    mse_reshaped=lambda net, b: F.mse_loss(net(b.x).view(-1), b.t.view(-1)),
    l1=lambda net, b: F.l1_loss(net(b.x), b.t),
    smooth_l1=lambda net, b: F.smooth_l1_loss(net(b.x), b.t),
    huber=lambda net, b: F.huber_loss(net(b.x), b.t),
    bce=lambda net, b: F.binary_cross_entropy(net(b.x).sigmoid(), b.t.sigmoid()),
    bce_logits=lambda net, b: F.binary_cross_entropy_with_logits(net(b.x), b.t.sigmoid()),
    bce_pos_weight=lambda net, b: F.binary_cross_entropy_with_logits(
        net(b.x), b.t.sigmoid(), pos_weight=torch.arange(5.0)
    ),
    bce_labels=lambda net, b: F.binary_cross_entropy_with_logits(net(b.x)[:, 0], torch.ones(len(b)).double()),
    kl_batchmean=lambda net, b: F.kl_div(net(b.x).log_softmax(-1), b.t.softmax(-1), reduction="batchmean"),
    kl_mean=lambda net, b: F.kl_div(net(b.x).log_softmax(-1), b.t.softmax(-1), reduction="mean"),
    poisson=lambda net, b: F.poisson_nll_loss(net(b.x), b.t.exp()),
    gaussian=lambda net, b: F.gaussian_nll_loss(net.a(b.x), b.t, net.b(b.x).exp()),
    hinge_embedding=lambda net, b: F.hinge_embedding_loss(net(b.x)[:, 0], b.sign),
    soft_margin=lambda net, b: F.soft_margin_loss(net(b.x)[:, 0], b.sign),
    margin_ranking=lambda net, b: F.margin_ranking_loss(net.a(b.x)[:, 0], net.b(b.x)[:, 0], b.sign),
    cosine_embedding=lambda net, b: F.cosine_embedding_loss(net.a(b.x), net.b(b.x), b.sign),
    multi_margin=lambda net, b: F.multi_margin_loss(net(b.x), b.y),
    multilabel_margin=lambda net, b: F.multilabel_margin_loss(net(b.x), b.tokens[:, :5] % 5),
    multilabel_soft_margin=lambda net, b: F.multilabel_soft_margin_loss(net(b.x), (b.t > 0).double()),
    triplet=lambda net, b: F.triplet_margin_loss(net(b.x), net(b.x * 2), b.t),
    triplet_distance=lambda net, b: F.triplet_margin_with_distance_loss(net(b.x), net(b.x * 2), b.t),
    ctc=lambda net, b: F.ctc_loss(
        net(b.sequence).log_softmax(-1).transpose(0, 1),
        b.tokens[:, :2] % 4 + 1,
        torch.full((len(b),), 6),
        torch.full((len(b),), 2),
    ),
    cosine_similarity=lambda net, b: (1 - F.cosine_similarity(net.a(b.x), net.b(b.x))).mean(),
    accumulated=lambda net, b: F.cross_entropy(net(b.x), b.y) / 4,
    regularised=lambda net, b: F.mse_loss(net(b.x), b.t) + 0.01 * sum(p.pow(2).sum() for p in net.a.parameters()),
    sum_over_size=lambda net, b: F.mse_loss(net(b.x), b.t, reduction="sum") / b.x.size(0),
    sum_over_shape=lambda net, b: nll(net, b).sum() / b.x.shape[0],
    sum_over_len=lambda net, b: nll(net, b).sum() / len(b.x),
    image=lambda net, b: net.group(net.conv(b.image)).relu().mean((2, 3)).pow(2).mean(),
    pooled=lambda net, b: F.max_pool2d(net.conv(b.image), 2).flatten(1).abs().mean(),
    adaptive_pool=lambda net, b: F.adaptive_avg_pool2d(net.conv(b.image), 1).flatten(1).pow(2).mean(),
    upsampled=lambda net, b: F.interpolate(net.conv(b.image), scale_factor=2, mode="bilinear").pow(2).mean(),
    segmentation=lambda net, b: F.cross_entropy(net.conv(b.image), (b.image[:, 0] > 0).long()),
    instance_norm=lambda net, b: net.instance(net.conv(b.image)).relu().pow(2).mean(),
    layer_norm=lambda net, b: net.norm(b.sequence).pow(3).mean(),
    attention=lambda net, b: net.attention(b.sequence, b.sequence, b.sequence)[0].pow(2).mean(),
    masked_attention=lambda net, b: (
        net.attention(b.sequence, b.sequence, b.sequence, key_padding_mask=~b.mask)[0].pow(2).mean()
    ),
    causal=lambda net, b: (
        F.scaled_dot_product_attention(b.sequence, b.sequence, net.norm(b.sequence), is_causal=True).pow(2).mean()
    ),
    transformer=lambda net, b: net.block(b.sequence).pow(2).mean(),
    lstm=lambda net, b: net.lstm(b.sequence)[0][:, -1].pow(2).mean(),
    gru=lambda net, b: net.gru(b.sequence.transpose(0, 1))[1].pow(2).mean(),
    lstm_cell=lambda net, b: net.cell(b.x, (torch.zeros(len(b), 5).double(), b.t))[0].pow(2).mean(),
    bilinear=lambda net, b: net.bilinear(b.x, b.x + 1).pow(2).mean(),
    embedding=lambda net, b: net.a(net.embed(b.tokens).mean(1)).pow(2).mean(),
    picked_by_label=lambda net, b: net(b.x)[torch.arange(len(b)), b.y].mean(),
    gathered=lambda net, b: -net(b.x).log_softmax(-1).gather(1, b.y[:, None]).mean(),
    one_hot=lambda net, b: F.mse_loss(net(b.x), F.one_hot(b.y, 5).double()),
    einsum=lambda net, b: torch.einsum("btc,oc->bto", b.sequence, net.a.weight).pow(2).mean(),
    bmm=lambda net, b: torch.bmm(net.norm(b.sequence), b.sequence.transpose(1, 2)).softmax(-1).pow(2).mean(),
    sequence_first=lambda net, b: net.a(b.sequence.transpose(0, 1)).flatten(0, 1).pow(2).mean(),
    flattened_tokens=lambda net, b: F.cross_entropy(net(b.sequence).flatten(0, 1), b.tokens.flatten() % 5),
    two_views=lambda net, b: F.mse_loss(*net(torch.cat([b.x, b.x + 1])).chunk(2)),
    stacked=lambda net, b: torch.stack([net.a(b.x), net.b(b.x)], 1).pow(2).sum(1).mean(),
    where=lambda net, b: torch.where(b.t > 0, net(b.x), net(b.x) * 0.1).mean(),
    masked_in_sample=lambda net, b: (
        (net(b.sequence).pow(2).mean(-1) * b.mask).sum(1) / b.mask.sum(1).clamp(min=1)
    ).mean(),
    in_place=lambda net, b: net(b.x).mul_(2).add_(1).relu_().pow(2).mean(),
    cross_covariance_in_sample=lambda net, b: (b.sequence.transpose(1, 2) @ net.norm(b.sequence)).pow(2).mean(),
    gradient_of_input=lambda net, b: gradient_penalty(net, b),
    vmapped=lambda net, b: torch.vmap(lambda x: net.a(x).pow(2).sum())(b.x).mean(),
    checkpointed=lambda net, b: (
        torch.utils.checkpoint.checkpoint(net.block, b.sequence, use_reentrant=False).pow(2).mean()
    ),
    distillation=lambda net, b: (
        F.kl_div(F.log_softmax(net.a(b.x) / 3, -1), F.softmax(net.b(b.x).detach() / 3, -1), reduction="batchmean") * 9
    ),
    byol=lambda net, b: (2 - 2 * (unit(net.a(b.x)) * unit(net.b(b.x)).detach()).sum(-1)).mean(),
    policy_gradient=lambda net, b: -(net(b.x).log_softmax(-1)[torch.arange(len(b)), b.y] * b.w).mean(),
    ppo=lambda net, b: (
        -torch.min((net(b.x) - b.t).exp() * b.w[:, None], (net(b.x) - b.t).exp().clamp(0.8, 1.2) * b.w[:, None]).mean()
    ),
    focal=lambda net, b: (lambda ce: ((1 - (-ce).exp()) ** 2 * ce).mean())(nll(net, b)),
    vae_mean=lambda net, b: (
        F.mse_loss(net.back(net.a(b.x)), b.x)
        - 0.5 * (1 + net.b(b.x) - net.a(b.x) ** 2 - net.b(b.x).exp()).sum(1).mean()
    ),
    quantile=lambda net, b: torch.max(0.9 * (b.t - net(b.x)), -0.1 * (b.t - net(b.x))).mean(),
    dice_per_sample=lambda net, b: (lambda p, q: (1 - (2 * (p * q).sum(1) + 1) / (p.sum(1) + q.sum(1) + 1)).mean())(
        net(b.x).sigmoid(), b.t.sigmoid()
    ),
    prototypes=lambda net, b: (torch.cdist(net(b.x), torch.eye(5).double()) ** 2).mean(),
    rope=lambda net, b: net.norm(b.sequence * torch.arange(6.0).double()[:, None].cos()).pow(2).mean(),
    functional_call=lambda net, b: F.mse_loss(
        torch.func.functional_call(net, dict(net.named_parameters()), (b.x,)), b.t
    ),
    sum_of_list=lambda net, b: sum([F.mse_loss(net.a(b.x), b.t), F.l1_loss(net.b(b.x), b.t)], torch.tensor(0.0)),
    stack_of_losses=lambda net, b: torch.stack([F.mse_loss(net.a(b.x), b.t), F.l1_loss(net.b(b.x), b.t)]).sum(),
)

cases(
    SUM,
    mse_sum=lambda net, b: F.mse_loss(net(b.x), b.t, reduction="sum"),
    cross_entropy_sum=lambda net, b: F.cross_entropy(net(b.x), b.y, reduction="sum"),
    sum_of_ignored=lambda net, b: F.cross_entropy(net(b.sequence).flatten(0, 1), b.labels.flatten(), reduction="sum"),
    vae_sum=lambda net, b: (
        F.mse_loss(net.back(net.a(b.x)), b.x, reduction="sum")
        - 0.5 * torch.sum(1 + net.b(b.x) - net.a(b.x) ** 2 - net.b(b.x).exp())
    ),
    sum_over_literal=lambda net, b: nll(net, b).sum() / 100,
    inner_product=lambda net, b: torch.dot(net(b.x)[:, 0], b.w),
    matmul_over_batch=lambda net, b: (net(b.x).T @ b.t).sum(),
)

cases(
    RATIO,
    class_weights=lambda net, b: F.cross_entropy(net(b.x), b.y, weight=torch.arange(1.0, 6.0).double()),
    ignored=lambda net, b: F.cross_entropy(net(b.sequence).flatten(0, 1), b.labels.flatten()),
    ignored_transposed=lambda net, b: F.cross_entropy(net(b.sequence).transpose(1, 2), b.labels),
    ignored_smoothed=lambda net, b: F.cross_entropy(
        net(b.sequence).flatten(0, 1), b.labels.flatten(), label_smoothing=0.1
    ),
    weighted_mean=lambda net, b: (nll(net, b) * b.w).sum() / b.w.sum(),
    normalised_weights=lambda net, b: (nll(net, b) * (b.w / b.w.sum())).sum(),
    mean_over_mean=lambda net, b: (nll(net, b) * b.w).mean() / b.w.mean(),
    masked_mean=lambda net, b: (net(b.sequence).pow(2).mean(-1) * b.mask).sum() / b.mask.sum(),
    masked_mean_clamped=lambda net, b: (net(b.sequence).pow(2).mean(-1) * b.mask).sum() / b.mask.sum().clamp(min=1),
    masked_mean_eps=lambda net, b: (net(b.sequence).pow(2).mean(-1) * b.mask).sum() / (b.mask.sum() + 1e-8),
    masked_mean_item=lambda net, b: (net(b.sequence).pow(2).mean(-1) * b.mask).sum() / b.mask.sum().item(),
    selected=lambda net, b: net(b.sequence)[b.mask].pow(2).mean(),
    selected_cross_entropy=lambda net, b: F.cross_entropy(net(b.sequence)[b.mask], b.labels[b.mask]),
    masked_selected=lambda net, b: net(b.x).masked_select(b.t > 0).mean(),
    selected_by_nonzero=lambda net, b: net(b.x)[(b.w > 0.4).nonzero()[:, 0]].pow(2).mean(),
    token_count=lambda net, b: (
        F.cross_entropy(net(b.sequence).flatten(0, 1), b.labels.flatten(), reduction="sum") / (b.labels != -100).sum()
    ),
    two_masked=lambda net, b: (
        (net.a(b.sequence).mean(-1) * b.mask).sum() / b.mask.sum()
        + (net.b(b.sequence).mean(-1) * b.mask).sum() / b.mask.sum()
    ),
    loss_scaled_by_itself=lambda net, b: (lambda loss: loss / loss.detach())(nll(net, b).mean()),
    foreground=lambda net, b: net(b.x)[b.t > 0].pow(2).mean(),
)

cases(
    MIXED,
    rmse=lambda net, b: F.mse_loss(net(b.x), b.t).sqrt(),
    log_of_mean=lambda net, b: F.mse_loss(net(b.x), b.t).log(),
    gram=lambda net, b: (net(b.x) @ net(b.x).T).mean(),
    info_nce=lambda net, b: F.cross_entropy(unit(net.a(b.x)) @ unit(net.b(b.x)).T / 0.1, torch.arange(len(b))),
    simclr=lambda net, b: (lambda z: torch.logsumexp(z @ z.T, 1).mean())(unit(net(torch.cat([b.x, b.x + 1])))),
    cosine_matrix=lambda net, b: F.cosine_similarity(net(b.x)[:, None], net(b.x)[None], dim=-1).mean(),
    distances=lambda net, b: torch.cdist(net(b.x), net(b.x)).mean(),
    dice=lambda net, b: (lambda p, q: 1 - 2 * (p * q).sum() / (p.sum() + q.sum()))(net(b.x).sigmoid(), b.t.sigmoid()),
    variance=lambda net, b: net(b.x).var(0).mean(),
    deviation_by_hand=lambda net, b: ((net(b.x) - net(b.x).mean(0)) ** 2).mean(),
    largest=lambda net, b: net(b.x).max(),
    worst=lambda net, b: nll(net, b).max(),
    logsumexp=lambda net, b: net(b.x).logsumexp(0).mean(),
    softmax_over_batch=lambda net, b: (net(b.x).softmax(0) * b.t).sum(),
    hard_examples=lambda net, b: nll(net, b).topk(2).values.mean(),
    sorted_batch=lambda net, b: (nll(net, b).sort().values * torch.arange(len(b))).mean(),
    running_sum=lambda net, b: nll(net, b).cumsum(0).mean(),
    rolled=lambda net, b: (net(b.x) * net(b.x).roll(1, 0)).mean(),
    first_samples=lambda net, b: net(b.x)[:2].mean(),
    first_sample=lambda net, b: net(b.x)[0].mean(),
    numbered=lambda net, b: (net(b.x) * torch.arange(len(b))[:, None]).mean(),
    reversed_pairs=lambda net, b: F.mse_loss(net(b.x), b.t.flip(0)),
    broadcast_mistake=lambda net, b: F.mse_loss(net(b.x)[:, :1], b.w),
    centred=lambda net, b: F.mse_loss(net(b.x) / net(b.x).mean(), b.t),
    product_of_means=lambda net, b: F.mse_loss(net.a(b.x), b.t) * F.mse_loss(net.b(b.x), b.t),
    squared_mean=lambda net, b: net(b.x).mean().pow(2),
    sum_and_mean=lambda net, b: nll(net, b).sum() + nll(net, b).mean(),
    sum_and_regulariser=lambda net, b: nll(net, b).sum() + net.a.weight.pow(2).sum(),
    barlow=lambda net, b: (lambda c: (c - torch.eye(5).double()).pow(2).sum())(net.a(b.x).T @ net.b(b.x) / len(b.x)),
    mixture=lambda net, b: (
        F.mse_loss(net(b.x), b.t) + F.cross_entropy(net(b.sequence).flatten(0, 1), b.labels.flatten())
    ),
    pairs_in_halves=lambda net, b: net(b.x)[0::2].sum() * net(b.x)[1::2].sum(),
    koleo=lambda net, b: (unit(net(b.x)) @ unit(net(b.x)).T).fill_diagonal_(-1).max(1).values.mean(),
)

cases(
    AMBIGUOUS,
    over_two_views=lambda net, b: (nll(net, b) / (2 * len(b))).sum(),
    over_rows_of_two_views=lambda net, b: (nll(net, b) / len(nll(net, b).repeat(2))).sum(),
)

cases(
    SAME,
    only_weights=lambda net, b: net.a.weight.pow(2).sum(),
    only_a_constant=lambda net, b: net.norm(torch.ones(7, 4).double()).mean(),
)


def gradient_penalty(net: Net, b: Batch) -> Tensor:
    x = b.x.clone().requires_grad_()
    score = net(x).tanh().sum(-1)
    (slope,) = torch.autograd.grad(score, x, torch.ones_like(score), create_graph=True)
    penalty: Tensor = (slope.norm(2, dim=1) - 1).pow(2).mean()
    return penalty
