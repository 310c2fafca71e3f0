"""One rank: from the environment of torchrun to the results or the exception.

The rank reports only by files. It never raises into torch elastic (which ignores ``KeyboardInterrupt`` and pickles
exceptions). It returns after success or an interrupt, and exits with code 1, a script with its own, after a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

from .. import marshal
from ..protocol import codec
from ..protocol.bundle import Manifest
from ..protocol.disk import in_words
from ..protocol.events import ErrorRecord
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.spec import PROGRAMS, JobSpec
from ..states import Place
from ..strategies.core import rank_context
from ..usercode.source import remember_cell
from . import api, bootstrap, children, execution, failures, group, reference, shell, trainers
from .alone import Alone
from .autolog import Autolog
from .batches import Batches
from .collectives import CollectiveWatch
from .eventfile import EventFile
from .lastwill import LastWill
from .module_attributes import ModuleAttributes
from .notanumber import FirstNaN
from .notebook_state import Carried
from .profiling.profiler import Profiling
from .results import Questions, Results
from .streams.display import Display
from .streams.flusher import Flusher
from .streams.items import Items
from .streams.metrics import Recorder
from .streams.output import Output
from .streams.recording import Recording, innermost, write_into
from .streams.times import Times

if TYPE_CHECKING:
    import torch

    from ..strategies.core.unrecoverable import Apart

_LAST_SECONDS = 3.0
"""Time limit for clean-up registered by user code, after a failure or an interrupt."""


def main(job_root: str, blobs: str, node: str, *, may_connect: Callable[[], None] = lambda: None) -> None:
    """Run the rank that the environment names. Returns on success and after an interrupt, else exits with a code.

    ``may_connect`` returns when the launcher has forked all ranks.
    """
    bootstrap.lead_a_session()
    try:
        rank = Rank(JobPaths(Path(job_root)), Path(blobs), node, may_connect)
    except OSError as error:
        sys.exit(f"the files of rank {os.environ['RANK']} cannot be made: {in_words(error)}")
    try:
        rank.live()
    except BaseException as error:  # noqa: BLE001  # results cannot be written; a signal between two of our steps
        rank.fail(error)


class Rank:
    """The process of one rank in one job."""

    def __init__(self, paths: JobPaths, blobs: Path, node: str, may_connect: Callable[[], None]) -> None:
        self.number = int(os.environ["RANK"])
        files = paths.node(node)
        self.paths, self.blobs, self.may_connect = paths, blobs, may_connect
        self.events = EventFile(files.rank_events(self.number), self.number)
        start = bootstrap.started()
        self.events.write("rank.started", **start)
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
        write_into(os.environ, files, self.number)
        self.recording = Recording(files, self.number)
        self.profiling = Profiling(files, self.number, self.events.write, self.recorder)
        self.watch = CollectiveWatch(self.events, files, start["local_rank"])
        self.batches = Batches(self.number, self.ways)
        self.autolog = Autolog(self.recorder, self.batches.samples)
        self.meeting: group.Meeting | None = None
        self.alone: Alone | None = None
        self.display = Display(files.display(self.number), self.output.tell)
        self.items = Items(files.items(self.number), self.number)
        self.main = bootstrap.new_main()
        self.flags = 0
        self.program = False
        """Whether user code is a program (a script or a module), with a program's exit code."""
        self.results: Results | None = None
        self.will: LastWill | None = None
        self.part: rank_context.RankContext | None = None

    def live(self) -> None:
        """Prepare, run the user's code, publish its results."""
        self.flusher.start()
        self.recording.listen(self.profiling.requests, self.profiling.heard)
        try:
            spec = self.prepare()
            self.events.write("rank.ready")
            with self.profiling.during(spec.options.profile):
                self.run(spec)
            if self.alone is not None:
                self.alone.end()
            for way in self.ways():
                way.finish(vars(self.main))
            self.trainers.finish()
            _finish_saving()
            self.begin_to_end()
            execution.join_threads()
            self.interrupts.disarm()
        except BaseException as error:  # noqa: BLE001  # whatever user code raises
            self.interrupts.disarm()
            if not failures.ended_well(error):
                for way in self.ways():
                    error = way.explained(error)
                    way.stop(error, vars(self.main))
                self.stopped(error)
                return
            if not self.program:
                self.note(failures.end_in_words(error))
        self.succeed()

    def prepare(self) -> JobSpec:
        """Everything before user code: device, process group, captured names."""
        spec = JobSpec.from_json(codec.loads(self.paths.spec.read_bytes()))
        plan = Plan.from_json(codec.loads(self.paths.plan.read_bytes()))
        manifest = Manifest.from_json(codec.loads(self.paths.manifest.read_bytes()))
        self.flags, self.program = manifest.flags, spec.kind in PROGRAMS
        bootstrap.prepare(plan, self.number, self.program)
        alone = reference.begin(self, plan, spec, manifest)
        device = group.choose_device(plan.node_of(self.number), for_command=spec.kind == "command")
        self.may_connect()
        self.meeting = group.join(plan, device)
        self.watch.start()
        api.use(self.recorder)
        self.autolog.install()
        self.batches.install()
        self.shell = shell.install(self.display, vars(self.main), program=self.program)
        children.install(self.main)
        self.trainers = trainers.install(plan, self.number, device, self.recorder.log, self.note)
        remember_cell(spec.source, spec.label, spec.first_line)
        self.part = mine = self.take_part(plan, device, alone)
        loaded = marshal.load_bundle(manifest, self.blobs, self.main, source_dir=self.paths.source)
        attributes = ModuleAttributes(vars(self.main), manifest.bound, self.note)
        carried = Carried(vars(self.main), Place((spec.source,), self.number, str(device)), self.note, loaded.unread)
        if mine.automatic is not None:
            mine.automatic.note_captured()
        questions = Questions(self.apart, attributes.now, carried.changes)
        self.results = Results(self.number, plan, loaded, self.paths, self.events, questions)
        if self.results.wanted:
            self.will = LastWill(self.leave_what_exists, lambda: self.interrupts.heard)
        return spec

    def take_part(self, plan: Plan, device: torch.device, alone: Any) -> rank_context.RankContext:
        """Create the context for ``td.prepare`` and similar functions. With a strategy, install automatic training."""
        mine = rank_context.RankContext(plan.strategy, device, self.note, self.proves, plan.grace / 2)
        if plan.strategy.name != "none":
            from ..strategies import auto  # only jobs with a strategy pay for these imports

            mine.automatic = automatic = auto.AutomaticTraining(mine.context, vars(self.main), mine.patience, alone)
            automatic.install()
            self.recorder.steps = automatic.steps_over
        rank_context.take(mine)
        return mine

    def note(self, text: str) -> None:
        """Show the user one line, once per job (only from rank 0)."""
        if self.number == 0:
            self.events.write("job.note", text=text)

    def proves(self, seconds: float) -> None:
        """The first steps are being proved (0), or have been, in ``seconds``. Told by rank 0."""
        if self.number == 0:
            self.events.write("rank.proving", seconds=seconds)

    def run(self, spec: JobSpec) -> None:
        """Run the user's code."""
        names = vars(self.main)
        if spec.kind == "cell":
            code = execution.compile_cell(spec.source, spec.label, spec.first_line, self.flags)
            if self.results is not None:
                self.results.begin(code)
            self.leave_alone(code, names)
            self.look_for_others(spec, code, names)
            try:
                execution.run_cell(code, names)
            finally:
                self.shell.stop_clock()
        elif spec.kind == "function":
            called = execution.called(names)
            self.leave_alone(*called)
            self.look_for_others(spec, *called)
            execution.run_call(names, self.items.put if self.results and self.results.wanted else lambda item: None)
        elif spec.kind == "command":
            execution.run_command(spec.argv)
        elif spec.kind == "module":
            self.look_for_others(spec, None, {})
            execution.run_module(spec.source, spec.argv)
        else:
            script = execution.script_code(spec.source, spec.label)
            self.leave_alone(script, {})
            self.look_for_others(spec, script, {})
            execution.run_script(spec.source, spec.label, spec.argv, names)

    def leave_alone(self, code: CodeType | None, names: Mapping[str, Any]) -> None:
        """Turn off automatic training for code that is already distributed, or that calls ``td.prepare``."""
        if self.part is None or self.part.automatic is None or code is None:
            return
        from ..strategies.already import reason_to_leave

        if reason := reason_to_leave(code, names):
            self.part.automatic.stand_aside(reason)
            self.part.automatic, self.trainers.strategy = None, self.part.context.plan

    def look_for_others(self, spec: JobSpec, code: CodeType | None, names: Mapping[str, Any]) -> None:
        """Without automatic training, watch whether the ranks communicate at all."""
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
        """The active ways (automatic training, ``td.prepare``), which have changed torch and the user's objects."""
        part = self.part
        return [way for way in (part.automatic, part.prepared) if way is not None] if part else []

    def apart(self) -> Apart | None:
        """Objects of which this rank has only a part, because the strategy has not gathered them."""
        ways = self.ways()
        things = [thing for way in ways for thing in way.apart()]
        if not things or self.part is None:
            return None
        from ..strategies.core.unrecoverable import Apart

        return Apart(self.part.context.plan.name, ways[-1].SAVING, things)

    def begin_to_end(self) -> None:
        """From now on this rank waits for no other rank. If it does not exit, the agent reports it."""
        bootstrap.show_stacks_in(self.stacks)
        self.recording.write("done")
        self.events.write("rank.ending")

    def succeed(self) -> None:
        """Show the last value, publish the results, and end like an interpreter."""
        self.show()
        self.publish()
        self.flush()
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()  # each prints its own traceback
        with contextlib.suppress(Exception):
            # It waits for the user's child processes, as at the exit of an interpreter.
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            if self.meeting is not None:
                group.leave(self.meeting)  # it is not a failure of this rank if a peer is gone
        self.events.write("rank.done")
        self.close()

    def stopped(self, error: BaseException) -> None:
        """User code ended with an exception, or was interrupted."""
        if self.interrupts.received is None:
            self.fail(error)
        self.events.write("rank.interrupted")
        self.say(failures.record(error))
        self.publish()
        self.clean_up()
        if execution.threads():
            os._exit(0)  # a user thread would keep the process alive

    def fail(self, error: BaseException) -> NoReturn:
        """Report first, because the notebook waits for it. Then publish what exists, and exit."""
        code = 1
        try:
            self.outlive_sigterm()  # another failed rank may end this one, but it must publish first
            record, code = failures.of_a_program(error) if self.program else (failures.record(error), 1)
            self.events.write("rank.failed", error=record.to_json())
            self.say(record)
            self.flush()
            self.recording.write("failed", innermost((frame[0], frame[1]) for frame in record.frames[::-1]))
            if self.results is not None:
                self.results.dump_error(error)
                self.publish()
        except BaseException:  # noqa: BLE001  # the failure is reported; the process must exit
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                self.clean_up()
            os._exit(code)

    def outlive_sigterm(self) -> None:
        """Ignore SIGTERM until this thread has published. SIGKILL follows after the grace."""
        if self.will is None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            self.will.settle()

    def clean_up(self) -> None:
        """Run the exit handlers of user code, within ``_LAST_SECONDS``. Its child processes are killed at once."""
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
        """Publish when this rank is stopped: another rank failed, or an interrupt was not handled."""
        with contextlib.suppress(Exception):
            if self.results is not None and group.answers():
                self.results.publish(vars(self.main), midway=True)
        with contextlib.suppress(Exception):
            self.flush()

    def say(self, record: ErrorRecord) -> None:
        """Write the traceback to the rank's own log, too."""
        with contextlib.suppress(ValueError, OSError):
            self.output.err.text.write(record.text)

    def show(self) -> None:
        """Show the value of the last line, and open figures."""
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
        """Write the last output. After this the process only exits."""
        self.watch.stop()
        self.flusher.stop()
        self.recorder.close()
        self.output.close()
        self.times.close()
        if self.will is not None:
            self.will.revoke()


def _finish_saving() -> None:
    """Wait for a checkpoint that is still being written. If it fails, the job fails."""
    if (saving := sys.modules.get("jupyter_torchdist.checkpoint.saving")) is not None:
        saving.wait()


if __name__ == "__main__":
    main(*sys.argv[1:4])
