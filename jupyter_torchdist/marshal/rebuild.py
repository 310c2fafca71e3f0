"""Functions that a stream calls while it is loaded. Streams contain their names: renaming one breaks older bundles."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from . import attributes, classes, codes

Resolve = Callable[[str, str], Any]
"""(qualified name, digest of the code) → the existing function or class to use here, or None."""


@dataclass
class Loading:
    """The context in which a stream is loaded: the globals of its functions, and existing objects that it uses."""

    main: dict[str, Any]
    resolve: Resolve | None = None
    registers: bool = True
    """Whether operators in the stream replace this process's operators of the same name."""
    kept: dict[int, Any] = field(default_factory=dict)
    made: dict[tuple[str, str], type] = field(default_factory=dict)
    """Classes made from the stream, by qualified name and digest."""

    def existing(self, name: str, digest: str) -> Any:
        """The object that already exists for the name, or None; loading does not change it."""
        found = self.resolve(name, digest) if self.resolve else None
        if found is not None:
            self.kept[id(found)] = found
        return found


_LOADING: ContextVar[Loading] = ContextVar("loading")


@contextlib.contextmanager
def loading(main: dict[str, Any], resolve: Resolve | None = None, *, registers: bool = True) -> Iterator[Loading]:
    """While this is open, ``main`` is the globals of rebuilt notebook functions."""
    context = Loading(main, resolve, registers)
    token = _LOADING.set(context)
    try:
        yield context
    finally:
        _LOADING.reset(token)


def same(value: Any) -> Any:
    """``value``: for an object that travels as another object."""
    return value


def function(code: types.CodeType, cells: tuple[types.CellType, ...], scope: Any, digest: str) -> Any:
    """A function without its state. ``scope``: its globals (``Scope``), their module, None for the notebook's names."""
    context = _LOADING.get()
    if scope is None and not cells:
        found = context.existing(getattr(code, "co_qualname", code.co_name), digest)
        if isinstance(found, types.FunctionType):
            return found
    namespace = context.main if scope is None else scope.names if isinstance(scope, Scope) else vars(scope)
    namespace.setdefault("__builtins__", __builtins__)
    return types.FunctionType(code, namespace, code.co_name, None, cells or None)


def set_function(target: types.FunctionType, state: dict[str, Any]) -> None:
    """Set globals, closure and attributes; they may refer to the function."""
    context = _LOADING.get()
    kept = id(target) in context.kept
    scope = context.main if kept else target.__globals__
    for name, value, _ in state["globals"]:
        scope[name] = value
    if kept:
        return
    if state["scope"] is not None:
        references = codes.references(target.__code__)
        state["scope"].used.update(dict.fromkeys({**references.loads, **references.stores}))
    for cell, content in state["cells"]:
        cell.cell_contents = content
    target.__dict__.update(state["dict"])
    for name, value in state["attributes"].items():
        setattr(target, name, value)


def cell() -> types.CellType:
    """An empty closure cell."""
    return types.CellType()


def set_cell(target: types.CellType, content: Any) -> None:
    target.cell_contents = content


def class_skeleton(*parts: Any) -> type:
    """A class without its attributes, so that they can refer to it. ``parts`` end with its name and digest."""
    *arguments, qualname, digest = parts
    found = _LOADING.get().existing(qualname, digest)
    if isinstance(found, type):
        return found
    made = classes.make(*arguments)
    with contextlib.suppress(TypeError, AttributeError):
        made.__module__, made.__qualname__ = arguments[3]["__module__"], qualname
    if "<locals>" not in qualname:
        _LOADING.get().made[qualname, digest] = made
    return made


def is_kept(target: Any) -> bool:
    """Whether the object existed before: loading does not change it."""
    return id(target) in _LOADING.get().kept


def set_class(target: type, state: tuple[dict[str, Any], dict[str, dict[str, Any]]]) -> None:
    """Set the attributes, but leave a class alone that existed before."""
    if not is_kept(target):
        classes.set_attributes(target, *state)


def enum_member(kind: Any, name: str) -> Any:
    return kind.__members__[name]


