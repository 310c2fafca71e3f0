"""``td.save``: write the state of all ranks into one directory, while the training goes on."""

from __future__ import annotations

import builtins
import errno
import functools
import hashlib
import os
import pickle
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.tensor import DTensor

from ..protocol.errors import CheckpointError, TorchDistError
from . import directory as directories
from . import objects as kinds
from . import optimizer_states, randomness, shared
from .directory import Manifest, Writer
from .rank_agreement import Ranks, all_ranks
from .staging import FLAT, Buffers, Piece, Planner, divided, not_finite, size_of

STATE = "torchdist"
"""Name, among the tensors, of everything that is not a tensor."""

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

Say = Callable[[str], None]


class Saving:
    """A save that may still be running."""

    def __init__(self, write: Callable[[], Path], what: str, asynchronous: bool) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._told = False
        self._what = what
        self._thread = threading.Thread(target=self._run, args=(write, asynchronous), name="torchdist-save")
        if asynchronous:
            self._thread.start()
        else:
            self._run(write, asynchronous)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for the save; returns the path of the checkpoint. If the save failed, each call raises its error."""
        if self._thread.ident is not None:
            self._thread.join()
        self._told = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def settle(self) -> None:
        """Wait, and raise the error unless ``wait`` has raised it already."""
        if self._thread.ident is not None:
            self._thread.join()
        if not self._told:
            self.wait()

    def _run(self, write: Callable[[], Path], aloud: bool) -> None:
        try:
            self._path = write()
        except BaseException as error:  # noqa: BLE001  # raised by the next call. DCP's error is no Exception
            self._error = error if isinstance(error, TorchDistError) else in_words(error, self._what)
            if aloud:
                print(f"{self._what} was not saved: {self._error}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Announcement:
    """What a rank is about to save; directory and step must be equal on all ranks."""

    directory: str
    step: int | None
    tensors: str
    """Digest of the names and sizes of this rank's tensors."""
    common: str
    """Digest of the skeletons."""


_writers: dict[Path, Writer] = {}
_buffers = Buffers()
_shares: dict[tuple[str, ...], tuple[set[str], int]] = {}
_saving: Saving | None = None


@functools.cache
def _token() -> str:
    """A token of this process. Not made at import, because ranks are forked from a process that has imported this."""
    return secrets.token_hex(4)


def say(line: str) -> None:
    """Print one line. Only rank 0 calls it."""
    builtins.print(line, flush=True)


def wait() -> None:
    """Wait until the last save is complete. Raises ``CheckpointError`` if it failed and that was not raised yet."""
    if _saving is not None:
        _saving.settle()


def writer(directory: Path) -> Writer:
    """This process's ``Writer`` for ``directory``."""
    return _writers.setdefault(directory.absolute(), Writer(directory.absolute(), _token()))


def save(
    directory: str | os.PathLike[str],
    *objects: Any,
    step: int | None = None,
    keep: int | None = None,
    asynchronous: bool = True,
    **named: Any,
) -> Saving:
    """Save ``objects`` and the random number generators of every rank as ``directory/step-000100``.

    Every rank must call it. ``objects``: modules (plain, DDP, ``fully_shard``, tensor-parallel), optimizers,
    schedulers, generators, a followed ``DataLoader``, other objects with ``state_dict`` and ``load_state_dict``. Each
    is saved under its kind (``model``, ``optimizer``, ``scheduler``, ``loader``, …), or under its keyword. By keyword
    also any value that can be pickled; the value of rank 0 is saved. Without ``step`` the saves are numbered.

    Blocks until the state is copied to the CPU; with ``asynchronous=False`` until all is on disk. First waits for an
    earlier save that is still running, and raises its error here. The directory appears by one rename when every rank
    has finished. ``keep``: how many checkpoints are kept; older ones are deleted after that.
    Raises ``CheckpointError`` on all ranks: a directory that cannot be written, too little space, checkpoints of
    another job in it, different directories or steps, hosts that do not share the directory. Returns the save; its
    ``wait()`` returns the path.
    """
    return save_named(directory, kinds.named(objects, named), step, keep, asynchronous, say)


def save_named(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Any],
    step: int | None,
    keep: int | None,
    asynchronous: bool,
    tell: Say,
    further: Mapping[str, Any] | None = None,
) -> Saving:
    """``save`` for named objects. ``further``: more state of this rank alone."""
    global _saving
    wait()
    ranks = all_ranks()
    where = Path(directory).absolute()
    captured: list[kinds.Captured] = []

    def announce() -> Announcement:
        captured.append(kinds.capture(objects))
        sizes = repr([(name, size_of(tensor)) for name, tensor in captured[0].tensors.items()])
        return Announcement(str(where), step, _digest(sizes.encode()), _digest(_pickled(captured[0].common)))

    announced = ranks.together(announce)
    _see_that_all_agree(announced)
    shared.check(ranks, where)
    state = captured[0]
    mine, size = _share(ranks, announced, state)

    def begin() -> tuple[int, str]:
        directories.prepare(where)
        number = writer(where).next_step() if step is None else step
        writer(where).allow(number)
        directories.need_space(where, size)
        return number, str(writer(where).open(number))

    number, aside = ranks.by_first(begin)
    pieces = {
        name: Piece(name, tensor)
        for name, tensor in state.tensors.items()
        if name in mine or isinstance(tensor, DTensor)
    }
    own = {**state.own, **(further or {}), "random": randomness.capture()}
    if asynchronous:
        _buffers.copy(pieces)
    skeletons = None if announced[ranks.number].common == announced[0].common and not ranks.first else state.common
    work = _Work(ranks, writer(where), Path(aside), number, keep, tell)
    kinds_of = {name: kinds.kind_of(value) for name, value in objects.items()}
    frozen = pickle.dumps((skeletons, own))
    _saving = Saving(
        lambda: work.write(pieces, frozen, kinds_of, size), f"the checkpoint of step {number}", asynchronous
    )
    if not asynchronous:
        wait()
    return _saving


