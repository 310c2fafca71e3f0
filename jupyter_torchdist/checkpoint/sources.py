"""A checkpoint to read, of any origin: skeletons of its objects, and its tensors."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from ..protocol.errors import CheckpointError
from .directory import MANIFEST, Manifest
from .optimizer_states import Sizes
from .rank_agreement import Ranks
from .saving import STATE, in_words
from .staging import FLAT
from .structures import Slot


@dataclass
class Content:
    """The content of a checkpoint without its tensors."""

    step: int | None
    kinds: dict[str, str]
    """Kinds of the objects, by name."""
    objects: dict[str, Any]
    """Skeletons of the objects that the ranks share, by name."""
    own: list[dict[str, Any]] = field(default_factory=list)
    """State of each rank alone: random states, positions, generators."""
    notes: list[str] = field(default_factory=list)


class Source(Protocol):
    path: Path

    def content(self) -> Content: ...

    def sizes(self) -> Sizes: ...

    def fill(self, targets: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
        """Read into ``targets``. All ranks must call it, each with its own targets."""
        ...


class Sharded:
    """A directory of torch.distributed.checkpoint. Raises ``CheckpointError`` when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata = self._read_metadata()
        self._see_that_files_are_whole()

    def sizes(self) -> Sizes:
        return {
            name: (entry.size, entry.properties.dtype)
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def fill(self, targets: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
        self._load(dict(targets), ranks.group)

    def values(self, names: list[str]) -> dict[str, Any]:
        """Pickled objects, read by this rank alone."""
        wanted: dict[str, Any] = dict.fromkeys(names)
        self._load(wanted, None, alone=True)
        return wanted

    def pickled(self) -> list[str]:
        """Names of everything that is not a tensor."""
        return [name for name in self.metadata.state_dict_metadata if name not in self.sizes()]

    def _load(self, wanted: dict[str, Any], group: Any, alone: bool = False) -> None:
        reader = FileSystemReader(self.path)
        try:
            load({FLAT: wanted}, storage_reader=reader, planner=_Planner(), process_group=group, no_dist=alone)
        except (CheckpointException, RuntimeError, ValueError, OSError, pickle.UnpicklingError, ImportError) as error:
            raise in_words(error, f"reading {self.path}") from error

    def _read_metadata(self) -> Metadata:
        try:
            return FileSystemReader(self.path).read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.path} is not complete: it has no .metadata",
                "load an earlier checkpoint: this one was not saved to its end",
            ) from error
        except Exception as error:
            raise CheckpointError(
                f"{self.path} cannot be read by torch {torch.__version__}{_written_by(self.path)}: "
                f"{type(error).__name__}: {error}",
                "load it with the version of torch that saved it, and export it there: td.export(directory, file)",
            ) from error

    def _see_that_files_are_whole(self) -> None:
        ends: dict[str, int] = {}
        for entry in (self.metadata.storage_data or {}).values():
            ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
        for name, end in ends.items():
            file = self.path / name
            size = file.stat().st_size if file.exists() else -1
            if size < end:
                state = "is missing" if size < 0 else f"has {size:,} of {end:,} bytes"
                raise CheckpointError(
                    f"{self.path} is damaged: {name} {state}", "load an earlier one: td.load(directory / 'step-…', …)"
                )


class _Planner(DefaultLoadPlanner):
    """Plans over a flat dictionary, below ``FLAT``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[FLAT], metadata, is_coordinator)


def _written_by(path: Path) -> str:
    if not (path / MANIFEST).exists():
        return ""
    return f" (torch {Manifest.read(path).torch} saved it)"


class Native(Sharded):
    """A checkpoint of this package."""

    def __init__(self, path: Path) -> None:
        self.manifest = Manifest.read(path)
        super().__init__(path)

    def content(self) -> Content:
        manifest = self.manifest
        state = self.values([STATE])[STATE]
        content = Content(manifest.step, manifest.objects, state["objects"], state["own"])
        if manifest.torch != torch.__version__:
            content.notes.append(f"saved by torch {manifest.torch}, loaded by torch {torch.__version__}")
        if manifest.not_finite:
            content.notes.append(f"it was saved with NaN or infinity in {manifest.not_finite[0]}")
        return content


class Whole:
    """A checkpoint with full tensors in files: every rank reads its part of each tensor."""

    def __init__(self, path: Path, content: Content, tensors: Mapping[str, torch.Tensor]) -> None:
        self.path, self._content, self._tensors = path, content, tensors

    def content(self) -> Content:
        return self._content

    def sizes(self) -> Sizes:
        return {name: (tensor.size(), tensor.dtype) for name, tensor in self._tensors.items()}

    def fill(self, targets: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
        for name, target in targets.items():
            _take_part(target.detach(), self._tensors[name])


def _take_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    local = target.to_local()
    for chunk in target.__create_chunk_list__():
        for dimension, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            whole = whole.narrow(dimension, start, size)
    local.copy_(whole)


def nested(source: Sharded, values: Mapping[str, Any]) -> dict[str, Any]:
    """The structure that was given to torch.distributed.checkpoint, with slots instead of its tensors."""
    paths = source.metadata.planner_data or {}
    result: dict[str, Any] = {}
    for name in source.metadata.state_dict_metadata:
        leaf = values[name] if name in values else Slot(name)
        _place(result, paths.get(name, (name,)), leaf)
    return {key: _with_lists(value) for key, value in result.items()}


def _place(tree: dict[Any, Any], path: tuple[Any, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _with_lists(tree: Any) -> Any:
    """Turn dictionaries with the keys 0, 1, 2, … back into lists."""
    if not isinstance(tree, dict):
        return tree
    items = {key: _with_lists(value) for key, value in tree.items()}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items
