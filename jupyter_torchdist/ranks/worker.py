"""One rank: from the environment torchrun set up to the values or the exception it leaves behind.

The rank reports by files alone. It never raises into torch elastic (which swallows ``KeyboardInterrupt`` and
pickles exceptions): it returns when it succeeded or was interrupted, and exits with code 1 when it failed, a script
with that of its ``sys.exit``.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

from .. import marshal
from ..protocol import codec
from ..protocol.bundle import Manifest
from ..protocol.events import ErrorRecord
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.process import ProcessId
from ..protocol.spec import PROGRAMS, JobSpec
from ..states import Place
from ..strategies.core import rank_context
from . import api, bootstrap, children, execution, failures, group, shell
from .alone import Alone
from .autolog import Autolog
from .collectives import CollectiveWatch, Marks
from .eventfile import EventFile
from .lastwill import LastWill
from .module_attributes import ModuleAttributes
from .notanumber import FirstNaN
from .notebook_state import Carried
from .results import Questions, Results
from .streams.display import Display
from .streams.flusher import Flusher
from .streams.metrics import Recorder
from .streams.output import Output
from .streams.times import Times

if TYPE_CHECKING:
    import torch

    from ..strategies.core.unrecoverable import Apart

_LAST_SECONDS = 3.0
"""How long a rank that failed or was interrupted may take for the clean-up that user code registered."""


def main(job_root: str, blobs: str, node: str, *, may_connect: Callable[[], None] = lambda: None) -> None:
    """Be the rank that the environment names. Returns on success and after an interrupt, else exits with a code.

    ``may_connect`` returns when the launcher has forked the others.
    """
    bootstrap.lead_a_session()
    rank = Rank(JobPaths(Path(job_root)), Path(blobs), node, may_connect)
    try:
        rank.live()
    except BaseException as error:  # noqa: BLE001  # results that cannot be written; a signal between two steps of ours
        rank.fail(error)


class Rank:
    """The process, as it lives through one job."""

    def __init__(self, paths: JobPaths, blobs: Path, node: str, may_connect: Callable[[], None]) -> None:
        self.number = int(os.environ["RANK"])
        files = paths.node(node)
        self.paths, self.blobs, self.may_connect = paths, blobs, may_connect
        self.events = EventFile(files.rank_events(self.number), self.number)
        self.events.write("rank.started", process=ProcessId.mine().to_json(), local_rank=int(os.environ["LOCAL_RANK"]))
        self.flusher = Flusher()
        self.stacks = files.stacks(self.number)
        bootstrap.default_signals(self.stacks)
        self.times = Times(files.times(self.number), files.out(self.number), files.err(self.number))
        self.output = Output(
            files.out(self.number),
            files.err(self.number),
            self.flusher,
            lambda lines: self.events.write("rank.dropped", lines=lines),
            self.times.written,
        )
        self.flusher.add(self.times)
        self.interrupts = bootstrap.RankInterrupts(self.flusher)
        first_nan = FirstNaN(self.events, files.not_a_number, self.number)
        self.recorder = Recorder(files.metrics(self.number), self.flusher, first_nan)
        self.watch = CollectiveWatch(self.events, Marks(files.waiting, int(os.environ["LOCAL_RANK"])))
        self.autolog = Autolog(self.recorder)
        self.meeting: group.Meeting | None = None
        self.alone: Alone | None = None
        self.display = Display(files.display(self.number))
        self.main = bootstrap.new_main()
        self.flags = 0
        self.program = False
        """Whether user code is a whole program, a script or a module, which ends as one."""
        self.results: Results | None = None
        self.will: LastWill | None = None
        self.part: rank_context.RankContext | None = None

    def live(self) -> None:
        """Prepare, run the user's code, hand over what it left."""
        self.flusher.start()
        try:
            spec = self.prepare()
            self.events.write("rank.ready")
            self.run(spec)
            if self.alone is not None:
                self.alone.end()
            for way in self.ways():
                way.finish(vars(self.main))
            _finish_saving()
            self.begin_to_end()
            _join_threads()
            self.interrupts.disarm()
        except BaseException as error:  # noqa: BLE001  # whatever user code raises
            self.interrupts.disarm()
            if not _ended_well(error):
                for way in self.ways():
                    error = way.explained(error)
                    way.stop(error, vars(self.main))
                self.stopped(error)
                return
        self.succeed()

    def prepare(self) -> JobSpec:
        """Device, process group, captured names: all that comes before user code."""
        spec = JobSpec.from_json(codec.loads(self.paths.spec.read_bytes()))
        plan = Plan.from_json(codec.loads(self.paths.plan.read_bytes()))
        manifest = Manifest.from_json(codec.loads(self.paths.manifest.read_bytes()))
        self.flags = manifest.flags
        self.program = spec.kind in PROGRAMS
        bootstrap.forget_the_parent()
        bootstrap.plain_drawing()
        bootstrap.use_threads()
        device = group.choose_device(plan.node_of(self.number))
        self.may_connect()
        self.meeting = group.join(plan, device)
        self.watch.start()
        api.use(self.recorder)
        self.autolog.install()
        shell.install(self.display, vars(self.main))
        children.install(self.main)
        execution.remember_cell(spec.source, spec.label, spec.first_line)
        self.part = mine = self.take_part(plan, device)
        loaded = marshal.load_bundle(manifest, self.blobs, self.main, source_dir=self.paths.source)
        attributes = ModuleAttributes(vars(self.main), manifest.bound, self.note)
        place = Place((spec.source,), self.number, str(device))
        carried = Carried(vars(self.main), place, self.note, loaded.unread)
        if mine.automatic is not None:
            mine.automatic.note_captured()
        questions = Questions(self.apart, attributes.now, carried.changes)
        self.results = Results(self.number, plan, loaded, self.paths, self.events, questions)
        if self.results.wanted:
            self.will = LastWill(self.leave_what_exists, lambda: self.interrupts.heard)
        return spec

    def take_part(self, plan: Plan, device: torch.device) -> rank_context.RankContext:
        """What ``td.prepare`` and its kin ask for; with a strategy, the automatic way, ready for user code."""
        mine = rank_context.RankContext(plan.strategy, device, self.note, plan.grace / 2)
        if plan.strategy.name != "none":
            from ..strategies import auto  # only jobs with a strategy pay for these imports

            automatic = auto.AutomaticTraining(mine.context, vars(self.main), mine.patience)
            automatic.install()
            mine.automatic = automatic
        rank_context.take(mine)
        return mine

    def note(self, text: str) -> None:
        """Tell the user one line, once a job."""
        if self.number == 0:
            self.events.write("job.note", text=text)

    def run(self, spec: JobSpec) -> None:
        """The user's code."""
        names = vars(self.main)
        if spec.kind == "cell":
            code = execution.compile_cell(spec.source, spec.label, spec.first_line, self.flags)
            self.leave_alone(code, names)
            self.look_for_others(spec, code, names)
            execution.run_cell(code, names)
        elif spec.kind == "function":
            called = execution.called(names)
            self.leave_alone(*called)
            self.look_for_others(spec, *called)
            execution.run_call(names)
        elif spec.kind == "module":
            self.look_for_others(spec, None, {})
            execution.run_module(spec.source, spec.argv)
        else:
            script = execution.script_code(spec.source, spec.label)
            self.leave_alone(script, {})
            self.look_for_others(spec, script, {})
            execution.run_script(spec.source, spec.label, spec.argv, names)

    def leave_alone(self, code: CodeType | None, names: Mapping[str, Any]) -> None:
        """The automatic way stands aside for code that is distributed by itself, or calls ``td.prepare``."""
        if self.part is None or self.part.automatic is None or code is None:
            return
        from ..strategies.already import reason_to_leave

        if reason := reason_to_leave(code, names):
            self.part.automatic.stand_aside(reason)
            self.part.automatic = None

    def look_for_others(self, spec: JobSpec, code: CodeType | None, names: Mapping[str, Any]) -> None:
        """Where no strategy acts: whether the ranks train together at all."""
        if self.number or self.part is None or self.part.automatic is not None:
            return
        from ..strategies.already import speaks_of_collectives

        every = spec.options.collect == "all"
        self.alone = Alone(
            self.autolog.backwards,
            self.note,
            "and all of them come back" if every else "and rank 0's comes back",
            "The code uses a distributed library, but the library found no other rank: check its settings"
            if self.part.has_mesh
            else "--strategy ddp trains one model with a cell that is written for one device",
            patient=code is None or speaks_of_collectives(code, names),
        )
        self.alone.begin()
        self.watch.tell(self.alone.look)

    def ways(self) -> list[rank_context.Way]:
        """What has changed torch and user code's objects in this rank."""
        found: tuple[rank_context.Way | None, ...] = (
            () if self.part is None else (self.part.automatic, self.part.prepared)
        )
        return [way for way in found if way is not None]

    def apart(self) -> Apart | None:
        """What this rank has only a part of, where the strategy has not brought it together."""
        ways = self.ways()
        things = [thing for way in ways for thing in way.apart()]
        if not things or self.part is None:
            return None
        from ..strategies.core.unrecoverable import Apart

        return Apart(self.part.context.plan.name, ways[-1].SAVING, things)

    def begin_to_end(self) -> None:
        """From here on this rank waits for no other one: its agent says so if it does not end."""
        bootstrap.show_stacks_in(self.stacks)
        self.events.write("rank.ending")

    def succeed(self) -> None:
        """Show the last value, publish the results, end as an interpreter ends."""
        self.show()
        self.publish()
        self.flush()
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()  # each prints its own traceback
        with contextlib.suppress(Exception):
            # It waits for the user's child processes, as at an interpreter's end.
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            if self.meeting is not None:
                group.leave(self.meeting)  # a peer that is gone already is not this rank's failure
        self.events.write("rank.done")
        self.close()

    def stopped(self, error: BaseException) -> None:
        """The user code ended with an exception, or was interrupted."""
        if self.interrupts.received is None:
            self.fail(error)
        self.events.write("rank.interrupted")
        self.say(failures.record(error))
        self.publish()
        self.clean_up()
        if _threads():
            os._exit(0)  # a thread of the user's would keep the process

    def fail(self, error: BaseException) -> NoReturn:
        """Report first, as the notebook waits for it; then leave what can be left, and end."""
        code = 1
        try:
            self.outlive_sigterm()  # another rank's failure may end this one now; what it reports, it must also leave
            record, code = failures.of_a_program(error) if self.program else (failures.record(error), 1)
            self.events.write("rank.failed", error=record.to_json())
            self.say(record)
            self.flush()
            if self.results is not None:
                self.results.dump_error(error)
                self.publish()
        except BaseException:  # noqa: BLE001  # the report is out; the end must come
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                self.clean_up()
            os._exit(code)

    def outlive_sigterm(self) -> None:
        """Until this thread has left what is to be left; SIGKILL follows after the grace."""
        if self.will is None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            self.will.settle()

    def clean_up(self) -> None:
        """What user code registered for the end, but within seconds; its child processes go at once."""
        self.flush()
        faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True, file=2)
        for child in multiprocessing.active_children():
            with contextlib.suppress(OSError, ValueError):
                child.kill()
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        self.close()
        faulthandler.cancel_dump_traceback_later()

    def leave_what_exists(self) -> None:
        """This rank is stopped, because another one failed or because an interrupt did not reach it."""
        with contextlib.suppress(Exception):
            if self.results is not None and group.answers():
                self.results.publish(vars(self.main), midway=True)
        with contextlib.suppress(Exception):
            self.flush()

    def say(self, record: ErrorRecord) -> None:
        """The traceback, in the rank's own log too."""
        with contextlib.suppress(ValueError, OSError):
            self.output.err.text.write(record.text)

    def show(self) -> None:
        """The last line's value and the figures that are still open."""
        value = vars(self.main).get(execution.VALUE)
        if value is not None:
            self.display.publish(value, "result")
        self.display.figures()

    def publish(self) -> None:
        if self.will is not None:
            self.will.settle()
        if self.results is not None:
            self.results.publish(vars(self.main))

    def flush(self) -> None:
        self.recorder.flush()
        self.output.flush()

    def close(self) -> None:
        """The last output; after this the process only ends."""
        self.watch.stop()
        self.flusher.stop()
        self.recorder.close()
        self.output.close()
        self.times.close()
        if self.will is not None:
            self.will.revoke()


def _ended_well(error: BaseException) -> bool:
    """``sys.exit()`` and ``sys.exit(0)`` are ends like any other."""
    return isinstance(error, SystemExit) and failures.exit_code(error) == 0


def _finish_saving() -> None:
    """A checkpoint that is still being written: a job whose last one failed has not succeeded."""
    if (saving := sys.modules.get("jupyter_torchdist.checkpoint.saving")) is not None:
        saving.wait()


def _threads() -> list[threading.Thread]:
    """The user's threads that an interpreter would wait for."""
    return [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]


def _join_threads() -> None:
    """Wait for the user's threads as an interpreter does before it ends.

    Idle threads of an executor end when ``threading``'s own exit handlers tell them to.
    """
    for call in reversed(getattr(threading, "_threading_atexits", ())):
        call()
    for thread in _threads():
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:4])
