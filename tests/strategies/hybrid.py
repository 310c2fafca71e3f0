"""What needs four ranks: two groups that share a copy each."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader

import jupyter_torchdist as td

from . import unchanged
from .languages import LENGTH, WORDS, Language
from .models import CASES, Gpt
from .prepared import data, equal, job, sgd, train
from .ranks import context, local_bytes, mine
from .sharding import sharded, trained
from .sharding_options import gathered

HYBRID = {"dp_replicate": 2, "dp_shard": 2}


def check_two_copies_of_two_shards_each() -> None:
    for strategy, whole in (("HYBRID_SHARD", False), ("HYBRID_SHARD_ZERO2", True)):
        how = context(HYBRID, sharding_strategy=strategy)
        model = trained("tied", how)
        full = local_bytes(list(Gpt().parameters()))
        assert abs(local_bytes(list(model.parameters())) - full / 2) < 0.05 * full
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.placements == (Replicate(), Shard(0)) and parameter.device_mesh.shape == (2, 2)
        assert isinstance(model, Gpt)
        model(mine(CASES["tied"].batches(1)[0][0]))
        assert gathered(model.layers[0]) is whole


def check_prepared_it_trains_as_one_device() -> None:
    equal(context(HYBRID), lambda prepare: train(prepare, "tied", optimizer_with=sgd))
    model = CASES["tied"].model()
    with job(context(HYBRID)):
        td.prepare(model, sgd(list(model.parameters())), loader := DataLoader(data("tied", 8), 8))
        assert all(p.placements == (Replicate(), Shard(0)) for p in model.parameters() if isinstance(p, DTensor))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert [len(x) for x, _ in loader] == [2]  # all four ranks are data ranks


def check_parameters_are_kept_among_two_between_forward_and_backward() -> None:
    model: Any = Gpt(tied=False)
    sharded(model, context(reshard_after_forward=2))
    with torch.enable_grad():
        model(mine(CASES["untied"].batches(1)[0][0]))
    group = model.layers[0]._get_fsdp_state()._fsdp_param_group
    kept = group.fsdp_params[0]._sharded_post_forward_param_data
    assert kept is not None and kept.numel() == group.fsdp_params[0]._orig_size.numel() // 2


def check_beside_tp_a_model_may_be_called_twice_before_a_backward() -> None:
    def cell() -> tuple[torch.nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(3)
        model, losses = Language(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for words in torch.randint(WORDS, (3, 4, LENGTH)):
            loss = model(words).square().mean() + model(words.roll(1, 1)).sin().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model, optimizer, losses

    unchanged.equal(context({"dp_replicate": 2, "tp": 2}), cell)


def check_four_shards_train_as_one_device() -> None:
    trained("mixture", context())
