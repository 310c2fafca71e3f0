"""Random numbers: the states of the generators of torch, Python and NumPy that the user seeded.

Every rank starts with the state of a generator that the notebook *seeded*, as ranks under torchrun have the same
numbers if their script seeds. An unseeded generator does not travel: each rank has its own numbers (a strategy gives
all ranks the same). Otherwise a Monte Carlo cell would draw the same samples on all ranks.

A generator counts as seeded if

* torch: its seed is below 2**32. A default seed has 53 random bits.
* NumPy: its bit generator has no entropy object, because ``numpy.random.seed`` removes it.
* any: a cell that ran calls its ``seed``, ``setstate`` or ``set_state``, or a function with ``seed`` in its name
  (``seed_everything(0)``: all three), with an argument. The text is needed because Python's generator does not store
  its seed, and no generator shows that a saved state was loaded.
"""

from __future__ import annotations

import functools
import random
import re
import sys
from collections.abc import Iterable
from typing import Any

from .base import Adapter, Place, State

_CALL = re.compile(r"(?<!def )(?<![\w.])((?:\w+\.)*)(\w*seed\w*|set_?state)[ \t]*\(\s*[^)\s]")
_ALL = ("torch", "NumPy", "Python")
_OWNERS = {
    "random": ("Python",),
    "np.random": ("NumPy",),
    "numpy.random": ("NumPy",),
    "torch": ("torch",),
    "torch.random": ("torch",),
    "": ("NumPy", "Python"),
}
"""The generators that ``owner.seed(…)`` seeds; without an owner, ``seed`` was imported from one of two modules."""

_known: set[str] = set()
"""Generators whose state came here from another process."""

_waiting: list[Any] = []
"""[state of the GPU generator from the ranks, torch's seed for GPUs at that time], while CUDA is not initialized."""


def read(place: Place) -> State:
    """The states of the seeded generators."""
    seeded = _known | _told(place.texts)
    state: State = {"Python": random.getstate()} if "Python" in seeded else {}
    numpy_random: Any = sys.modules.get("numpy.random")
    torch: Any = sys.modules.get("torch")
    if numpy_random and ("NumPy" in seeded or (place.rank is None and not _has_entropy(numpy_random))):
        name, keys, *rest = numpy_random.get_state()
        state["NumPy"] = (name, keys.tobytes(), *rest)
    if torch and ("torch" in seeded or torch.initial_seed() < 2**32):
        state["torch"] = (torch.initial_seed(), bytes(torch.get_rng_state().numpy()))
        state |= _gpu(torch)
    return state


def _has_entropy(numpy_random: Any) -> bool:
    """Whether NumPy's generator has entropy, and so no seed. Ranks seed NumPy again and have none."""
    generator = numpy_random.mtrand._rand._bit_generator
    return getattr(generator, "seed_seq", getattr(generator, "_seed_seq", None)) is not None


def _gpu(torch: Any) -> State:
    """The state of the GPU generator. Before CUDA is initialized: the state from the ranks, unless seeded since."""
    if torch.cuda.is_initialized():
        return {"GPU": bytes(torch.cuda.get_rng_state().numpy())}
    if _waiting and _waiting[1] is _waiting_seed():
        return {"GPU": _waiting[0]}
    return {}


def _waiting_seed() -> Any:
    from ..torch_private.settings import seed_for_gpus

    return seed_for_gpus()


def write(state: State, place: Place) -> None:
    """Continue from ``state``. This does not initialize CUDA: torch keeps a seed for later."""
    _known.update(state.keys() - {"torch", "GPU"})
    if "torch" in state:
        _set_torch(*state["torch"])
    if "GPU" in state:
        _set_gpu(state["GPU"], place)
    if "NumPy" in state:
        import numpy

        name, keys, *rest = state["NumPy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))
    if "Python" in state:
        random.setstate(state["Python"])


def _set_torch(seed: int, value: bytes) -> None:
    torch = sys.modules["torch"]
    if seed >= 2**32:
        _known.add("torch")
    if seed != torch.initial_seed():
        torch.cuda.manual_seed_all(seed)
    torch.set_rng_state(_tensor(value))


def _set_gpu(value: bytes, place: Place) -> None:
    torch = sys.modules["torch"]
    if place.rank is not None or torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_tensor(value))
    else:
        _waiting[:] = [value, _waiting_seed()]


def _tensor(value: bytes) -> Any:
    torch = sys.modules["torch"]
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _told(texts: Iterable[str]) -> set[str]:
    """The generators that the code in ``texts`` seeds."""
    found: set[str] = set()
    for text in texts:
        if "seed" in text or "state" in text:
            found |= _seeded_in(text)
    return found


@functools.lru_cache(maxsize=4096)
def _seeded_in(text: str) -> frozenset[str]:
    return frozenset(one for owner, name in _CALL.findall(text) for one in _seeds(owner[:-1], name))


def _seeds(owner: str, name: str) -> tuple[str, ...]:
    """The generators that a call of ``owner.name`` seeds."""
    if name in ("seed", "setstate", "set_state"):
        return () if owner.startswith("torch") else _OWNERS.get(owner, ())  # torch.seed() takes no seed
    if name in ("manual_seed", "manual_seed_all"):
        return _OWNERS.get(owner, ()) if owner.startswith("torch") else ()
    return () if name == "initial_seed" else _ALL


ADAPTER = Adapter("random state", "random", read, write, {})
