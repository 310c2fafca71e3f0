"""The ``torchdist`` command: ``torchdist run [options] script.py -- args``, the verbs of ``%dist``, ``torchdist mcp``.

With ``--json`` it prints objects of ``verbs/schema.py`` on stdout, a line each, an error as the last.

Exit status: 0; 1 when the job or this program failed, or when SIGTERM, SIGHUP or SIGQUIT ended the job (as with
torchrun); 2 for invalid arguments; 130 for a cancelled job or an interrupt.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from . import __version__
from .client.drivers import pool
from .client.job import Job
from .client.submit import rerun, submit
from .protocol import codec
from .protocol.errors import CellSyntaxError, JobCancelled, OptionError, TorchDistError
from .protocol.spec import STDIN
from .protocol.state import JobState
from .protocol.typed import Record
from .store.segments import Log
from .verbs import ansi, answers, hosts, parse, planned, profiled, torchrun
from .verbs.command_line import help_of, split
from .verbs.perform import perform
from .verbs.schema import Failed, Line, Problem, Standing
from .verbs.stream import Console
from .verbs.torchrun_logs import LogDir
from .verbs.waiting import ENDING, Ended, Interrupts, wait
from .views import failure_text
from .views.wording import in_shell

PROGRAM = "torchdist"
RUN = f"{PROGRAM} run"
FAILED, MISUSED, CANCELLED = 1, 2, 130
ATTACHED = 16 * 1024
"""How many bytes of the end of each rank's log ``attach`` shows first."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Errors are printed on stderr without a traceback."""
    words = list(sys.argv[1:] if words is None else words)
    try:
        return _main(words)
    except TorchDistError as error:
        if wants_json(words):
            _answer(Failed(Problem(type(error).__name__, in_shell(error.message), in_shell(error.hint))))
        else:
            _say(in_shell(failure_text.refusal(error)))
        return MISUSED if isinstance(error, (OptionError, CellSyntaxError)) else FAILED
    except Ended:
        return FAILED
    except KeyboardInterrupt:
        return CANCELLED
    except OSError as error:
        if not _nobody_reads(error):
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # Python would complain again when it flushes at exit
            os.dup2(null, stream.fileno())
        return FAILED
    finally:
        pool().close()


def _main(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print(f"{PROGRAM} {__version__}")
        return 0
    if words[:1] == ["run"]:
        return _run(words[1:])
    if words[:1] == ["mcp"]:
        return _mcp(words[1:])
    try:
        arguments = parse.parse(words, PROGRAM)
    except parse.HelpShown as shown:
        more = f"\n{PROGRAM} mcp [--allow-control]\n"
        print(shown, more if words[0] in ("-h", "--help") else "", sep="", end="")
        return 0
    if arguments.verb in ("attach", "rerun"):
        job = hosts.attached(arguments)
        if again := arguments.verb == "rerun":
            job = rerun(job, env=arguments.env)
        keep = None if again or arguments.json else ATTACHED
        return _follow(job, detach=not again, keep=keep, as_json=arguments.json)
    # These print the user's own text.
    ours = not arguments.json and arguments.verb not in ("logs", "show", "stacks", "diagnose")
    for piece in perform(arguments):
        sys.stdout.write(in_shell(piece) if ours else piece)
    sys.stdout.flush()
    return 0


def _run(words: list[str]) -> int:
    line = split(words)
    as_json = line.json
    if line.asks_for_help:
        print(in_shell(help_of(line, RUN)))
        return 0
    meant = line.meant(os.environ)
    if meant.handed:
        return _hand_over(meant, words, [parse.JSON] if as_json else [])
    request = line.request(meant, Path.cwd(), RUN)
    if request.options.plan:
        answer = planned.answer(request)
        if as_json:
            _answer(answer)
        else:
            _say_notes(answer.notes)
            print(planned.tables(answer))
        return 0
    if request.options.background and meant.output.to_files:
        raise OptionError("--log-dir is written while this command waits", "leave out --background")
    if not request.options.background:
        os.environ[STDIN] = f"/proc/{os.getpid()}/fd/0"
    with Interrupts(meant.signals) as interrupts:
        job = submit(request, starting=interrupts.hold)
        if request.options.background and as_json:
            _answer(Standing.of(job.state))
            return 0
        if not as_json:
            _say_notes(job.manifest.notes)
        if request.options.background:
            print(job.id, flush=True)
            _say(_goes_on(job))
            return 0
        return _wait(job, interrupts, detach=False, keep=None, meant=meant, as_json=as_json)


def _mcp(words: list[str]) -> int:
    """Serve an assistant. Raises ``OptionError``."""
    grammar = parse.Parser(prog=f"{PROGRAM} mcp", description="jobs for an assistant, over stdin and stdout")
    grammar.add_argument("--allow-control", action="store_true", help="it may cancel jobs and run them again")
    try:
        chosen = grammar.parse_args(words)
    except parse.HelpShown as shown:
        print(shown, end="")
        return 0
    from .assistants.server import serve  # its package is an extra

    serve(allow_control=chosen.allow_control)
    return 0


def _hand_over(meant: torchrun.Meant, words: Sequence[str], own: Sequence[str]) -> int:
    """Become torchrun, with the same words. Raises ``OptionError`` for options that torchrun does not have: ``own``."""
    ours = [*own, *(word for word in meant.words if word.startswith("-") and word not in torchrun.WRITTEN)]
    if ours:
        raise OptionError(
            f"{meant.handed} is done by torchrun itself, which has no {ours[0]}",
            "for several machines write --hosts HOST,HOST instead",
        )
    _say(f"note: {meant.handed}: torchrun itself runs this, without a job; --hosts HOST,HOST makes it one")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])


