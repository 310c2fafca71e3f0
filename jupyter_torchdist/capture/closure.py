"""The captured names as one pickle stream, with the kind, the size and the needing line of each name."""

from __future__ import annotations

import builtins
import io
import pickle
import types
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..marshal import attributes, byvalue, codes
from ..marshal.bundle import STATES, find_current, keep_shared
from ..marshal.commands import INSTEAD_OF_MAGICS
from ..marshal.culprit import explain, without_frames
from ..marshal.owned import Owned
from ..marshal.pickler import Enter, Leave, Pickler, loaded_submodules
from ..protocol.bundle import Captured
from ..protocol.errors import CaptureError
from .describe import describe

PROVIDED = frozenset({
    "__builtins__", "__name__", "__doc__", "__file__", "__spec__", "__package__", "__loader__", "__annotations__",
    "get_ipython", "display", "exit", "quit",
})  # fmt: skip
"""Names that every rank has without a capture, unless the user has defined them."""
_OF_USERS = frozenset({"__doc__", "display", "exit", "quit"})


def _is_own(name: str, value: Any) -> bool:
    """Whether the user has defined a name that a rank has, too."""
    if name not in _OF_USERS:
        return False
    home = getattr(value, "__module__", None) if callable(value) else None
    return str(home or type(value).__module__).partition(".")[0] not in ("IPython", "ipykernel", "_sitebuiltins")


_HISTORY = frozenset({"In", "Out", "_ih", "_oh", "_dh"})


@dataclass
class Closure:
    """The pickled names. ``memo`` maps an object's place in the stream to the object."""

    stream: bytes
    buffers: list[pickle.PickleBuffer]
    receipt: list[Captured]
    memo: dict[int, Any]
    files: list[str]
    """Source files of the code that travels by value, by their names in this process."""
    modules: dict[str, str]
    referred: set[str]
    """The modules without which the stream cannot be loaded."""
    moved: set[str]
    missing: dict[str, str]
    """Names that captured functions use and no code defines → where they are used."""
    names: tuple[str, ...]
    """All names in the stream except the state of this process."""
    sizes: dict[str, int]
    """Bytes of each name in the stream."""
    graphs: tuple[str, ...]
    """Names of tensors whose gradients would go on to others in this process."""
    attributes: frozenset[str]
    """Names of attributes that functions in the stream use."""


class NamespacePickler(Pickler):
    """Writes the globals of notebook functions with the first function that uses them."""

    def __init__(self, file: io.BytesIO, wanted: Wanted, extents: dict[int, tuple[int, int]]) -> None:
        super().__init__(file, wanted.namespace, extents, portable=wanted.portable)
        self.labels = dict(wanted.labels)
        self._stream = file
        self._wanted = wanted
        self.found: dict[str, str] = {}
        """Names in the stream → which line needs them."""
        self.sizes: dict[str, int] = {}
        self.missing: dict[str, str] = {}
        """Names that a function uses and no code defines → where they are used."""
        self.soft: set[str] = set()
        """Names that are left out if they cannot travel, because no code surely uses them."""
        self.homes: dict[str, str] = {}
        """Names under which Python finds the code that travels, to pickle its objects → the code."""
        self.stored: set[str] = set()
        """Global names that functions set: they may exist when another function needs them."""
        self.open: list[tuple[str, int, int]] = []
        """Names whose value is being written: (name, stream size before, size of the names inside)."""
        self.graphs: dict[str, None] = {}
        """Names of tensors that were computed from others, with gradients; not those in containers."""
        self.attributes: set[str] = set()
        """Names of attributes that functions use."""

    def tensor(self, value: Any) -> Any:
        name = self.open[-1][0] if self.open else ""
        if value.requires_grad and not value.is_leaf and self._wanted.namespace.get(name) is value:
            self.graphs[name] = None
        return super().tensor(value)

    def globals_of(self, function: types.FunctionType) -> Iterator[tuple[Enter, Any, Leave]]:
        references = codes.references(function.__code__)
        place = self._wanted.place_of(function)
        self.stored |= references.stores.keys()
        self.attributes |= references.attributes
        for magic, line in references.magics.items():
            raise refused_magic(magic, f"{place}, line {line})")
        for name, line in (references.commands | references.loads).items():
            if self._wanted.lacks(name):
                self.missing.setdefault(name, f"{place}, line {line})")
            if self._wanted.takes(name) and name not in self.found:
                yield self._entering(name, f"{place}, line {line})")
        names = codes.spoken(references)
        if codes.BY_TEXT & references.loads.keys():
            names |= self._wanted.texts
        for name in sorted(names & self._wanted.namespace.keys()):
            if self._wanted.takes(name) and name not in self.found:
                self.soft.add(name)
                yield self._entering(name, f"a text that {place}) may read")

    def _entering(self, name: str, user: str) -> tuple[Enter, Any, Leave]:
        self.found[name] = user
        return Enter(name, user), self._wanted.namespace[name], Leave()

    def by_value(self, code: Any) -> None:
        self._find_home(code)
        if isinstance(code, type):
            derived: list[type] = type.__subclasses__(code)
            for kind in derived:
                self._find_home(kind)

    def _find_home(self, code: Any) -> None:
        head = code.__qualname__.partition(".")[0]
        known = code.__module__ != "__main__" or head in self.found or not self._wanted.takes(head)
        if not known and find_current(self._wanted.namespace, code.__qualname__) is code:
            self.homes.setdefault(head, code.__qualname__)

    def entered(self, name: str, user: str) -> None:
        self.open.append((name, self._written(), 0))

    def left(self) -> None:
        name, before, inside = self.open.pop()
        whole = self._written() - before
        self.sizes[name] = whole - inside
        if self.open:
            outer, start, within = self.open[-1]
            self.open[-1] = (outer, start, within + whole)

    def _written(self) -> int:
        return self._stream.tell() + sum(buffer.raw().nbytes for buffer in self.buffers)

    def top(self, name: str, user: str, value: Any) -> None:
        """Write one name of the cell."""
        self.found[name] = user
        self.entered(name, user)
        self.dump({name: value})
        self.left()


