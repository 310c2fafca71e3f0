"""Transformers models, made from a configuration, under tensor and context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from jupyter_torchdist.strategies.parallel import tensor

from .ranks import SAID, context, refusal
from .unchanged import WORLD, equal

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def llama(**changed: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changed}))


def qwen() -> nn.Module:
    """Its queries and keys are normalised head by head."""
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4))


def cell(build: Callable[[], nn.Module] = llama) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    torch.manual_seed(5)
    model: Any = build()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for words in torch.randint(12, (3, 4, 8)):
        optimizer.zero_grad()
        logits = model(input_ids=words).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def check_a_model_with_a_plan_of_its_own() -> None:
    equal(context({"tp": WORLD()}, tp_plan="auto"), cell)
    equal(context({"tp": WORLD()}), lambda: cell(qwen))
    model = llama()
    tensor.apply(model, context({"tp": WORLD()}))
    weight = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    assert isinstance(weight, DTensor) and weight.to_local().shape == (8 // WORLD(), 16)


def check_its_batches_are_divided() -> None:
    for degrees in ({"dp_replicate": WORLD()}, {"dp_shard": WORLD()}):
        SAID.clear()
        equal(context(degrees), cell)
        assert "each computes its part of every batch" in SAID[0], SAID


def check_its_sequences_are_divided() -> None:
    equal(context({"cp": WORLD()}), cell)


def check_what_cannot_be_split_is_refused() -> None:
    how = context({"tp": WORLD()})
    assert "num_key_value_heads=1" in refusal(lambda: tensor.check(llama(num_key_value_heads=1), how))
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=12, n_positions=8))
    assert "finds nothing to split in GPT2LMHeadModel" in refusal(lambda: tensor.check(gpt2, how))