def _follow(job: Job, *, detach: bool, keep: int | None, as_json: bool) -> int:
    with Interrupts(ENDING) as interrupts:
        interrupts.hold()
        return _wait(job, interrupts, detach=detach, keep=keep, as_json=as_json)


def _wait(
    job: Job,
    interrupts: Interrupts,
    *,
    detach: bool,
    keep: int | None,
    meant: torchrun.Meant | None = None,
    as_json: bool,
) -> int:
    meant = meant or torchrun.Meant()
    copies = LogDir(meant.output, job.paths, meant.run_id, meant.role) if meant.output.to_files else None
    tap = copies.tap if copies else lambda log, text: None
    kind = JsonConsole if as_json else Console
    console = kind(job.paths, keep=keep, output=meant.output, role=meant.role, tap=tap)
    news: list[str] = [] if detach else [f"the ranks get SIGTERM, and what runs after {job.plan.grace:g} s is killed"]

    def tick(state: JobState) -> None:
        if interrupts.ended_by is not None and news:
            _say(f"{interrupts.ended_by.name}: {news.pop()}")
        console.tick(state)
        if copies:
            copies.tick(state)

    try:
        state = wait(job, interrupts, tick, detach=detach)
    except OSError as error:
        if _nobody_reads(error) and not detach:
            job.terminate()
        raise
    if not state.final:
        if as_json:
            _answer(Standing.of(state))
        _say(_goes_on(job))
        return CANCELLED if interrupts.ended_by is None else FAILED
    console.finish(state, time.time())
    if words := profiled.at_its_end(job):
        _say(words.rstrip())
    if copies:
        copies.finish(state)
        _say(f"note: copies of the output are in {copies.root}")
    if meant.events:
        for event in job.events():
            print(codec.dumps(asdict(event)))
    if as_json:
        _answer(Standing.of(state))
    else:
        _say_end(job, state)
    return exit_status(state) if interrupts.ended_by is None else FAILED


def _say_end(job: Job, state: JobState) -> None:
    for words in failure_text.lost_lines(state):
        _say(words)
    if state.state != "succeeded":
        _say(words_of(job, state))


def _goes_on(job: Job) -> str:
    return f"job {job.id} goes on; `{PROGRAM} attach {job.id}` follows it, `{PROGRAM} cancel {job.id}` ends it"


def _nobody_reads(error: OSError) -> bool:
    """The reader (``| head``) closed the pipe, or the terminal is closed."""
    return error.errno in (errno.EPIPE, errno.EIO)


def words_of(job: Job, state: JobState) -> str:
    """Why the job did not succeed: the traceback of the first rank that failed, or the error message."""
    if any(rank.error for rank in state.failures()):
        return failure_text.failure(state)
    error = job.exception()
    said = f"{type(error).__name__}: {error}" if error and not isinstance(error, JobCancelled) else state.reason
    more = [cause.advice for cause in state.findings if cause.sentence not in said]
    return in_shell("\n".join([said, *more]))


def exit_status(state: JobState) -> int:
    """The exit status for a job that has ended."""
    return {"succeeded": 0, "cancelled": CANCELLED}.get(state.state, FAILED)


def wants_json(words: Sequence[str]) -> bool:
    """Whether the words of a command ask for JSON; the arguments of a program do not count."""
    return split(words[1:]).json if words[:1] == ["run"] else parse.JSON in words


class JsonConsole(Console):
    """Prints each line as a ``schema.Line``. Notes and the end are in the ``Standing`` that follows."""

    def say(self, text: str) -> None:
        """Nothing."""

    def write(self, log: Log, text: str) -> None:
        for line in text.removesuffix("\n").split("\n"):
            _answer(Line(log.rank, log.stream, line))


def _answer(answer: Record) -> None:
    sys.stdout.write(answers.text(answer))
    sys.stdout.flush()


def _say_notes(notes: Sequence[str]) -> None:
    for note in notes:
        _say(f"note: {note}")


def _say(text: str) -> None:
    print(ansi.safe(text), file=sys.stderr, flush=True)