@dataclass
class Wanted:
    """What to capture. ``names``: name → the line that needs it. ``soft`` names are left out if they cannot travel."""

    namespace: dict[str, Any]
    names: Mapping[str, str]
    soft: frozenset[str] = frozenset()
    exclude: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    """Words of the cell's strings, by which functions may look up names."""
    labels: Mapping[str, str] = field(default_factory=dict)
    attributes: frozenset[str] = frozenset()
    imports: tuple[str, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)
    """Values that travel under a name although they are not in the notebook's namespace."""
    reach: Callable[[Iterable[str]], Mapping[str, Any]] = lambda modules: {}
    """Modules that travel → attributes that travel with them. An attribute that cannot travel is left out."""
    portable: bool = False
    """For another release of Python, too."""
    objects: Mapping[int, Owned] = field(default_factory=dict)
    """Objects of modules by ``id``: they travel as references."""
    states: Mapping[str, Any] = field(default_factory=dict)
    """The state of this process, by names that no code can have. A state that cannot travel is left out."""

    def value(self, name: str) -> Any:
        return self.own[name] if name in self.own else self.namespace[name]

    def takes(self, name: str) -> bool:
        if name in self.exclude or not (name in self.own or name in self.namespace):
            return False
        return name not in PROVIDED or _is_own(name, self.value(name))

    def lacks(self, name: str) -> bool:
        """Whether the ranks will have no such name, as far as is known here."""
        known = name in self.own or name in self.namespace or name in self.soft or name in self.exclude
        return not known and name not in PROVIDED and not hasattr(builtins, name)

    def place_of(self, function: types.FunctionType) -> str:
        """For example ``function evaluate (Cell In[3]``, without the line and the closing parenthesis."""
        file = function.__code__.co_filename
        return f"function {function.__qualname__} ({self.labels.get(file, file)}"


def close(wanted: Wanted) -> tuple[Closure, list[str]]:
    """Pickle the names and the names that their functions and classes need. The second value is a list of notes.

    Raises ``CaptureError`` with the path to an object that cannot travel.
    """
    notes: list[str] = []
    extents: dict[int, tuple[int, int]] = {}
    left: set[str] = set()
    referred: dict[int, Owned] = {}
    while True:
        trial = replace(wanted, exclude=wanted.exclude | left, own=dict(wanted.own), objects=referred)
        pickler = NamespacePickler(stream := io.BytesIO(), trial, extents)
        failed = _write(pickler, trial)
        if failed is not None:
            left.add(failed[0])
            notes.append(failed[1])
        elif narrower := pickler.storages.narrow():
            extents.update(narrower)
        elif met := (_objects_beside(wanted, trial) - referred.keys()) & pickler.memo.copy().keys():
            referred.update({place: wanted.objects[place] for place in met})
        else:
            return _finish(pickler, trial, stream), notes


def _objects_beside(wanted: Wanted, trial: Wanted) -> set[int]:
    """Objects of modules, by ``id``, without those that travel as attributes of their modules."""
    return wanted.objects.keys() - {id(value) for value in trial.own.values()}


def _write(pickler: NamespacePickler, wanted: Wanted) -> tuple[str, str] | None:
    names = sorted((name for name in wanted.names if wanted.takes(name)), key=lambda name: _rank(wanted.value(name)))
    modules = [wanted.value(name) for name in names]
    try:
        pickler.begin(wanted.objects.values())
        pickler.dump({"": [*loaded_submodules(modules, set(wanted.attributes)), *byvalue.imported(wanted.imports)]})
        for name in names:
            if name not in pickler.found:
                pickler.top(name, wanted.names[name], wanted.value(name))
        while homes := [name for name in pickler.homes if name not in pickler.found]:
            pickler.soft.update(homes)
            pickler.top(homes[0], f"objects of {pickler.homes[homes[0]]}", wanted.value(homes[0]))
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001  # pickling runs the user's own reducers, which may raise anything
        return _give_up(pickler, wanted, without_frames(error))
    return _write_attributes(pickler, wanted) or _write_states(pickler, wanted)


