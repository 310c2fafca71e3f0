"""The findings of a rehearsal of a cell's first step, and the memory that a rank needs. All sizes in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .typed import Record


@dataclass(frozen=True)
class ParameterSize:
    """One parameter of a trained model: complete, or the part that a rank of ``tp`` has."""

    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    sharded: bool
    """Whether the strategy shards it; a 0-dim parameter is not sharded."""
    state: int
    """Optimizer state for each element of the parameter."""
    state_whole: int = 0
    """Optimizer state of another shape, which every rank has completely."""
    split: int = 1
    """How many ranks of ``tp`` have a part of this shape."""


@dataclass(frozen=True)
class Rehearsed(Record):
    """One step of the cell on one rank (in a pipeline: the fullest rank), under one strategy."""

    parameters: tuple[ParameterSize, ...] = ()
    buffers: int = 0
    batch: int = 0
    """Other memory of the rank when its step begins: the batch, tensors that the cell made."""
    activations: int | None = None
    """Memory kept for the backward when it begins, with outputs and loss. None if the step was not rehearsed."""
    working: int | None = None
    """The peak of forward, backward and the optimizer's step, gradients included, in addition to parameters, optimizer
    state, buffers and batch."""
    elsewhere: int = 0
    """Parameters of other stages of a pipeline, which a rank holds until its first step."""
    trying: int = 0
    """Additional memory in a rank's first step, which compares the divided model with the complete model."""
    offloaded: bool = False
    """Whether parameters, gradients and optimizer state are in host memory instead of on the GPU."""
    outlined: bool = False
    """Whether models are built without values (``td.meta``): no rank holds a complete model."""
    samples: int | None = None
    """The number of samples in the global batch."""
    reason: str = ""
    """Why the step could not be rehearsed, or not completely."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Need:
    """The memory of the fullest rank. ``peak`` and ``activations`` are None if the step could not be rehearsed."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int | None
    peak: int | None
    building: int
    """Memory in the first step while the model is undivided, in addition to the batch; 0 if it never is."""
    offloaded: bool = False
    """Whether parameters, gradients and optimizer state are in host memory, and so not in the peak."""

    @property
    def least(self) -> int:
        """The memory that is surely needed: the peak if it is known."""
        states = 0 if self.offloaded else self.parameters + self.gradients + self.optimizer
        return states + self.buffers if self.peak is None else self.peak


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a job and the verdict on it; ``--plan`` prints it."""

    ranks: int
    need: Need
    room: int | None
    """The memory that a rank may use: its GPU's, or its part of the machine's; None if unknown."""
    where: str
    """Whose memory ``room`` is."""
    fits: bool | None
    """None if ``room`` is unknown, or if a part that was not rehearsed may decide."""
    verdict: str
    notes: tuple[str, ...] = ()


def elements(shape: tuple[int, ...], ranks: int = 1) -> int:
    """Elements of the largest of ``ranks`` shards; ``fully_shard`` cuts and pads along the first dimension."""
    if not shape:
        return 1
    return -(-shape[0] // ranks) * math.prod(shape[1:])
