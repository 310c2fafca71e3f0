"""The interface of a staged model for passages and schedules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from ...torch_private.places import FakeTensorMode
from .flow import Flow
from .schedules import StageLayout
from .wires import Wires


class StagedModel(Protocol):
    """A model that is divided into stages; ``stages.Pipeline`` is one."""

    root: nn.Module
    layout: StageLayout
    wires: Wires
    within: Callable[[], AbstractContextManager[None]]
    """The context in which forwards and backwards run."""

    @property
    def fake_mode(self) -> FakeTensorMode: ...

    @property
    def in_fp32(self) -> bool:
        """Whether outputs of lower precision are cast to fp32."""

    def precision(self) -> AbstractContextManager[Any]: ...

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages."""

    def tied(self) -> list[tuple[nn.Parameter, list[int]]]:
        """Parameters of this rank that other ranks also have, each with all its ranks."""

    def cut_inputs(self, values: Any, rows: slice) -> Any: ...

    def as_given(self, output: Tensor) -> Tensor:
        """An output as the cell gets it."""

    def flow_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow: ...

    def run_stage(
        self, flow: Flow, stage: int, received: dict[int, Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, dict[int, Tensor]]:
        """Run one stage on one microbatch: returns outputs (in the last stage), and tensors for the next stage."""
