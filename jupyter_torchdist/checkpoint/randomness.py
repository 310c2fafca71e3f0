"""The states of a process's random number generators: Python, NumPy, torch on the CPU and on this rank's GPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection
from typing import Any

import torch

State = dict[str, Any]

ON_CPU = ("torch", "python", "numpy")


def capture(names: Collection[str] = (*ON_CPU, "cuda")) -> State:
    """The current states of the generators ``names``: NumPy only if imported, the GPU only if in use."""
    state: State = {}
    if "torch" in names:
        state["torch"] = torch.get_rng_state()
    if "python" in names:
        state["python"] = random.getstate()
    if "numpy" in names and (numpy_random := sys.modules.get("numpy.random")) is not None:
        state["numpy"] = numpy_random.get_state()
    if "cuda" in names and torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: State) -> None:
    """Set the generators to ``state``. The state of a GPU is skipped if there is no GPU."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed(number: int) -> None:
    """Seed the generators on the CPU, NumPy only if imported. ``number``: 0 to 2**64 - 1."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(number % 2**32)


def of_rank(states: list[State], rank: int, ranks: int) -> tuple[State, str]:
    """The state for a rank, from the saved states of all ranks, and a note if the rank had no state of its own.

    A rank that was not there at saving takes the state of rank 0. If the saved states differ, it is seeded with its
    own rank added; if all ranks had equal states, it also has this state.
    """
    if rank < len(states):
        return states[rank], ""
    if all(torch.equal(state["torch"], states[0]["torch"]) for state in states):
        return states[0], ""
    note = f"ranks {len(states)} to {ranks - 1} are not in the checkpoint: they start new random number sequences"
    return _apart(states[0], rank), note


def _apart(state: State, rank: int) -> State:
    generator = torch.Generator()
    generator.set_state(state["torch"])
    generator.manual_seed(generator.initial_seed() + rank)
    return {"torch": generator.get_state(), "python": random.Random(generator.initial_seed()).getstate()}
