"""DeepSpeed's configuration: what its ``auto`` is filled with, and what contradicts the cell. No DeepSpeed needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jupyter_torchdist.protocol.errors import StrategyError
from jupyter_torchdist.protocol.strategy import StrategyPlan
from jupyter_torchdist.strategies.deepspeed.engine import check_installed
from jupyter_torchdist.strategies.deepspeed.values import Filled, filled


def fill(
    config: dict[str, Any],
    model: nn.Module | None = None,
    make: type[torch.optim.Optimizer] = torch.optim.AdamW,
    samples: int | None = 16,
    **plan: Any,
) -> Filled:
    model = model or nn.Linear(2, 2)
    optimizer = make(model.parameters(), lr=0.25)  # type: ignore[call-arg]
    return filled(StrategyPlan("deepspeed", {}, {"config": config}, **plan), 4, model, optimizer, samples)


def test_batches_are_those_of_the_cell() -> None:
    config = fill({"train_batch_size": "auto"}, grad_accumulation=3).config
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [config[size] for size in sizes] == [4, 3, 48]
    assert fill({}, samples=None).config["train_batch_size"] == 4
    assert fill({"train_batch_size": 16}).config["train_micro_batch_size_per_gpu"] == 4


def test_auto_is_filled_as_transformers_does() -> None:
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "overlap_comm": True}
    zero["stage3_param_persistence_threshold"] = "auto"
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(hidden_size=20)  # type: ignore[assignment]
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}}
    asked = {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "weight_decay": "auto"}},
        "scheduler": scheduler,
    }
    found = fill(asked, model, precision="bf16")
    assert found.config["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 400,
        "stage3_prefetch_bucket_size": 360,
        "stage3_param_persistence_threshold": 200,
        "overlap_comm": True,
    }
    assert (found.config["bf16"], found.config["fp16"]) == ({"enabled": True}, {"enabled": False, "loss_scale": 0})
    assert found.clipping == 0.0 and "optimizer" not in found.config and not found.remarks
    assert found.config["scheduler"]["params"] == {"warmup_min_lr": 0.0, "warmup_max_lr": 0.25}
    assert zero["reduce_bucket_size"] == "auto", "the plan stays as it was"


def test_what_cannot_be_filled_is_deepspeeds_and_said() -> None:
    found = fill({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": "auto"}})
    assert found.config["zero_optimization"] == {"stage": 2}
    assert found.remarks == (
        "DeepSpeed uses its own defaults for zero_optimization.reduce_bucket_size, zero_optimization.offload_optimizer",
    )


@pytest.mark.parametrize(
    ("config", "make", "message"),
    [
        (
            {"train_micro_batch_size_per_gpu": 8},
            torch.optim.AdamW,
            "means 8 samples for each rank, 32 on 4 ranks; .* have 16",
        ),
        ({"train_batch_size": 32}, torch.optim.AdamW, "train_batch_size means 8 samples"),
        ({"optimizer": {"type": "Adam"}}, torch.optim.SGD, "optimizer.type is Adam, the cell's optimizer SGD"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}},
            torch.optim.AdamW,
            "params.lr is 1.0, .* AdamW has 0.25",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            torch.optim.AdamW,
            "decays weights as Adam, the cell's AdamW does not",
        ),
        ({"scheduler": {"params": {"total_num_steps": "auto"}}}, torch.optim.AdamW, "total_num_steps is auto"),
    ],
)
def test_what_contradicts_the_cell_is_refused(
    config: dict[str, Any], make: type[torch.optim.Optimizer], message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        fill(config, make=make)


def test_two_schedulers_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plan = StrategyPlan("deepspeed", {}, {"config": {"scheduler": {"params": {"warmup_min_lr": 0.0}}}})
    with pytest.raises(StrategyError, match="both have a scheduler"):
        filled(plan, 2, model, optimizer, 4)


@pytest.mark.parametrize(("version", "message"), [(None, "not installed"), ("0.12.0", "DeepSpeed 0.12.0 is installed")])
def test_without_deepspeed_it_is_said_how_to_get_it(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(StrategyError, match=message) as refused:
        check_installed()
    assert "pip install" in refused.value.hint and "--strategy fsdp" in refused.value.hint
