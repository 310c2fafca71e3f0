"""Functions on ranks: ``@distributed`` and ``launch``."""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from ..planning.configuration import configured
from ..protocol.spec import BY_FLAG, Options
from .job import Job
from .submit import Request, submit

P = ParamSpec("P")
R = TypeVar("R")


def options_of(**chosen: Any) -> Options:
    """Options from keywords, with the same rules as the words after ``%%distribute``.

    ``ranks=2, fresh=True, exclude=["big"], env={"SEED": "1"}``. Raises ``OptionError`` that names a similar option.
    """
    words: list[str] = []
    for name, value in chosen.items():
        flag = "--" + name.replace("_", "-")
        option = BY_FLAG.get(flag)
        if option is None:
            words.append(flag)  # the parser reports the error and a similar option
        elif option.convert is None:
            words += [flag] if value else []
        elif value is not None:
            words += [f"{flag}={text}" for text in _texts(value, option.repeatable)]
    return configured(words, Path.cwd())


def _texts(value: Any, repeatable: bool) -> Iterable[str]:
    if isinstance(value, Mapping):
        return [f"{name}={item}" for name, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [str(item) for item in value]
        return items if repeatable else [",".join(items)]
    return [str(value)]


def _keeping_nothing(call: Callable[P, R]) -> Callable[P, R]:
    """``call`` without variables in its traceback: an exception may exist until the session ends."""

    @functools.wraps(call)
    def outer(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            del args, kwargs
            traceback.clear_frames(error.__traceback__)
            raise

    return outer


class Distributed(Generic[P, R]):
    """A function that runs in this process when called, and on ranks with ``distributed`` and ``submit``."""

    __name__: str

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        functools.update_wrapper(self, function)
        self.function, self.options = function, options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @_keeping_nothing
    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run on every rank and return the values by rank. Raises what the first failing rank raised."""
        return run(self.submit(*args, **kwargs))

    @_keeping_nothing
    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Run in the background."""
        return submit_call(self.function, args, kwargs, self.options)


def distributed(**options: Any) -> Callable[[Callable[P, R]], Distributed[P, R]]:
    """``@distributed(ranks=2)``: see ``Distributed``. Raises ``OptionError`` at once for invalid options."""
    checked = options_of(**{"collect": "all", **options})
    return lambda function: Distributed(function, checked)


@_keeping_nothing
def launch(function: Callable[..., R], args: Sequence[Any] = (), **options: Any) -> list[R]:
    """Run ``function(*args)`` on every rank and return the values by rank (as ``accelerate.notebook_launcher``).

    Raises ``TypeError`` if ``args`` is a single argument instead of a tuple.
    """
    if not isinstance(args, (tuple, list)):
        name = getattr(function, "__name__", "function")
        given = type(args).__name__
        raise TypeError(f"launch takes the arguments as a tuple: write launch({name}, (argument,)), not {given}")
    return run(submit_call(function, tuple(args), {}, options_of(**{"collect": "all", **options})))


def submit_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options
) -> Job:
    """A job that calls ``function`` on every rank. Raises what ``submit`` raises."""
    label = getattr(function, "__qualname__", type(function).__name__)
    request = Request(label=label, options=options, kind="function", function=function, args=args, kwargs=kwargs)
    return submit(request)


def run(job: Job) -> list[Any]:
    """Wait for a job and return its values by rank. The first interrupt stops the ranks, a second one kills them."""
    try:
        job.wait()
    except KeyboardInterrupt:
        job.interrupt()
        try:
            job.wait(job.spec.options.grace + 5)
        except (KeyboardInterrupt, TimeoutError):
            job.kill()
            raise
        raise
    job.raise_for_state()
    for note in job.bring_state():
        warnings.warn(note, stacklevel=3)
    return job.values() if job.plan.collect == "all" else [job.value]
