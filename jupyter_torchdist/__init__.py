"""Distributed PyTorch from a Jupyter cell: ``%load_ext jupyter_torchdist``, then ``%%distribute --ranks 2``.

Public names are imported on first use (PEP 562). Importing this package therefore loads neither torch in a kernel
nor IPython in a rank.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .checkpoint.export import export as export
    from .checkpoint.loading import load as load
    from .checkpoint.position import follow as follow
    from .checkpoint.saving import save as save
    from .client.job import Job as Job
    from .client.job import attach as attach
    from .functions.decorated import distributed as distributed
    from .functions.decorated import launch as launch
    from .functions.ray_launched import ray_launch as ray_launch
    from .functions.torch_distributor import TorchDistributor as TorchDistributor
    from .ranks.api import barrier as barrier
    from .ranks.api import cp_rank as cp_rank
    from .ranks.api import device as device
    from .ranks.api import dp_rank as dp_rank
    from .ranks.api import gather as gather
    from .ranks.api import is_main as is_main
    from .ranks.api import local_rank as local_rank
    from .ranks.api import local_world_size as local_world_size
    from .ranks.api import log as log
    from .ranks.api import mesh as mesh
    from .ranks.api import node_rank as node_rank
    from .ranks.api import pp_rank as pp_rank
    from .ranks.api import print as print
    from .ranks.api import progress as progress
    from .ranks.api import rank as rank
    from .ranks.api import tp_rank as tp_rank
    from .ranks.api import world_size as world_size
    from .store.catalog import jobs as jobs
    from .strategies.core.meta import meta as meta
    from .strategies.core.stages import stage as stage
    from .strategies.explicit import prepare as prepare
    from .strategies.reducing import reduce_mean as reduce_mean

    last: Job | None

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("distributed", "launch"), ".functions.decorated"),
    "ray_launch": ".functions.ray_launched",
    "TorchDistributor": ".functions.torch_distributor",
    **dict.fromkeys(("Job", "attach"), ".client.job"),
    "jobs": ".store.catalog",
    "last": ".kernel.session",
    **dict.fromkeys(("rank", "local_rank", "world_size", "local_world_size", "node_rank"), ".ranks.api"),
    **dict.fromkeys(("device", "is_main", "log", "progress", "print", "barrier", "gather"), ".ranks.api"),
    **dict.fromkeys(("mesh", "dp_rank", "tp_rank", "cp_rank", "pp_rank"), ".ranks.api"),
    "prepare": ".strategies.explicit",
    "reduce_mean": ".strategies.reducing",
    "export": ".checkpoint.export",
    "follow": ".checkpoint.position",
    "load": ".checkpoint.loading",
    "meta": ".strategies.core.meta",
    "save": ".checkpoint.saving",
    "stage": ".strategies.core.stages",
}

# Without ``print``: a star import must not replace Python's built-in ``print``.
__all__ = [
    "Job",
    "TorchDistributor",
    "attach",
    "barrier",
    "cp_rank",
    "device",
    "distributed",
    "dp_rank",
    "export",
    "follow",
    "gather",
    "is_main",
    "jobs",
    "last",
    "launch",
    "load",
    "load_ipython_extension",
    "local_rank",
    "local_world_size",
    "log",
    "mesh",
    "meta",
    "node_rank",
    "pp_rank",
    "prepare",
    "progress",
    "rank",
    "ray_launch",
    "reduce_mean",
    "save",
    "stage",
    "tp_rank",
    "unload_ipython_extension",
    "world_size",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is not None and home.startswith(".functions.") and _in_rank():
        home = ".ranks.nested"
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home, __name__), name)
    if callable(value):  # a function or class is kept; other values (the rank, the last job) may change
        globals()[name] = value
    return value


def _in_rank() -> bool:
    """Whether this process is a rank: it starts no jobs, and a node does not have what starts them."""
    context: Any = sys.modules.get("jupyter_torchdist.strategies.core.rank_context")
    return context is not None and context.current is not None


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def load_ipython_extension(ip: InteractiveShell) -> None:
    """``%load_ext jupyter_torchdist``: adds the magics and starts a driver zygote. Loading twice is harmless."""
    from .kernel.extension import load

    load(ip)


def unload_ipython_extension(ip: InteractiveShell) -> None:
    """``%unload_ext jupyter_torchdist``. Running jobs continue."""
    from .kernel.extension import unload

    unload(ip)


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Tells a Jupyter server which module is our server extension, without importing it."""
    return [{"module": "jupyter_torchdist.server"}]