def cached_property(kind: type, attributes: dict[str, Any]) -> Any:
    """A ``functools.cached_property``; that of Python 3.11 has a lock of its process."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    if "lock" in vars(functools.cached_property(len)):
        made.lock = threading.RLock()
    return made


def proxy(build: Callable[..., Any], *parts: Any) -> Any:
    """A proxy of a manager, which runs in a process of the same machine."""
    import multiprocessing

    *rest, words, key = parts
    return build(*rest, {**words, "authkey": type(multiprocessing.current_process().authkey)(key)})


def share_attributes(target: Any, attributes: dict[str, Any]) -> None:
    """Give the object the dictionary itself: other objects may refer to it, and it may be the object."""
    object.__setattr__(target, "__dict__", attributes)


def lru_cache(wrapped: Any, maxsize: int | None, typed: bool) -> Any:
    """An empty ``functools.lru_cache`` around the function."""
    return functools.lru_cache(maxsize, typed)(wrapped)


def set_attributes(target: Any, attributes: dict[str, Any]) -> None:
    target.__dict__.update(attributes)


def operator(name: str, schema: str, kinds: list[str | None], tags: list[str]) -> Any:
    """Register an operator of ``torch.library``; ``set_operator`` adds its functions."""
    from ..torch_private import operators

    context = _LOADING.get()
    if not context.registers and (found := operators.operators().get(name)) is not None:
        context.kept[id(found)] = found
        return found
    return operators.make_operator(name, schema, kinds, tags)


def set_operator(target: Any, functions: dict[str, Any]) -> None:
    from ..torch_private import operators

    if id(target) not in _LOADING.get().kept:
        operators.set_operator_functions(target, functions)


def operator_of(home: str, name: str) -> Any:
    """The operator that the module ``home`` registers."""
    from ..torch_private import operators

    importlib.import_module(home)
    return operators.operators()[name]


def weak_reference(target: Any) -> Any:
    import weakref

    return weakref.ref(target) if target is not None else weakref.ref(type("Dead", (), {})())


def weak_proxy(target: Any) -> Any:
    import weakref

    return weakref.proxy(target if target is not None else type("Dead", (), {})())


def module(name: str) -> types.ModuleType:
    """The module, imported."""
    if name not in sys.modules:
        __import__(name)
    return sys.modules[name]


def namespace() -> dict[str, Any]:
    """The notebook's names."""
    return _LOADING.get().main


def owned(of: str, name: str, content: Any) -> Any:
    """The module's own object, with the items that it has in the notebook. A copy where nothing may be changed."""
    value = original(of, name)
    if content is None or type(value) is not type(content):
        return value
    if not _LOADING.get().registers:
        return content
    attributes.refill(value, content)
    return value


def original(of: str, name: str) -> Any:
    """The module's own attribute: when the stream is loaded, nothing has replaced it yet."""
    return getattr(module(of), name)


def made_module(name: str, registered: bool) -> types.ModuleType:
    """An empty module for one that travels by value. ``registered``: on a rank, ``import`` finds it."""
    made = types.ModuleType(name)
    made.__dict__["__builtins__"] = __builtins__
    if registered and _LOADING.get().resolve is None:
        sys.modules.setdefault(name, made)
    return made


def set_module(target: types.ModuleType, state: dict[str, Any]) -> None:
    """Give the module exactly the names in ``state``."""
    names = vars(target)
    for name in names.keys() - state.keys() - {"__builtins__"}:
        del names[name]
    names.update(state)


class Scope:
    """The globals of functions that are neither the notebook's nor a module's, for example of a file that ``%run`` ran.

    ``names`` is the dictionary itself; ``used`` are the names that travel."""

    __slots__ = ("names", "used")

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.used: dict[str, None] = {}

    def items(self) -> Iterator[tuple[str, Any]]:
        return ((name, self.names[name]) for name in self.used if name in self.names)


def scope(names: dict[str, Any]) -> Scope:
    """A namespace without the names that functions use; those follow with the functions."""
    return Scope({**names, "__builtins__": __builtins__})


class Storage:
    """Bytes that tensors share. ``start`` and ``stop`` limit the captured part of the untyped storage, in bytes."""

    __slots__ = ("start", "stop", "untyped")

    def __init__(self, untyped: Any, start: int, stop: int) -> None:
        self.untyped, self.start, self.stop = untyped, start, stop

    @property
    def address(self) -> int:
        return int(self.untyped.data_ptr()) + self.start

    @property
    def size(self) -> int:
        return self.stop - self.start