def _write_attributes(pickler: NamespacePickler, wanted: Wanted) -> tuple[str, str] | None:
    """Write the attributes of all modules in the stream. Returns one that cannot travel, and why, or None."""
    own: dict[str, Any] = {}
    while new := {name: value for name, value in wanted.reach(pickler.modules).items() if name not in own}:
        own.update(new)
        wanted.own = {**wanted.own, **new}
        for name, value in attributes.with_contents(new, pickler.memo.copy):
            place = attributes.shown(name)
            if not wanted.exclude & {name, place}:
                try:
                    pickler.top(name, f"module {attributes.module_of(name)}", value)
                except Exception as error:  # noqa: BLE001  # as above
                    return (
                        name,
                        f"{explain(value, place, error).sentence}; the ranks get its module's value",
                    )
    return None


def _write_states(pickler: NamespacePickler, wanted: Wanted) -> tuple[str, str] | None:
    """Write the states. Returns the first that cannot travel, and why, or None."""
    pickler.dump({"": STATES})
    for name, value in wanted.states.items():
        if name not in wanted.exclude:
            try:
                pickler.top(name, "", value)
            except Exception as error:  # noqa: BLE001  # as above; no state is worth a refusal
                return name, f"{name} stays in the notebook ({explain(value, name, without_frames(error)).sentence})"
    return None


def _rank(value: Any) -> int:
    """Modules first, then code, then data: code that may run while data is rebuilt exists by then."""
    kind = type(value)  # not isinstance, which would call the object's own ``__getattribute__`` for ``__class__``
    return 0 if issubclass(kind, types.ModuleType) else 1 if issubclass(kind, (type, types.FunctionType)) else 2


def _give_up(pickler: NamespacePickler, wanted: Wanted, error: Exception) -> tuple[str, str]:
    # Globals of a function that is not the notebook's own have no line there: take the name that contains them.
    opened = [name for name, _, _ in pickler.open if name in pickler.found]
    name = opened[-1] if opened else next(iter(wanted.names), "")
    user = pickler.found.get(name, "")
    if name in _HISTORY:
        raise refused_history(name, user)
    culprit = explain(wanted.value(name), name, error)
    if name in wanted.soft | pickler.soft:
        why = f"only {user} needs it" if user.startswith(("a text", "objects")) else "the cell assigns it"
        return name, f"{name} was left behind, because {why} ({culprit.sentence})"
    hint = f"create it inside the cell, or leave it behind with --exclude {name}"
    message = f"{name} cannot leave the notebook; {user} needs it\n  {culprit.sentence}"
    raise CaptureError(message, hint, path=culprit.path, line=user) from error


def _finish(pickler: NamespacePickler, wanted: Wanted, stream: io.BytesIO) -> Closure:
    receipt = []
    for name, user in pickler.found.items():
        if name in wanted.states:
            continue
        kind, what = describe(wanted.value(name))
        receipt.append(Captured(attributes.shown(name), kind, what, pickler.sizes.get(name, 0), user))
    memo = dict(pickler.memo.copy().values())
    pickler.clear_memo()
    places = set(memo)
    shared = keep_shared(memo)
    passing = array("Q", sorted(places - shared.keys()))
    return Closure(
        _without_memo({"": passing.tobytes()}) + stream.getvalue(),
        pickler.buffers,
        receipt,
        shared,
        list(pickler.files),
        dict(pickler.modules),
        pickler.referred,
        pickler.storages.moved,
        {name: place for name, place in pickler.missing.items() if name not in pickler.stored},
        tuple(name for name in pickler.found if name not in wanted.states),
        pickler.sizes,
        tuple(pickler.graphs),
        frozenset(pickler.attributes),
    )


def _without_memo(value: Any) -> bytes:
    """A pickle without memo entries: the memo places of the stream after it do not change."""
    pickler = pickle.Pickler(file := io.BytesIO(), protocol=5)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()


def refused_history(name: str, user: str) -> CaptureError:
    """The error for a name of the shell such as ``Out``."""
    hint = "copy what you need of it into a variable of its own"
    return CaptureError(
        f"{name} is the notebook's history and stays there (needed by {user})", hint, path=name, line=user
    )


def refused_magic(magic: str, where: str) -> CaptureError:
    """The error for a magic that cannot run on a rank: there is no IPython."""
    hint = "put it above %%distribute" if magic == "%%capture" else INSTEAD_OF_MAGICS
    return CaptureError(f"the magic {magic} cannot run on ranks ({where})", hint, path=magic, line=where)
