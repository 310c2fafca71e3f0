"""``td.load``: load a checkpoint into existing objects, whatever the world size and strategy at saving were."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..protocol.errors import CheckpointError
from . import directory as directories
from . import foreign, position, randomness, saving
from . import objects as kinds
from .rank_agreement import Ranks, all_ranks
from .sources import Content, Native, Source


def load(directory: str | os.PathLike[str], *objects: Any, **named: Any) -> dict[str, Any]:
    """Load a checkpoint into ``objects``: ``directory`` itself, or the newest complete checkpoint in it.

    Every rank must call it with the objects of ``td.save``, or some of them, under the same names. Modules and
    optimizers are filled in place. They may be sharded differently than at saving, on any number of ranks. The random
    number generators are set. The next loop over a ``DataLoader`` continues after the last batch that was seen.
    Returns ``step`` and every value that was saved by keyword. A keyword value given here is the default if it was
    not saved: ``epoch = td.load(directory, model, epoch=0)["epoch"]``.

    Also reads checkpoints of accelerate, Hugging Face's Trainer, torchtitan, Lightning and Fabric; ``directory`` may be
    a file of ``torch.save``. Reading uses pickle: load only files that you trust. Raises ``CheckpointError`` on all
    ranks before any change: no or a damaged checkpoint, another model, an unknown name.
    """
    opened = open_latest(Path(directory), "there is no checkpoint in {}")
    assert opened is not None
    wanted = kinds.named(objects, named)
    result = opened.restore({name: value for name, value in wanted.items() if kinds.kind_of(value) != "value"})
    for name, value in wanted.items():
        if kinds.kind_of(value) == "value":
            result.setdefault(name, value)
        elif isinstance(value, torch.utils.data.DataLoader) and name in opened.own:
            position.follow(value).go_to(opened.own[name], epochs=False)
    opened.restore_random()
    for note in opened.notes:
        if opened.ranks.first:
            saving.say(f"{opened.path}: {note}")
    return result


@dataclass
class Opened:
    """A checkpoint whose content is read, except its tensors."""

    path: Path
    source: Source
    content: Content
    ranks: Ranks
    own: dict[str, Any]
    """State of this rank alone; a rank that was not there at saving takes it from another rank."""
    notes: list[str]

    @property
    def step(self) -> int | None:
        return self.content.step

    def restore(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Fill ``objects`` by name. Returns the step and the values. Does not set loaders and random states."""

        def begin() -> kinds.Restoring:
            _see_that_all_are_there(objects, self)
            return kinds.Restoring(objects, self._skeletons(objects), self.source.sizes(), str(self.path))

        begun: list[kinds.Restoring] = []
        self.ranks.together(lambda: begun.append(begin()))
        restoring = begun[0]
        self.source.fill(restoring.targets, self.ranks)
        self.ranks.together(restoring.finish)
        for name, value in objects.items():
            if isinstance(value, torch.Generator):
                value.set_state(self.own[name])
        return {"step": self.step, **restoring.values}

    def restore_random(self) -> None:
        if "random" in self.own:
            randomness.restore(self.own["random"])

    def _skeletons(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """The skeletons of the requested objects, and of all plain values."""
        return {
            name: skeleton
            for name, skeleton in self.content.objects.items()
            if name in objects or self.content.kinds[name] == "value"
        }


def open_latest(directory: Path, nothing: str, since: float = 0.0) -> Opened | None:
    """Open the checkpoint that ``load`` would choose, the same on all ranks. If there is none: returns None if
    ``nothing`` is empty, else raises ``CheckpointError`` with this message. ``since``: there is none that was complete
    before this time, in seconds since the epoch."""
    saving.wait()
    ranks = all_ranks()
    directory = directory.absolute()
    path = ranks.by_first(lambda: _choose(directory, nothing, since))
    if path is None:
        return None
    opened: list[Opened] = []
    ranks.together(lambda: opened.append(_open(path, directory, ranks)))
    return opened[0]


def _choose(directory: Path, nothing: str, since: float) -> Path | None:
    if since:  # of this package alone
        path = directories.latest(directory)
        return path if path and (path / directories.MANIFEST).stat().st_mtime >= since else None
    if (directory / directories.MANIFEST).exists():
        return directory
    if (path := directories.latest(directory)) is not None:
        return path
    if (source := foreign.find(directory)) is not None:
        return source.path
    if not nothing:
        return None
    message = nothing.format(directory)
    if not directory.exists():
        raise CheckpointError(message, "the directory does not exist; checkpoints are saved by td.save or --checkpoint")
    unfinished = [entry.name for entry in directory.iterdir() if entry.name.endswith(".saving")]
    if unfinished:
        raise CheckpointError(message, f"{unfinished[0]} was begun and never completed: it cannot be loaded")
    raise CheckpointError(message, "a complete one is a directory step-000100, of this package or of torchtitan")


def _open(path: Path, directory: Path, ranks: Ranks) -> Opened:
    source: Source | None = Native(path) if (path / directories.MANIFEST).exists() else foreign.find(path)
    assert source is not None, path
    content = source.content()
    if isinstance(source, Native):
        saving.writer(directory if path != directory else path.parent).loaded = content.step
    own, notes = _share_of(content, ranks)
    return Opened(path, source, content, ranks, own, [*content.notes, *notes])


def _share_of(content: Content, ranks: Ranks) -> tuple[dict[str, Any], list[str]]:
    """The state of this rank alone, and notes about it."""
    if not content.own:
        return {}, []
    states = [one["random"] for one in content.own]
    own = dict(content.own[min(ranks.number, len(states) - 1)])
    own["random"], _ = randomness.of_rank(states, ranks.number, ranks.size)
    _, note = randomness.of_rank(states, ranks.size - 1, ranks.size)
    return own, [note] if note else []


def _see_that_all_are_there(objects: Mapping[str, Any], opened: Opened) -> None:
    there = {**opened.content.kinds, **{name: "own" for name in opened.own if name != "random"}}
    for name, value in objects.items():
        kind = kinds.kind_of(value)
        if kind == "loader" and name not in there:
            opened.notes.append(f"it has no position for {name}: the loop starts at its first batch")
            continue
        if name not in there or (kind not in kinds.OWN and there[name] != kind):
            names = ", ".join(f"{one} ({what})" for one, what in opened.content.kinds.items()) or "nothing"
            raise CheckpointError(
                f"{opened.path} has no {kind} called {name!r}; it has {names}",
                "give the objects the names that they had when they were saved: td.load(directory, name=object)",
            )
