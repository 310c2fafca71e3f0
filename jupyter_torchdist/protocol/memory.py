"""What a rehearsal of a cell's first step found, and the memory that a rank needs by it. All sizes in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .typed import Record


@dataclass(frozen=True)
class ParameterSize:
    """One parameter of a trained model: whole, or what a rank of ``tp`` has of it."""

    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    sharded: bool
    """Whether the strategy cuts it; a 0-dim one stays whole."""
    state: int
    """Of the optimizer, for each element of the parameter."""
    state_whole: int = 0
    """Of the optimizer, of another shape: on every rank."""
    split: int = 1
    """Ranks of ``tp`` that have a part of this shape each."""


@dataclass(frozen=True)
class Rehearsed(Record):
    """One step of the cell as a rank (of a pipeline: the fullest) takes it, under one strategy."""

    parameters: tuple[ParameterSize, ...] = ()
    buffers: int = 0
    batch: int = 0
    """What else the rank holds when its step begins: the batch, tensors that the cell made."""
    activations: int | None = None
    """Kept when the backward begins: what it needs, the outputs, the loss. None where the step was not rehearsed."""
    working: int | None = None
    """The most of forward, backward and the optimizer's step, gradients included, above parameters, optimizer state,
    buffers and batch."""
    elsewhere: int = 0
    """Parameters of other stages of a pipeline, which a rank holds until its first step."""
    trying: int = 0
    """What takes a rank's first step to hold the model, divided, against itself as it was, above the whole model."""
    offloaded: bool = False
    """Whether parameters, gradients and optimizer state wait in host memory, beside a GPU."""
    outlined: bool = False
    """Whether models are built without values (``td.meta``): no rank holds one whole."""
    samples: int | None = None
    """Of the global batch."""
    reason: str = ""
    """Why the step could not be rehearsed, or not to its end."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Need:
    """What the fullest rank needs. ``peak`` and ``activations`` are None where the step could not be rehearsed."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int | None
    peak: int | None
    building: int
    """While the model is whole, in the first step, above the batch; nothing where it never is."""
    offloaded: bool = False
    """Whether parameters, gradients and optimizer state are in host memory, and not in the peak."""

    @property
    def least(self) -> int:
        """What is needed for certain: the peak where it is known."""
        states = 0 if self.offloaded else self.parameters + self.gradients + self.optimizer
        return states + self.buffers if self.peak is None else self.peak


@dataclass(frozen=True)
class MemoryPlan:
    """A job's memory, decided: ``--plan`` prints it."""

    ranks: int
    need: Need
    room: int | None
    """What a rank may use: its GPU's memory, or its part of this machine's; None where that is not known."""
    where: str
    """Whose memory that is."""
    fits: bool | None
    """None where no room is known, or where what could not be rehearsed may decide."""
    verdict: str
    notes: tuple[str, ...] = ()


def elements(shape: tuple[int, ...], ranks: int = 1) -> int:
    """Of the largest of ``ranks`` shards, as ``fully_shard`` cuts and pads: along the first dimension."""
    if not shape:
        return 1
    return -(-shape[0] // ranks) * math.prod(shape[1:])
