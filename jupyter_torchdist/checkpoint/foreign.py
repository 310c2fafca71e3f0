"""Reads checkpoints of accelerate, Hugging Face's Trainer, torchtitan, Lightning and Fabric like our own.

accelerate (``Accelerator.save_state``, its ``checkpointing.py`` and ``utils/fsdp_utils.py``): ``model.safetensors`` or
``pytorch_model.bin``, ``optimizer.bin``, ``scheduler.bin``, ``random_states_0.pkl``. With FSDP: the directories
``pytorch_model_fsdp_0/`` and ``optimizer_0/`` of torch.distributed.checkpoint.
Trainer (``transformers/trainer.py``): directories ``checkpoint-N/`` like accelerate's, with ``optimizer.pt``,
``scheduler.pt``, ``rng_state_0.pth`` and the step in ``trainer_state.json``.
Lightning and Fabric: one file, see ``torch_files.py``.
torchtitan (``components/checkpoint.py``): one directory ``step-N/`` of torch.distributed.checkpoint, with the model
under ``model`` or at the root, a flattened optimizer, ``lr_scheduler`` and ``train_state``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..protocol.errors import CheckpointError
from . import torch_files
from .optimizer_states import Sizes, by_place
from .rank_agreement import Ranks
from .sources import Content, Sharded, Source, Whole, nested
from .structures import Slot, apart, mapped

_STEP = re.compile(r"step-(\d+)")
_OF_TRAINERS = re.compile(r"checkpoint[-_](\d+)")
_METADATA = ".metadata"


def find(directory: Path) -> Source | None:
    """The checkpoint of another library in ``directory`` (the highest step), or None. It may also be a file."""
    if directory.is_file():
        return torch_files.read(directory, _torch_load)
    if (directory / _METADATA).exists():
        return _torchtitan(directory)
    steps = {int(match[1]): path for path in _entries(directory) if (match := _STEP.fullmatch(path.name))}
    steps = {step: path for step, path in steps.items() if (path / _METADATA).exists()}
    if steps:
        return _torchtitan(steps[max(steps)])
    if (directory / "pytorch_model_fsdp_0" / _METADATA).exists():
        return _AccelerateSharded(directory)
    if any(directory.glob("model*.safetensors")) or any(directory.glob("pytorch_model*.bin")):
        return _accelerate(directory)
    numbered = {int(match[1]): path for path in _entries(directory) if (match := _OF_TRAINERS.fullmatch(path.name))}
    for number in sorted(numbered, reverse=True):
        if (source := find(numbered[number])) is not None:
            return source
    files = sorted(directory.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    return find(files[-1]) if files else None


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, memory-mapped. Raises ``CheckpointError`` without the library."""
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(f"{file.name} needs the safetensors library", "pip install safetensors") from error
    return load_file(file)


def _accelerate(directory: Path) -> Source:
    tensors: dict[str, torch.Tensor] = {}
    content = Content(None, {}, {})
    for number in range(_count(directory)):
        label, suffix = ("model", "") if number == 0 else (f"model_{number}", f"_{number}")
        state = _weights(directory, suffix)
        tensors |= {f"{label}.{name}": tensor for name, tensor in state.items()}
        _add(content, label, "model", {name: Slot(f"{label}.{name}") for name in state})
    for file in sorted([*directory.glob("optimizer*.bin"), *directory.glob("optimizer.pt")]):
        state = _torch_load(file)
        _add(content, file.stem, "optimizer", apart(by_place(state), file.stem, tensors))
    _add_small(content, directory)
    return Whole(directory, content, tensors)


def _count(directory: Path) -> int:
    """Number of models in the directory: ``model.safetensors``, ``model_1.safetensors``, …"""
    count = 1
    while (directory / f"model_{count}.safetensors").exists() or (directory / f"pytorch_model_{count}.bin").exists():
        count += 1
    return count


def _weights(directory: Path, suffix: str) -> dict[str, torch.Tensor]:
    for stem, ending in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = directory / f"{stem}{suffix}.{ending}.index.json"
        whole = directory / f"{stem}{suffix}.{ending}"
        files = [whole] if whole.exists() else []
        if index.exists():
            files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if files:
            read = read_safetensors if ending == "safetensors" else _torch_load
            return {name: tensor for file in files for name, tensor in read(file).items()}
    raise CheckpointError(
        f"{directory} has no weights of a model{suffix.replace('_', ' ')}",
        "give the directory that holds model.safetensors or pytorch_model.bin",
    )


