"""Answers to a question that is a program of its own on the node, and not a message to its agent."""

from __future__ import annotations

from dataclasses import dataclass

from ..typed import Record


@dataclass(frozen=True)
class Removed(Record):
    """From ``node/removal.py``. With ``jobs``, which run on the node, nothing was removed."""

    jobs: tuple[str, ...]
    warm: int = 0
    """Warm processes that were ended."""
    paths: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """What is left: directories with files that cells wrote."""


@dataclass(frozen=True)
class Examined(Record):
    """From ``node/examine.py``. Sizes in bytes; an empty text or 0 is what the node does not have or does not tell."""

    name: str
    """What the node calls itself."""
    resolves: tuple[str, ...]
    """Addresses of this name, as the node resolves it."""
    interface: str
    """Over which ssh came."""
    mtu: int
    speed: int
    """Of the interface, in Mbit/s."""
    cuda: str
    """That torch was built with."""
    nccl: str
    driver: str
    """The GPUs' driver."""
    peer_memory: bool
    """Whether the module nvidia_peermem is loaded."""
    acs: int
    """PCI bridges that send traffic between GPUs through the root; -1 where only root can see that."""
    holders: tuple[str, ...]
    """Processes that hold memory of GPUs: of whom, which."""
