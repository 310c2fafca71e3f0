"""``@distributed`` and ``launch``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

from ..client.job import Job
from ..client.submit import Request, submit
from ..protocol.errors import TorchDistError
from ..protocol.spec import Options
from ..ranks import nested
from ..ranks.execution import yields
from ..verbs import planned
from . import following
from .keywords import options_of

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
Item = TypeVar("Item")


def _keeping_nothing(call: Callable[P, R]) -> Callable[P, R]:
    """``call`` without variables in its traceback: an exception may exist until the session ends.

    Our own errors say what to do, so only the caller's frames are above them.
    """

    @functools.wraps(call)
    def outer(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            del args, kwargs
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, TorchDistError):
                raise error.with_traceback(None) from error.__cause__
            raise

    return outer


class _Untyped:
    """What no function returns: only one whose type is not known fits it."""


class Distributed(Generic[P, R]):
    """A function that runs in this process when called, and on ranks with ``distributed`` and ``submit``."""

    __name__: str

    def __init__(self, function: Callable[P, R], options: Options, keywords: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function, self.options, self.keywords = function, options, dict(keywords)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return nested.decorated, (self.function, self.keywords)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Request:
        return call_of(self.function, args, kwargs, self.options)

    @overload
    def distributed(self: Distributed[P, _Untyped], *args: P.args, **kwargs: P.kwargs) -> Any: ...

    @overload
    def distributed(  # type: ignore[overload-overlap]
        self: Distributed[P, Iterator[Item]], *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[list[Item]]: ...

    @overload
    def distributed(  # type: ignore[overload-overlap]
        self: Distributed[P, AsyncIterator[Item]], *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[list[Item]]: ...

    @overload
    def distributed(
        self: Distributed[P, Coroutine[Any, Any, Item]], *args: P.args, **kwargs: P.kwargs
    ) -> list[Item]: ...

    @overload
    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[R]: ...

    @_keeping_nothing
    def distributed(self, *args: Any, **kwargs: Any) -> Any:
        """Run on every rank and return the values by rank. Shows the job; waits for its end.

        A function with ``yield`` gives an iterator: each item is a list by rank, there as soon as every rank yielded
        it. With ``collect="rank0"`` there is rank 0's value alone. With ``background=True`` the result is the job.

        Raises what the first failing rank raised, ``TypeError`` for wrong arguments before anything starts,
        ``UserError`` that names the part of a value that cannot be pickled.
        """
        return run(self._call(args, kwargs))

    @_keeping_nothing
    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Run in the background. ``job.wait()`` or ``await job``, then ``job.values()``; ``job.items()``."""
        return submit(self._call(args, kwargs))


@overload
def distributed(function: Callable[P, R], /) -> Distributed[P, R]: ...


@overload
def distributed(**options: Any) -> Callable[[Callable[P, R]], Distributed[P, R]]: ...


def distributed(function: Any = None, /, **options: Any) -> Any:
    """``@distributed(ranks=2)``: see ``Distributed``. The options are those of ``%%distribute``, by the same names.

    ``gpu_type="A10"`` chooses GPUs by their name. ``remote=True`` chooses among the hosts of ``torchdist.toml``,
    ``remote=False`` keeps to this machine. Raises ``OptionError`` at once for invalid options.
    """
    checked = options_of(**{"collect": "all", **options})
    made = functools.partial(Distributed, options=checked, keywords=options)
    return made if function is None else made(function)


@_keeping_nothing
def launch(function: Callable[..., R], args: Sequence[Any] = (), **options: Any) -> list[R]:
    """Run ``function(*args)`` on every rank and return the values by rank (as ``accelerate.notebook_launcher``).

    Raises ``TypeError`` if ``args`` is a single argument instead of a tuple, or does not fit the function.
    """
    if not isinstance(args, (tuple, list)):
        name = getattr(function, "__name__", "function")
        given = type(args).__name__
        raise TypeError(f"launch takes the arguments as a tuple: write launch({name}, (argument,)), not {given}")
    return run(call_of(function, tuple(args), {}, options_of(**{"collect": "all", **options})))  # type: ignore[no-any-return]


def call_of(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    through: Callable[..., Any] | None = None,
) -> Request:
    """The call of ``function`` on every rank. Raises ``TypeError`` if the arguments do not fit it.

    ``through``: what the ranks call instead, with (function, args, kwargs).
    """
    label = getattr(function, "__qualname__", type(function).__name__)
    with contextlib.suppress(ValueError):  # a built-in without a signature
        signature = inspect.signature(function)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{label}{signature}: {error}") from None
    if through is not None:
        function, args, kwargs = through, (function, args, kwargs), {}
    request = Request(label=label, options=options, kind="function", function=function, args=args, kwargs=kwargs)
    return following.placed(request)


def run(request: Request) -> Any:
    """The values by rank; an iterator of items for a generator; the job with ``background``; [] with ``plan``."""
    if request.options.plan:
        print(planned.text(request))
        return []
    if request.options.background:
        return submit(request)
    return following.items(request) if yields(request.function) else following.values(request)
