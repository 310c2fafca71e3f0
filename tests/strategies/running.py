"""Cells run as a notebook runs them: submitted, driven, on real ranks, their values brought back."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_torchdist.client import Request, submit
from jupyter_torchdist.protocol.errors import TorchDistError
from jupyter_torchdist.protocol.spec import Options

from .traces import Trace, trace

CELLS = Path(__file__).parents[1] / "cells"
PATIENCE = 180.0


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the notebook's names after it, what rank 0 printed, and the exception, if there was one."""

    state: str
    names: Mapping[str, Any]
    printed: str
    errors: str
    """Rank 0's standard error."""
    error: BaseException | None
    said: tuple[str, ...] = ()
    """What the strategy says."""

    @property
    def refusal(self) -> str:
        """The words of a refusal by the product; empty for anything else."""
        return str(self.error) if isinstance(self.error, TorchDistError) else ""


def text_of(name: str) -> str:
    """The cell ``tests/cells/NAME.py``."""
    return (CELLS / f"{name}.py").read_text(encoding="utf-8")


def all_cells() -> list[str]:
    return sorted(path.stem for path in CELLS.glob("*.py"))


@contextlib.contextmanager
def notebook() -> Iterator[dict[str, Any]]:
    """The names of an empty notebook, for as long as the block: ``__main__`` of this process."""
    before, main = sys.modules["__main__"], types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        yield vars(main)
    finally:
        sys.modules["__main__"] = before


def run_cell(
    text: str, options: Options, names: Mapping[str, Any] | None = None, patience: float = PATIENCE
) -> Outcome:
    """Submit ``text`` from a notebook that knows ``names``, and wait for its end."""
    with notebook() as namespace:
        namespace.update(names or {})
        job = submit(Request(text, "Cell In[3]", 2, options, namespace))
        state = job.wait(patience).state
        error = job.exception()
        if state == "succeeded":
            job.bring(namespace)
        return Outcome(state, _bound(namespace), job.logs(0, "out"), job.logs(0, "err"), error, tuple(job.state.notes))


def run_here(text: str) -> tuple[dict[str, Any], str]:
    """Run a cell in this process, alone: the names it bound and what it printed."""
    said = io.StringIO()
    with notebook() as namespace, contextlib.redirect_stdout(said):
        exec(compile(text, "Cell In[3]", "exec"), namespace)
    return _bound(namespace), said.getvalue()


def run_alone(texts: Mapping[str, str]) -> dict[str, Trace]:
    """What each cell leaves on one device: all of them on one rank without a strategy, one after another."""
    names = {"texts": dict(texts), "run_here": run_here, "trace": trace}
    text = "traces = {name: trace(*run_here(text)) for name, text in texts.items()}\n"
    outcome = run_cell(text, Options(ranks=1, env=("OMP_NUM_THREADS=1",)), names)  # as each of two ranks has
    if outcome.error is not None:
        raise outcome.error
    traces: dict[str, Trace] = outcome.names["traces"]
    return traces


def _bound(namespace: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in namespace.items() if not name.startswith("__")}
