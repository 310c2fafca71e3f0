"""The results: values of a rank are written to a file and loaded into the notebook.

A captured object is written as its place in the bundle's stream. If it changed, its new state follows. The notebook
puts this state into its own object, so all references in the notebook see the change.
The file contains pickles that share one memo: {name: value} and (place, State) in the order of pickling, then None,
then the names that were left behind.
"""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..protocol import codec
from ..protocol.bundle import Manifest
from ..protocol.disk import open_plain, read_plain
from ..protocol.errors import DamagedJob, RankFailed, StoreError
from ..protocol.paths import Home, JobPaths
from . import attributes, portable, rebuild, salvage
from .bundle import Loaded, Memo, digest_of, find_current, memo_from_bundle, without_warnings
from .compare import Comparison, comparison_of
from .culprit import explain
from .mapping import map_private
from .owned import BUILTINS, Owned
from .pickler import LARGE, Pickler
from .states import SHARED, State, put, shared, state_of

_WRITE = 1 << 30
_made: weakref.WeakValueDictionary[tuple[str, str, str], type] = weakref.WeakValueDictionary()
"""Classes that cells of a job defined: its results and its exception use the same class, however often loaded."""


Stays = Callable[[object], str | None]
"""Returns why an object must not travel although it could be pickled; None for all other objects."""


class StaysBehind(Exception):
    """Raised while pickling an object for which ``Stays`` returns a reason."""


@dataclass(frozen=True)
class Dumped:
    """What a rank published. ``left``: (name, reason) for values that could not travel; ``size`` is in bytes."""

    names: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    size: int


class Values(dict[str, Any]):
    """{name: value} of a rank; ``notes`` are warnings, ``left`` the names left behind with the reasons, ``deleted``
    the names that the rank had at first."""

    notes: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    """Names whose values cannot be rebuilt here, with the reasons; "" stands for an object of the notebook."""
    deleted: tuple[str, ...] = ()


class ResultPickler(Pickler):
    """Writes captured objects as their places in the bundle and remembers these places."""

    def __init__(
        self,
        file: IO[bytes],
        loaded: Loaded | None,
        extents: dict[int, tuple[int, int]] | None = None,
        large: int = LARGE,
        stays: Stays | None = None,
        objects: Mapping[int, Owned] | None = None,
    ) -> None:
        main = loaded.main if loaded else vars(sys.modules["__main__"])
        away = loaded is not None and not portable.is_ours(loaded.manifest.python)
        super().__init__(file, main, extents, large, away)
        self._places = loaded.places if loaded else {}
        self._comparison = comparison_of(loaded) if loaded else None
        self.waiting: list[int] = []
        self.met: set[int] = set()
        self._loaded, self._stays = loaded, stays
        self.lost: dict[str, str] = {}
        """Attributes of classes and functions that stay behind, with the reasons."""
        self._objects = objects or {}
        if loaded:
            self.storages.share(loaded.storages)
            self.scopes.update(loaded.scopes)

    def persistent_id(self, value: Any) -> Any:
        self.check(value)
        place = self._places.get(id(value))
        if place is None and id(value) in self._objects:
            owned = self._objects[id(value)]
            return owned.module, owned.name
        if place is None and value is self.main:
            return "__main__", ""
        if place is None and value is BUILTINS.value:
            return BUILTINS.module, BUILTINS.name
        if place is None or (self._comparison and self._comparison.replaced(place)):
            return None
        self.meet(place)
        return place

    def check(self, value: object) -> None:
        """Raise ``StaysBehind`` for an object that must not travel."""
        if self._stays is not None and (why := self._stays(value)):
            raise StaysBehind(why)

    def without_lost(self, code: Any, state: State) -> State:
        """The state of a class or function, without attributes that cannot be pickled: ``lost`` has the reasons."""
        lost = {}
        with open(os.devnull, "wb") as nowhere:
            for name, item in state.part_of_code().items():
                try:
                    ResultPickler(nowhere, self._loaded, stays=self._stays, objects=self._objects).dump(item)
                except Exception as error:  # noqa: BLE001  # the user's own reducers run here and may raise anything
                    where = f"{getattr(code, '__qualname__', 'globals()')}.{name}"
                    lost[name] = where
                    why = str(error) if isinstance(error, StaysBehind) else explain(item, where, error).sentence
                    self.lost[where] = why
        return state.without(lost) if lost else state

    def meet(self, place: int) -> None:
        if place not in self.met:
            self.met.add(place)
            self.waiting.append(place)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, tempfile.TemporaryDirectory):
            raise pickle.PicklingError("it is removed when the rank ends; tempfile.mkdtemp() makes one that stays")
        wrapped = plain_module(value)
        if wrapped is not value:
            return rebuild.same, (wrapped,)
        if isinstance(value, type) and (arguments := self._of_generic(value)):
            return operator.getitem, arguments
        return super().reducer_override(value)

    def _of_generic(self, value: type) -> tuple[Any, Any] | None:
        """The notebook's ``Box`` and ``int`` for a model ``Box[int]`` of pydantic, which the notebook makes itself."""
        generic = vars(value).get("__pydantic_generic_metadata__") or {}
        known = generic.get("args") and id(generic["origin"]) in self._places
        return (generic["origin"], generic["args"]) if known else None


