"""A process that runs a cell's first training steps on fake tensors, and reports the memory that they need.

The client starts it. The first line of standard input is an ``Order`` (JSON) with the cell. Each further line is a
``StrategyPlan``, and is answered by a line with a ``Rehearsed``. Each strategy is tried in its own fork; where a fork
of torch is not safe (macOS), the process ends after the first. The cell may read files. An action that would change
anything outside the process is refused, and ends the rehearsal.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from .. import marshal
from ..protocol.bundle import Manifest
from ..protocol.memory import Rehearsed
from ..protocol.process import PROC
from ..protocol.spec import JobSpec
from ..protocol.strategy import StrategyPlan
from ..ranks import bootstrap, execution
from ..ranks.module_attributes import ModuleAttributes
from ..ranks.notebook_state import Carried
from ..states import Place

SECONDS = 60
"""Time limit for the rehearsal of one strategy."""

_CHANGES = frozenset(
    {
        *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
        *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.kill", "subprocess.Popen"),
        *("shutil.rmtree", "shutil.move", "shutil.copyfile", "socket.connect", "socket.bind", "sqlite3.connect"),
    }
)
"""Events of ``sys.addaudithook`` with effects outside the process."""


@dataclass(frozen=True)
class Order:
    """The first line. ``gpus``: whether the job is planned for GPUs. ``sources``: directory for local modules."""

    spec: dict[str, Any]
    manifest: dict[str, Any]
    blobs: str
    sources: str
    sys_path: list[str]
    gpus: bool


def main() -> None:
    """Answer lines until end of file on standard input."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # the cell's output must not mix with the answers
    warnings.simplefilter("ignore")
    order = Order(**json.loads(sys.stdin.buffer.readline()))
    sys.path[:] = order.sys_path
    _import_torch()
    for line in iter(sys.stdin.buffer.readline, b""):
        child = os.fork() if PROC else 0
        if child == 0:
            _answer(order, StrategyPlan.from_json(json.loads(line)), answers)
        _, status = os.waitpid(child, 0)
        if status:
            ended = f"its process ended with {os.waitstatus_to_exitcode(status)}"
            _write(answers, Rehearsed(reason=ended))


def _import_torch() -> None:
    """Import torch once for all forks. Fake tensors are on the CPU: a rank on a GPU keeps the same number of bytes."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(1)
    from . import steps  # noqa: F401


def _answer(order: Order, plan: StrategyPlan, answers: BinaryIO) -> None:
    """Rehearse, write the answer and exit."""
    try:
        found = rehearse(order, plan)
        _write(answers, found)
    except BaseException as error:  # noqa: BLE001  # top level of a process
        _write(answers, Rehearsed(reason=f"{type(error).__name__}: {error}"))
    os._exit(0)


def _write(answers: BinaryIO, found: Rehearsed) -> None:
    answers.write(json.dumps(found.to_json()).encode() + b"\n")


def rehearse(order: Order, plan: StrategyPlan) -> Rehearsed:
    """Run the cell until its first steps are done. Replaces this process's ``__main__``."""
    import torch
    import torch.distributed as dist

    from ..protocol.errors import TorchDistError
    from ..strategies.already import distributed_by
    from ..strategies.core.context import make_context
    from . import fakes, steps

    spec, manifest = JobSpec.from_json(order.spec), Manifest.from_json(order.manifest)
    module = bootstrap.new_main()
    names = vars(module)
    marshal.load_bundle(manifest, Path(order.blobs), module, source_dir=Path(order.sources))
    ModuleAttributes(names, (), lambda _text: None)
    Carried(names, Place(rank=1), lambda _text: None)  # not rank 0: nothing is written to files
    code = None
    if spec.kind == "cell":
        code = execution.compile_cell(spec.source, spec.label, spec.first_line, manifest.flags)
        if library := distributed_by(code, names):
            return Rehearsed(reason=f"the cell is distributed already ({library})")
    here = steps.smaller(plan)
    _join(math.prod(here.degrees.values()))
    context = make_context(here, torch.device("cpu"), lambda _text: None)
    rehearsal = steps.Rehearsal(plan, context, gpus=order.gpus)
    rehearsal.install()
    rehearsal.take_captured()
    _limit_time()
    guard = _Guard()
    reason = ""
    with ExitStack() as stack:
        for mode in (fakes.OnCpu(), rehearsal.mode, rehearsal.log):
            stack.enter_context(mode)
        try:
            guard.on = True
            if code is not None:
                execution.run_cell(code, names)
            elif spec.kind == "function":
                execution.run_call(names)
            elif spec.kind == "module":
                execution.run_module(spec.source, spec.argv)
            else:
                execution.run_script(spec.source, spec.label, spec.argv, names)
        except fakes.Reached:
            pass
        except (fakes.NotRehearsed, TorchDistError) as error:
            reason = str(error.args[0])
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever user code raises
            reason = f"{_first_line(error)}{fakes.place_of(error)}"
        finally:
            guard.on = False
            signal.alarm(0)
        found = rehearsal.found(reason or guard.reason)
        dist.destroy_process_group()
        return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _join(ranks: int) -> None:
    """Create a fake process group: its peers do not exist, and collectives do nothing."""
    import torch.distributed as dist

    from ..torch_private.places import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def _limit_time() -> None:
    from .fakes import NotRehearsed

    def late(_signum: int, _frame: FrameType | None) -> None:
        raise NotRehearsed(f"its first step took longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)


class _Guard:
    """An audit hook, ``on`` while user code runs. (Audit hooks cannot be removed, but this process ends soon.)"""

    def __init__(self) -> None:
        self.on = False
        self.reason = ""
        """What was refused, also if the cell caught the exception."""
        sys.dont_write_bytecode = True
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        from .fakes import NotRehearsed, place

        what = ""
        if event == "open" and _writes(arguments):
            what = f"it writes the file {arguments[0]}"
        elif event in _CHANGES:
            what = f"it calls {event}"
        if what:
            self.on = False
            self.reason = f"{what}{place()}, which a rehearsal does not do"
            raise NotRehearsed(self.reason)


def _writes(arguments: tuple[Any, ...]) -> bool:
    path, mode, flags = arguments
    if path == os.devnull or isinstance(path, int):
        return False
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


if __name__ == "__main__":
    main()
