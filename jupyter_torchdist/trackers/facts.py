"""What is known of a job before it runs: parameters and tags of its run."""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Callable, Iterator

from .. import __version__
from ..protocol.bundle import Captured, Manifest
from ..protocol.machine.inventory import installed
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec, Options
from ..store.jobdir import read_manifest, read_plan, read_spec
from .base import Run

Value = str | int | float | bool

_NOT_PARAMETERS = ("track", "remarks", "ignored", "option", "env", "host_option", "name", "watch", "plan", "background")
"""Options that do not describe the training, or whose values may be secret."""

_SIMPLE: dict[str, Callable[[str], Value]] = {"int": int, "float": float, "bool": "True".__eq__}
"""Captured values that are parameters, by type. Texts are none: a key or password may be among them."""


def run_of(paths: JobPaths) -> Run:
    """Raises ``JobNotFound``, ``DamagedJob``."""
    spec, plan, manifest = read_spec(paths), read_plan(paths), read_manifest(paths)
    params = {**dict(_captured(manifest.receipt)), **dict(_options(spec, plan))}
    name = spec.options.name or spec.job
    return Run(spec.job, name, spec.created, params, _tags(spec, manifest), spec.label, spec.git.get("commit", ""))


def _options(spec: JobSpec, plan: Plan) -> Iterator[tuple[str, Value]]:
    """Options that were given, below ``options.``; how many ranks and nodes there are; the arguments of a program."""
    usual = Options().to_json()
    for name, value in spec.options.to_json().items():
        if value != usual[name] and name not in _NOT_PARAMETERS:
            yield f"options.{name}", ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    for text in spec.options.option:
        name, _, value = text.partition("=")
        yield f"options.{name}", value
    if plan.strategy.name != "none":
        yield "options.strategy", plan.strategy.name
    if len(spec.argv) > 1:
        yield "arguments", shlex.join(spec.argv[1:])
    yield "ranks", plan.world_size
    yield "nodes", len(plan.nodes)


def _captured(receipt: tuple[Captured, ...]) -> Iterator[tuple[str, Value]]:
    """Numbers of the notebook. The receipt says ``float 0.001``."""
    for row in receipt:
        kind, _, text = row.what.partition(" ")
        if row.kind == "data" and kind in _SIMPLE and text and not text.startswith("of "):
            yield row.name, _SIMPLE[kind](text)


def _tags(spec: JobSpec, manifest: Manifest) -> dict[str, str]:
    return {
        "torchdist.job": spec.job,
        "torchdist.version": __version__,
        "torchdist.bundle": manifest.stream.digest,
        "torchdist.source": spec.label,
        "python": manifest.python,
        "torch": installed("torch"),
        "user": getpass.getuser(),
        **{f"git.{name}": value for name, value in spec.git.items()},
        **({"torchdist.notebook": spec.notebook} if spec.notebook else {}),
        **({"torchdist.rerun_of": spec.rerun_of} if spec.rerun_of else {}),
        **({"torchdist.checkpoints": spec.options.checkpoint} if spec.options.checkpoint else {}),
    }