def plain_module(value: Any) -> Any:
    """The module inside a ``DistributedDataParallel``, or the value itself."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    while parallel is not None and isinstance(value, parallel.DistributedDataParallel):
        value = value.module
    return value


def dump_results(
    values: Mapping[str, Any],
    loaded: Loaded,
    directory: JobPaths,
    rank: int,
    stays: Stays | None = None,
    objects: Mapping[int, Owned] | None = None,
) -> Dumped:
    """Publish the values of this rank. A name that cannot or must not travel is left behind with the reason.

    ``objects`` are objects of modules by ``id``: they are written as references.

    Raises ``StoreError`` when the files cannot be written.
    """
    target = directory.result(rank)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    chosen = {name: plain_module(value) for name, value in values.items()}
    left: list[tuple[str, str]] = []
    extents: dict[int, tuple[int, int]] = {}
    try:
        directory.results.mkdir(mode=0o700, exist_ok=True)
        while True:
            with open(os.open(aside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
                pickler = ResultPickler(file, loaded, extents, stays=stays, objects=objects)
                failed = _write(pickler, chosen, comparison_of(loaded))
                if failed is None and not (narrower := pickler.storages.narrow()):
                    left += pickler.lost.items()
                    file.write(pickle.dumps(tuple(left)))
                    break
            if failed is None:
                extents.update(narrower)
            else:
                name, error = failed
                value = chosen.pop(name)
                why = str(error) if isinstance(error, StaysBehind) else explain(value, name, error).sentence
                left.append((name, why))
        size = _publish(pickler, aside, directory, rank)
    except OSError as error:
        aside.unlink(missing_ok=True)
        hint = "free some space, or set $TORCHDIST_HOME to a directory on a larger disk; the values are lost"
        raise StoreError(f"the results of rank {rank} cannot be written: {error}", hint) from error
    return Dumped(tuple(chosen), tuple(left), size)


def _write(pickler: ResultPickler, chosen: Mapping[str, Any], comparison: Comparison) -> tuple[str, Exception] | None:
    """Write all names and the states of changed objects below them. Returns the name that failed, and why, or None."""
    for name, value in chosen.items():
        try:
            pickler.dump({name: value})
            while pickler.waiting:
                place = pickler.waiting.pop()
                live = comparison.loaded.memo[place]
                pickler.check(live)
                if comparison.changed(place):
                    state = state_of(live, pickler).for_update(comparison.became(place))
                    pickler.dump((place, pickler.without_lost(live, state)))
                for child in comparison.children(place):
                    if not comparison.replaced(child):
                        pickler.meet(child)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  # pickling runs the user's own reducers, which may raise anything
            return name, error
    pickler.dump(None)
    return None


def _publish(pickler: ResultPickler, aside: Path, directory: JobPaths, rank: int) -> int:
    size = aside.stat().st_size
    for index, buffer in enumerate(pickler.buffers):
        path = directory.result_buffer(rank, index)
        size += _write_buffer(path, buffer.raw())
    os.rename(aside, directory.result(rank))
    return size


def _write_buffer(path: Path, content: memoryview) -> int:
    """Write the object's memory directly, without a copy."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    try:
        done = 0
        while done < content.nbytes:
            done += os.write(descriptor, content[done : done + _WRITE])
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    os.rename(aside, path)
    return content.nbytes


def load_results(
    directory: JobPaths,
    rank: int,
    memo: Mapping[int, Any] | None,
    main_dict: dict[str, Any],
    first: Callable[[dict[str, Any]], None] = lambda values: None,
) -> Values:
    """The values that a rank published. Captured objects that changed are updated in place; none of them if the file
    cannot be read. ``memo`` is ``Capture.memo``; None reads the captured objects from the bundle. ``first`` is called
    with each value before the next is rebuilt.

    Raises ``DamagedJob`` for a file that is missing or cannot be read, ``RankFailed`` for a value that cannot be
    rebuilt here (for example a class of a module that only the rank has).
    """
    path = directory.result(rank)
    known = memo if memo is not None else memo_of_job(directory, main_dict)
    values = Values()

    def reader(file: IO[bytes]) -> Callable[[], Any]:
        return Reader(file, known, main_dict, buffers=_result_buffers(directory, rank)).load

    try:
        with made_once(directory.job, main_dict):
            parts = _parts_of(path, reader, first, values)
    except FileNotFoundError as error:
        raise DamagedJob(
            f"there are no results of rank {rank} in {error.filename or path}",
            "the job ended before this rank published them; look at its log",
        ) from error
    except DamagedJob:
        raise
    except (EOFError, pickle.UnpicklingError, ValueError) as error:
        raise DamagedJob(f"{path} cannot be read: {error}", "run the job again: %dist rerun") from error
    for part in parts:
        values.update(part if isinstance(part, dict) else {})
    if values.unread and not values:
        name, why = values.unread[0]
        raise RankFailed(f"{name or 'a value'} of rank {rank}: {why}", "install the missing package here", rank=rank)
    values.deleted = tuple(name for name in values if values[name] is attributes.Absent and name.isidentifier())
    for name in values.deleted:
        del values[name]
    notes = apply([part for part in parts if not isinstance(part, dict)], known)
    stale = (f"an object of the notebook is as before the cell: {why}" for name, why in values.unread if not name)
    values.notes = (*getattr(known, "notes", ()), *stale, *notes)
    return values


