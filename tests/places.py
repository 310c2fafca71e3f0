"""Where the tests of ``tests/integration/gpu`` run their cells: on the GPUs that are here, and on CPU ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jupyter_torchdist.protocol.machine import inventory
from jupyter_torchdist.protocol.spec import Options
from tests.strategies.running import Outcome, run_cell

GPUS = inventory.visible(inventory.gpus(), None)
PATIENCE = 240.0
"""Longer than any step of ``scripts/gpu_check`` may take."""


@dataclass(frozen=True)
class Place:
    """A kind of device, and the options that ask for ranks on it."""

    kind: str
    """As ``torch.device.type``."""
    options: Options

    @property
    def ranks(self) -> int:
        return self.options.gpus or self.options.ranks or 0

    @property
    def line(self) -> str:
        """The options as a line of ``%%distribute``."""
        return f"--gpus {self.ranks}" if self.on_gpu else f"--ranks {self.ranks}"

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    def run(self, source: str, names: dict[str, Any] | None = None, **more: Any) -> Outcome:
        """A cell there that must succeed; ``more`` are further options."""
        outcome = self.end_of(source, names, **more)
        assert outcome.error is None, f"{outcome.error!r}\n{outcome.printed}\n{outcome.errors}"
        return outcome

    def end_of(self, source: str, names: dict[str, Any] | None = None, **more: Any) -> Outcome:
        """A cell there, however it ends."""
        return run_cell(source, replace(self.options, **more), names, PATIENCE)


CPU = Place("cpu", Options(ranks=1))
CPUS = Place("cpu", Options(ranks=2))
GPU = Place("cuda", Options(gpus=1))
ALL_GPUS = Place("cuda", Options(gpus=max(1, len(GPUS))))
