"""Runs at Weights & Biases, or in its local files (``WANDB_MODE=offline``)."""

from __future__ import annotations

import netrc
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..protocol.errors import OptionError
from .base import FAILED, FINISHED, Opened, Point, Run, needs

STEP = "global_step"
"""The curve that is the x axis of all others. Points of several ranks do not come in order of their steps."""

_CODES = {FINISHED: 0, FAILED: 1}
_KILLED = 255
_WITHOUT_KEY = ("offline", "dryrun", "disabled", "shared")


class WandbTracker:
    """WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_DIR and its other variables have effect."""

    def __init__(self) -> None:
        self._run: Any = None

    def check(self, environ: Mapping[str, str]) -> None:
        needs("wandb", "wandb")
        if environ.get("WANDB_MODE") not in _WITHOUT_KEY and not _has_key(environ):
            raise OptionError(
                "--track wandb: no API key is known, so no run can be begun",
                "run `wandb login` or set WANDB_API_KEY; WANDB_MODE=offline writes local files",
            )

    def open(self, run: Run, place: str) -> Opened:
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, init_timeout=30
        )
        self._run = wandb.init(
            id=run.job, name=run.name, resume="allow", config={**run.params, **run.tags}, settings=settings
        )
        self._run.define_metric("*", step_metric=STEP)
        files = str(Path(self._run.dir).parent)
        link = self._run.url or files
        return Opened(link, link, fresh=not place, later=f"wandb sync {files}")

    def log(self, points: Sequence[Point]) -> None:
        rows: dict[tuple[int, float], dict[str, float]] = {}
        for one in points:
            rows.setdefault((one.step, one.t), {})[one.name] = one.value
        for (step, t), values in rows.items():
            self._run.log({**values, STEP: step, "_timestamp": t})

    def tag(self, tags: Mapping[str, str]) -> None:
        self._run.config.update(dict(tags), allow_val_change=True)

    def file(self, path: Path, name: str) -> None:
        target = Path(self._run.dir) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        self._run.save(str(target), base_path=self._run.dir, policy="now")

    def close(self, state: str, ended: float) -> None:
        self._run.finish(exit_code=_CODES.get(state, _KILLED))


def _has_key(environ: Mapping[str, str]) -> bool:
    """As wandb looks for it: the variable, then the file that ``wandb login`` writes."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.path.expanduser(environ.get("NETRC", "~/.netrc"))).authenticators(host) is not None
    return False
