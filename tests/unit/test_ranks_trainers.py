"""What trainers of other libraries are told of a job, without them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from jupyter_torchdist.protocol.strategy import StrategyPlan
from jupyter_torchdist.ranks.trainers.accelerate import tell_strategy, told
from jupyter_torchdist.ranks.trainers.base import TrainerRank


def rank(**given: Any) -> tuple[TrainerRank, list[Any]]:
    """A rank, and what it drew and said."""
    seen: list[Any] = []
    made = TrainerRank(0, 2, 2, 1, True, lambda values, step: seen.append((values, step)), seen.append, **given)
    return made, seen


def test_a_strategy_in_accelerates_words() -> None:
    assert told(StrategyPlan(), on_cpu=True) == {}
    for name in ("tp", "hsdp", "fsdp+tp", "deepspeed"):
        assert told(StrategyPlan(name), on_cpu=True) == {}
    plan = StrategyPlan("ddp", precision="bf16", grad_accumulation=4, compile=True)
    assert told(plan, on_cpu=True) == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    }
    options = {"transformer_layer_cls_to_wrap": ("A", "B"), "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    plan = StrategyPlan("fsdp", options={**options, "cpu_offload": True, "reshard_after_forward": False})
    words = told(plan, on_cpu=False)
    assert words["ACCELERATE_USE_FSDP"] == "true" and words["FSDP_VERSION"] == "2"
    assert words["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "A,B" and words["FSDP_OFFLOAD_PARAMS"] == "true"
    assert words["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    assert told(plan, on_cpu=True)["FSDP_OFFLOAD_PARAMS"] == "false"


def test_a_strategy_is_handed_over_once_and_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    monkeypatch.setattr(os, "environ", environ)
    made, said = rank(strategy=StrategyPlan("fsdp", precision="bf16"))
    tell_strategy(made)
    tell_strategy(made)
    assert said == ["accelerate trains by itself; --strategy fsdp was handed to it: FSDP2"]
    assert environ["ACCELERATE_MIXED_PRECISION"] == "fp16" and environ["ACCELERATE_USE_FSDP"] == "true"


def test_numbers_are_drawn_and_texts_are_not() -> None:
    made, seen = rank()
    made.draw({"loss": torch.tensor(2.0), "note": "x", "table": [1], "steps": 3, "many": torch.ones(2)}, 7)
    made.draw({"note": "x"})
    assert seen == [({"loss": torch.tensor(2.0), "steps": 3}, 7)]