def _torch_load(file: Path) -> Any:
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=False, mmap=True)
        except RuntimeError:  # the file format of torch before 1.6 cannot be memory-mapped
            return torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read: {type(error).__name__}: {error}", "copy it again, or load another checkpoint"
        ) from error


def _add(content: Content, label: str, kind: str, skeleton: Any) -> None:
    content.kinds[label], content.objects[label] = kind, skeleton


def _add_small(content: Content, directory: Path) -> None:
    for file in sorted([*directory.glob("scheduler*.bin"), *directory.glob("scheduler.pt")]):
        _add(content, file.stem, "scheduler", _torch_load(file))
    if (scaler := directory / "scaler.pt").exists():
        _add(content, "gradscaler", "stateful", _torch_load(scaler))
    files = {int(file.stem.rpartition("_")[2]): file for file in directory.glob("random_states_*.pkl")}
    for rank in sorted(files):
        states = _torch_load(files[rank])
        content.step = states.get("step", content.step)
        random = {"python": states["random_state"], "torch": states["torch_manual_seed"]}
        if "numpy_random_seed" in states:
            random["numpy"] = states["numpy_random_seed"]
        content.own.append({"random": random})
    if (state := directory / "trainer_state.json").exists():
        content.step = json.loads(state.read_text())["global_step"]
    for file in sorted(directory.glob("rng_state*.pth"), key=lambda file: (len(file.name), file.name)):
        states = _torch_load(file)
        content.own.append({"random": {"python": states["python"], "torch": states["cpu"], "numpy": states["numpy"]}})


class _AccelerateSharded:
    """accelerate with FSDP and sharded state: one directory per model and optimizer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts: dict[str, Sharded] = {}
        self._content = Content(None, {}, {})
        for directory in sorted([*path.glob("pytorch_model_fsdp_*"), *path.glob("optimizer_*")]):
            if not directory.is_dir():
                continue
            kind = "optimizer" if directory.name.startswith("optimizer") else "model"
            number = int(directory.name.rpartition("_")[2])
            label = kind if number == 0 else f"{kind}_{number}"
            self._parts[label] = part = Sharded(directory)
            tree = nested(part, part.values(part.pickled()))[kind]
            skeleton = by_place(tree) if kind == "optimizer" else tree
            _add(self._content, label, kind, mapped(skeleton, partial(_below, label)))
        _add_small(self._content, path)

    def content(self) -> Content:
        return self._content

    def sizes(self) -> Sizes:
        return {f"{label}/{name}": size for label, part in self._parts.items() for name, size in part.sizes().items()}

    def fill(self, targets: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
        for label, part in self._parts.items():
            begin = f"{label}/"
            own = {name.removeprefix(begin): target for name, target in targets.items() if name.startswith(begin)}
            if any(ranks.gather(bool(own))):
                part.fill(own, ranks)


def _below(label: str, slot: Slot) -> Slot:
    return Slot(f"{label}/{slot.name}")


class _Torchtitan(Sharded):
    _ROOMS = ("optimizer", "lr_scheduler", "train_state", "dataloader")

    def content(self) -> Content:
        tree = nested(self, self.values(self.pickled()))
        content = Content(self._step(), {}, {})
        model = tree.get("model") or {name: leaf for name, leaf in tree.items() if name not in self._ROOMS}
        _add(content, "model", "model", model)
        if "optimizer" in tree:
            _add(content, "optimizer", "optimizer", _unflattened(tree["optimizer"], model))
        if "lr_scheduler" in tree:
            _add(content, "scheduler", "scheduler", tree["lr_scheduler"])
        content.notes.append("torchtitan's random numbers and the position of its loader are not taken over")
        return content

    def _step(self) -> int | None:
        match = _STEP.fullmatch(self.path.name)
        return int(match[1]) if match else None


def _torchtitan(path: Path) -> Source:
    return _Torchtitan(path)


def _unflattened(flat: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """``state.<parameter>.<entry>`` and ``param_groups.<parameter>.<option>`` in our form: one group per parameter."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    known = set(names)
    for key, leaf in flat.items():
        room, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        if name not in known:
            raise CheckpointError(
                f"torchtitan's optimizer has {key}, which belongs to no parameter of its model",
                "load a checkpoint that was saved as a whole",
            )
        (state if room == "state" else options).setdefault(f"model.{name}", {})[entry] = leaf
    return {"state": state, "groups": [{**own, "params": [name]} for name, own in options.items()]}