def _pickled(skeletons: dict[str, Any]) -> bytes:
    """Pickle the skeletons. Raises ``CheckpointError``, which names the object that cannot be pickled."""
    for name, skeleton in skeletons.items():
        try:
            pickle.dumps(skeleton)
        except Exception as error:
            raise CheckpointError(
                f"{name} cannot be pickled: {error}", "save its state instead: give it state_dict and load_state_dict"
            ) from error
    return pickle.dumps(skeletons)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _see_that_all_agree(announced: list[Announcement]) -> None:
    first = announced[0]
    for rank, other in enumerate(announced):
        for what, here, there in (("in", first.directory, other.directory), ("step", first.step, other.step)):
            if here != there:
                raise CheckpointError(
                    f"the ranks save different things: rank 0 {what} {here}, rank {rank} {what} {there}",
                    "every rank calls td.save with the same directory and step",
                )


def _share(ranks: Ranks, announced: list[Announcement], state: kinds.Captured) -> tuple[set[str], int]:
    """The full tensors that this rank writes, and the bytes of all ranks. Computed again only after a change."""
    key = tuple(one.tensors for one in announced)
    if key not in _shares:
        whole = {
            name: (size_of(tensor), name in state.parameters)
            for name, tensor in state.tensors.items()
            if not isinstance(tensor, DTensor)
        }
        divided_bytes = sum(size_of(tensor) for tensor in state.tensors.values() if isinstance(tensor, DTensor))
        gathered = ranks.gather((whole, divided_bytes))
        held = [one for one, _ in gathered]
        chosen = divided(held)
        written = sum(held[rank][name][0] for rank, names in enumerate(chosen) for name in names)
        _shares.clear()
        _shares[key] = chosen[ranks.number], written + sum(count for _, count in gathered)
    return _shares[key]


@dataclass(frozen=True)
class _Work:
    """The work of the thread."""

    ranks: Ranks
    writer: Writer
    aside: Path
    step: int
    keep: int | None
    tell: Say

    def write(self, pieces: dict[str, Piece], frozen: bytes, objects: dict[str, str], size: int) -> Path:
        """Write everything to disk, then publish it by a rename."""
        try:
            odd = not_finite(pieces)
            gathered = self.ranks.gather_to_first((frozen, odd))
            state: dict[str, Any] = dict(pieces)
            if self.ranks.first:
                state[STATE] = _merged(self.step, objects, [pickle.loads(one) for one, _ in gathered])
            storage = FileSystemWriter(self.aside)
            save_sharded({FLAT: state}, storage_writer=storage, planner=Planner(), process_group=self.ranks.group)
            return self.ranks.by_first(
                lambda: self._publish(objects, size, sorted({name for _, names in gathered for name in names}))
            )
        except BaseException:
            if self.ranks.first:
                self.writer.discard(self.aside)
            raise

    def _publish(self, objects: dict[str, str], size: int, odd: list[str]) -> Path:
        manifest = Manifest(self.step, torch.__version__, self.ranks.size, objects, _token(), time.time(), size, odd)
        path = self.writer.publish(self.aside, manifest, self.keep)
        if odd:
            finite = directories.last_finite(path.parent)
            last = (
                "no checkpoint here is without them" if finite is None else f"{finite.name} is without them, and kept"
            )
            self.tell(
                f"step {self.step}: NaN or infinity in {len(odd)} tensor{'s' if len(odd) > 1 else ''} ({odd[0]}"
                f"{', …' if len(odd) > 1 else ''}); saved all the same in {path}; {last}"
            )
        return path


def _merged(step: int, objects: dict[str, str], gathered: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one."""
    skeletons = [common for common, _ in gathered if common is not None]
    merged = {
        label: _merge(kind, [one[label] for one in skeletons])
        for label, kind in objects.items()
        if kind not in kinds.OWN
    }
    own = [own for _, own in gathered]
    return {"step": step, "objects": merged, "own": own}


def _merge(kind: str, skeletons: list[Any]) -> Any:
    if kind == "optimizer":
        return optimizer_states.merged(skeletons)
    if kind == "model":
        return {name: value for one in reversed(skeletons) for name, value in one.items()}
    return skeletons[0]


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CUT_SHORT = "inline_container"
"""Part of torch.save's message when a write was incomplete; torch.save hides the error of the operating system."""


def in_words(error: BaseException, what: str) -> CheckpointError:
    """A ``CheckpointError`` for an error of torch.distributed.checkpoint or of a collective."""
    rank, cause = "", error
    if isinstance(error, CheckpointException) and error.failures:
        number = min(error.failures)
        rank, cause = f" on rank {number}", error.failures[number][0]
    hint = ""
    if (isinstance(cause, OSError) and cause.errno in _NO_ROOM) or _CUT_SHORT in str(cause):
        hint = "there is no space left for it: delete older checkpoints, keep fewer (keep=), or save elsewhere"
    elif isinstance(cause, RuntimeError) and ("gloo" in str(cause).lower() or "closed by peer" in str(cause)):
        hint = "another rank ended while it was being saved; what was saved before is complete"
    result = CheckpointError(f"{what} failed{rank}: {type(cause).__name__}: {str(cause).splitlines()[0]}", hint)
    result.__cause__ = cause
    return result
