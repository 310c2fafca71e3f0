"""When models that fsdp has sharded are gathered: for gradients of gradients, and not for the eyes of user code.

A gradient with ``create_graph`` leaves a graph that still needs the gathered parameters, and FSDP frees them as soon as
a backward through the model is over. So they stay gathered from such a gradient to the end of the next backward that
leaves no graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule


class Gathered:
    """``models`` are those of the job; more may come. Every rank does the same at the same time."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._needed = False

    def before(self, *, create_graph: bool) -> None:
        """A backward or a gradient is about to be computed."""
        self._needed = self._needed or create_graph
        if self._needed:
            for unit in self._units():
                unit.set_reshard_after_backward(False, recurse=False)
                unit.unshard()

    def after_backward(self, *, create_graph: bool) -> None:
        """``backward()`` is over, and all gradients are where they belong."""
        if self._needed and not create_graph:
            self._needed = False
            for unit in self._units():
                unit.set_reshard_after_backward(True, recurse=False)
                unit.reshard()

    def let_go(self) -> None:
        """User code changes parameters or looks at gradients: those of shards, also after a forward without a backward.

        What it writes to gathered ones is lost. A backward that does follow gathers them again.
        """
        if not self._needed:
            for unit in self._units():
                unit.reshard()

    def _units(self) -> Iterator[FSDPModule]:
        for model in self._models:
            yield from (module for module in model.modules() if isinstance(module, FSDPModule))