def _parts_of(
    path: Path,
    reader: Callable[[IO[bytes]], Callable[[], Any]],
    first: Callable[[dict[str, Any]], None],
    values: Values,
) -> list[Any]:
    """The parts of the file; if one cannot be rebuilt, those that can. Sets what ``values`` has beside its items."""
    parts: list[Any] = []
    with open_plain(path) as file:
        load = reader(file)
        try:
            while (part := load()) is not None:
                parts.append(part)
                if isinstance(part, dict):
                    first(part)
            values.left = pickle.load(file)
            return parts
        except FileNotFoundError:  # of a buffer
            raise
        except Exception as error:  # noqa: BLE001  # rebuilding runs the user's own code, which may raise anything
            broken = error
    with open_plain(path) as file:
        content = file.read()
    try:
        parts, values.unread, values.left = salvage.rescued(content, reader)
    except ValueError:  # the file is damaged
        raise broken from None
    return parts


def memo_of_job(directory: JobPaths, main_dict: dict[str, Any]) -> Memo:
    """The captured objects of a job by place, read from its bundle."""
    try:
        manifest = Manifest.from_json(codec.loads(read_plain(directory.manifest)))
    except (OSError, ValueError, KeyError) as error:
        raise DamagedJob(
            f"{directory.manifest} cannot be read: {error}",
            "run the job again: %dist rerun",
        ) from error
    blobs = Home(directory.root.parent.parent).blobs
    return memo_from_bundle(manifest, blobs, main_dict, source_dir=directory.source)


def _result_buffers(directory: JobPaths, rank: int) -> Iterator[Any]:
    index = 0
    while True:
        path = directory.result_buffer(rank, index)
        yield map_private(path, path.stat().st_size)
        index += 1


@contextlib.contextmanager
def made_once(job: str, main_dict: dict[str, Any]) -> Iterator[None]:
    """While this is open, loading reuses classes that this process already loaded from the job."""
    existing = rebuild.loading(main_dict, lambda name, digest: _made.get((job, name, digest)))
    with existing as context, without_warnings():
        yield
    _made.update({(job, *key): kind for key, kind in context.made.items()})


def apply(updates: list[tuple[int, State]], memo: Mapping[int, Any]) -> tuple[str, ...]:
    """Put new states into the notebook's objects: instances first, then containers, which may hash them."""
    notes = [SHARED] if shared(memo, {place for place, _ in updates}) else []
    containers = ("list", "dict", "OrderedDict", "set", "deque", "bytearray", "numbers")
    for place, state in sorted(updates, key=lambda update: update[1].kind in containers):
        target = memo[place]
        try:
            put(target, state)
        except Exception as error:  # noqa: BLE001  # the object's own __setstate__ may raise anything
            notes.append(f"a {type(target).__name__} could not be updated: {type(error).__name__}: {error}")
    return tuple(notes)


class Reader(pickle.Unpickler):
    """Loads results; a captured object's place becomes the notebook's own object."""

    def __init__(self, file: IO[bytes], memo: Mapping[int, Any], main_dict: dict[str, Any], **options: Any) -> None:
        super().__init__(file, **options)
        self._memo = memo
        self._main = main_dict
        self._current: dict[int, Any] = {}

    def persistent_load(self, place: Any) -> Any:
        if isinstance(place, tuple):
            return rebuild.original(*place) if place[1] else self._main
        if place not in self._current:
            if place not in self._memo:
                raise pickle.UnpicklingError(f"captured object {place} is not known here")
            self._current[place] = self._as_now(self._memo[place])
        return self._current[place]

    def _as_now(self, value: Any) -> Any:
        """The current function or class instead of a captured one, if its cell was run again unchanged."""
        if not isinstance(value, (type, types.FunctionType)) or value.__module__ != "__main__":
            return value
        now = find_current(self._main, value.__qualname__)
        return now if now is not None and now is not value and digest_of(now) == digest_of(value) else value
