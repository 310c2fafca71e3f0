"""``@ray_launch``: a function as the driver of a Ray cluster on the nodes of a job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from ..client.submit import Request
from ..protocol.errors import OptionError
from ..ranks import ray_cluster
from .decorated import Distributed, call_of
from .keywords import options_of

P = ParamSpec("P")
R = TypeVar("R")


class RayLaunched(Distributed[P, R]):
    """Like ``Distributed``, but the function runs once, on rank 0, with Ray on all nodes of the job."""

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Request:
        return call_of(self.function, args, kwargs, self.options, through=ray_cluster.drive)


def ray_launch(function: Any = None, /, **options: Any) -> Any:
    """``@ray_launch(gpus=16)``: starts Ray on the nodes of a job, runs the function as its driver, ends Ray.

    ``RAY_ADDRESS`` is set in the function, so ``ray.init()`` finds the cluster. ``f.distributed(…)`` gives a list by
    rank: the function's value, then None for each other rank. The options are those of ``@distributed``.
    """
    if options.get("strategy") not in (None, "none"):
        raise OptionError("@ray_launch takes no strategy: Ray starts the workers that train", "leave strategy out")
    checked = options_of(**{"collect": "all", **options})
    made: Callable[[Any], Any] = functools.partial(RayLaunched, options=checked, keywords=options)
    return made if function is None else made(function)