def storage(buffer: Any) -> Storage:
    """A storage over a mapped buffer. A small buffer is copied into memory of its own, which can be resized."""
    import torch

    size = len(buffer)
    if size == 0:
        return Storage(torch.empty(0, dtype=torch.uint8).untyped_storage(), 0, 0)
    if isinstance(buffer, bytes):
        buffer = bytearray(buffer)
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    if isinstance(buffer, bytearray):
        flat = flat.clone()
    return Storage(flat.untyped_storage(), 0, size)


def tensor(
    kind: type, over: Storage, dtype: Any, offset: int, size: Any, stride: tuple[int, ...], requires_grad: bool
) -> Any:
    """A view of the storage. ``offset`` counts elements from the start of the captured part."""
    import torch

    value: Any = torch.empty(0, dtype=dtype, device="cpu")
    value = value.set_(over.untyped, offset + over.start // value.element_size(), size, stride)
    if kind is not torch.Tensor:
        from ..torch_private.tensors import make_subclass

        return make_subclass(kind, value, requires_grad)
    return value.requires_grad_(True) if requires_grad else value


def set_tensor(target: Any, state: tuple[Any, dict[str, Any], dict[str, Any]]) -> None:
    grad, attributes, hooks = state
    for name, known in hooks.items():
        setattr(target, name, known)
    if grad is not None:
        target.grad = grad
    target.__dict__.update(attributes)


def bare_instance(kind: Any) -> Any:
    return kind.__new__(kind)


def set_parametrized(target: Any, state: dict[str, Any]) -> None:
    """Set a module's state, and make its class with the computed tensors unless it already has one."""
    for name in target.__dict__.keys() - state.keys():
        del target.__dict__[name]
    target.__dict__.update(state)
    if type(target).__module__ != "torch.nn.utils.parametrize":
        from ..torch_private.tensors import restore_parametrized_class

        restore_parametrized_class(target)


def set_optimizer(target: Any, state: tuple[Any, tuple[dict[str, Any], bool, bool | None]]) -> None:
    """Set an optimizer's state, its hooks, and the mark that a scheduler left on its ``step``."""
    own, (hooks, watched, called) = state
    target.__setstate__(own)
    target.__dict__.update(hooks)
    if called is not None:
        target._opt_called = called
    if watched and not hasattr(target.step, "_wrapped_by_lr_sched"):
        target.step = _watched_step(target)


def _watched_step(optimizer: Any) -> Any:
    """``step`` as ``LRScheduler.__init__`` wraps it (torch/optim/lr_scheduler.py), with a weak reference only."""
    import weakref

    reference, inner = weakref.ref(optimizer), optimizer.step.__func__

    @functools.wraps(inner)
    def step(*args: Any, **kwargs: Any) -> Any:
        own = reference()
        assert own is not None
        own._opt_called = True
        return inner(own, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def display_handle(ident: str) -> Any:
    """The notebook's handle of an output. A process without IPython has a plain object in its place."""
    made = getattr(sys.modules.get("IPython.display"), "DisplayHandle", types.SimpleNamespace)
    return made(display_id=ident)


def memmap(path: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], order: Any) -> Any:
    """A ``numpy.memmap`` of the same file."""
    import numpy

    return numpy.memmap(path, dtype, mode, offset, shape, order)


def exception(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    """An exception made with ``__new__`` and ``__init__`` of its built-in base; the class's own do not run again."""
    base = next(base for base in kind.__mro__ if not base.__flags__ & (1 << 9))
    made: BaseException = base.__new__(kind, *arguments)
    with contextlib.suppress(TypeError, ValueError):
        base.__init__(made, *arguments)  # type: ignore[misc]
    made.args = arguments
    return made


def set_exception(target: BaseException, state: dict[str, Any]) -> None:
    for name, value in state["fields"].items():
        with contextlib.suppress(TypeError, AttributeError):
            object.__setattr__(target, name, value)  # the class may be frozen
    target.__dict__.update(state["dict"])
    target.__cause__, target.__context__ = state["cause"], state["context"]
    target.__suppress_context__ = state["suppress"]
