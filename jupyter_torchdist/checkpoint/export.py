"""``td.export``: a model's weights as one safetensors file, which Hugging Face's libraries and many others read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from ..protocol.errors import CheckpointError
from . import saving
from .loading import open_latest
from .optimizer_states import empty
from .rank_agreement import all_ranks
from .structures import Slot


def export(source: str | os.PathLike[str] | nn.Module, file: str | os.PathLike[str], name: str = "model") -> Path:
    """Write the full weights of a model, or of the model called ``name`` in a checkpoint, to one file.

    Every rank must call it. Rank 0 writes, and holds one full copy meanwhile. The names are the names in the plain
    model; tied weights are written under each of their names. The file appears by one rename. Returns its path.
    Raises ``CheckpointError``: no safetensors library, no such model in the checkpoint, a file that cannot be written.
    """
    saving.wait()
    ranks = all_ranks()
    target = Path(file).absolute()
    ranks.by_first(_library)
    weights = _of_model(source, ranks.first) if isinstance(source, nn.Module) else _of_checkpoint(Path(source), name)
    return ranks.by_first(lambda: _write(weights, target))


def _library() -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise CheckpointError("td.export writes with the safetensors library", "pip install safetensors") from error


def _of_model(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """The full weights, gathered tensor by tensor. A rank without ``keep`` holds only one full tensor at a time."""
    weights: dict[str, torch.Tensor] = {}
    for name, value in get_model_state_dict(model).items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep and isinstance(whole, torch.Tensor):
            weights[name] = whole.detach().cpu()
    return weights


def _of_checkpoint(directory: Path, name: str) -> dict[str, torch.Tensor]:
    opened = open_latest(directory, "there is no checkpoint in {}")
    assert opened is not None
    if opened.content.kinds.get(name) != "model":
        models = [one for one, kind in opened.content.kinds.items() if kind == "model"]
        raise CheckpointError(
            f"{opened.path} has no model called {name!r}; it has {', '.join(models) or 'none'}",
            f"td.export(directory, file, name={(models or ['model'])[0]!r})",
        )
    skeleton: dict[str, Any] = opened.content.objects[name]
    sizes = opened.source.sizes()
    slots = {key: slot for key, slot in skeleton.items() if isinstance(slot, Slot)}
    weights = {key: empty(sizes, slot) for key, slot in slots.items()} if opened.ranks.first else {}
    opened.source.fill({slots[key].name: tensor for key, tensor in weights.items()}, opened.ranks)
    return weights


def _write(weights: dict[str, torch.Tensor], target: Path) -> Path:
    from safetensors.torch import save_file

    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(_apart(weights.items()), aside, metadata={"format": "pt"})
        aside.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror or error}", "free some space, or export to another directory"
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    return target


def _apart(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copy tensors that share memory or are not contiguous, because safetensors refuses them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in weights:
        place = tensor.untyped_storage().data_ptr()
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        result[name] = tensor.contiguous() if whole and place not in seen else tensor.clone().contiguous()
        seen.add(place)
    return result
