"""``@distributed`` in a rank. The decorated function runs in this rank when called; a rank starts no job."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ..protocol.errors import UserError
from ..strategies.core import rank_context
from . import api


def in_rank() -> bool:
    """Whether this process is a rank of a job."""
    return rank_context.current is not None


def decorated(function: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    """``function`` with ``@distributed(**keywords)``: what a pickled one becomes, here or in a rank."""
    if not in_rank():
        try:  # a node has the rooms of a rank only
            return importlib.import_module("jupyter_torchdist.functions.decorated").distributed(**keywords)(function)
        except ImportError:
            pass
    return Decorated(function, keywords)


def distributed(function: Callable[..., Any] | None = None, /, **keywords: Any) -> Any:
    """The decorator, for modules that a rank imports."""
    return functools.partial(Decorated, keywords=keywords) if function is None else Decorated(function, keywords)


class Decorated:
    """A decorated function in a rank."""

    def __init__(self, function: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function, self.keywords = function, dict(keywords)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return decorated, (self.function, self.keywords)

    def distributed(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused."""
        raise refusal(f"{_name(self.function)}.distributed()", f"{_name(self.function)}(…)")

    def submit(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused."""
        raise refusal(f"{_name(self.function)}.submit()", f"{_name(self.function)}(…)")


def launch(function: Callable[..., Any], *_args: Any, **_options: Any) -> NoReturn:
    """Refused: ``launch`` in a rank."""
    raise refusal(f"launch({_name(function)})", f"{_name(function)}(…)")


class TorchDistributor:
    """Refused when it runs: ``TorchDistributor`` in a rank."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Modules that a rank imports may make one."""

    def run(self, main: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused."""
        name = _name(main) if callable(main) else str(main)
        raise refusal(f"TorchDistributor.run({name})", f"{name}(…)")


ray_launch = distributed


def refusal(call: str, instead: str) -> UserError:
    """The error for ``call``, which would start a job, in a rank."""
    return UserError(
        f"{call} was called in rank {api.rank} of a job; ranks start no jobs",
        f"call {instead}, which runs in this rank, or start the job from the notebook",
    )


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
