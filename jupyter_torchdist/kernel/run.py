"""One cell on the ranks, from its text to its value: submit, wait and show, bring, raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..client.job import VALUE, Brought, Job
from ..client.submit import Request, prepare, submit
from ..protocol.errors import JobCancelled, TorchDistError
from ..protocol.state import JobState
from ..verbs.waiting import Interrupts, wait
from ..views import failure_text, plan_tables, wording
from . import cell, failure, session, show
from .rich import RichOutput

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def run(ip: InteractiveShell, request: Request, quiet: bool = False) -> Any:
    """The cell's value, or the job at once under ``--background``; None under ``--plan``, which prints.

    ``quiet``: the cell ends in a semicolon, so that its value is not shown.

    Raises what the first failing rank raised, ``JobCancelled`` after an interrupt, and what ``submit`` raises.
    """
    if request.options.plan:
        print(plan_text(request))
        return None
    with Interrupts() as interrupts:
        job = submit(request, starting=interrupts.hold)
        session.last = job
        if request.options.background:
            return None if quiet else job
        return _foreground(ip, job, interrupts, quiet)


def plan_text(request: Request) -> str:
    """What would run: the plan, the memory that a strategy needs, and the receipt. No rank is started."""
    prepared = prepare(request)
    receipt = wording.indent(plan_tables.receipt_table(prepared.capture.receipt))
    notes = [f"note: {note}" for note in prepared.capture.notes]
    memory = prepared.memory()
    needed = [] if memory is None else [plan_tables.memory_table(memory)]
    return "\n\n".join([plan_tables.plan_table(prepared.plan), *needed, f"captured:\n{receipt}", *notes])


def _foreground(ip: InteractiveShell, job: Job, interrupts: Interrupts, quiet: bool) -> Any:
    rich = RichOutput(ip, job.paths, visible=job.spec.options.watch != "off")
    watch = show.watch(ip, job.paths, job.spec.options.watch, rich, job.manifest.notes)
    # A kernel that is asked to shut down, or to restart, notes it there in another thread.
    closing = (lambda: bool(ip.exit_now)) if show.is_notebook(ip) else None
    state = wait(job, interrupts, watch.tick, closing=closing)
    interrupts.release()
    try:
        brought = _bring(ip, job, state)
    except BaseException:  # damaged results, or an interrupt: the picture must not go on saying "running"
        watch.finish(state, (f"the results were not brought; `td.attach({job.id!r}).bring()` tries again",))
        raise
    watch.finish(state, remarks(state, brought, interrupts.count))
    try:
        if error := _error(ip, job, state):
            raise error from error.__cause__
        return None if quiet else _value(job, rich)
    finally:
        job.let_go()  # it is all the notebook's own again, to keep or to drop; ``td.last`` keeps the job


def follow(ip: InteractiveShell, job: Job) -> JobState:
    """Show a job that runs (or ran) until its end. An interrupt only stops the showing: the job is not this cell's."""
    session.last = job
    watch = show.watch(ip, job.paths, job.spec.options.watch, RichOutput(ip, job.paths), job.manifest.notes)
    with Interrupts() as interrupts:
        interrupts.hold()
        state = wait(job, interrupts, watch.tick, detach=True)
        interrupts.release()
        watch.finish(state, () if state.final else (f"the job goes on: `%dist cancel {job.id}` ends it",))
    # All that the ranks wrote has been printed there, their tracebacks among it.
    if not isinstance(watch, show.Text) and (lines := _failure(ip, job, state)):
        print("\n".join(failure.in_colours_of(ip, lines)))
    return state


def _bring(ip: InteractiveShell, job: Job, state: JobState) -> Brought | None:
    """Assign what came back; None when the ranks left nothing, as after a kill."""
    ranks = range(job.plan.world_size) if job.plan.collect == "all" else (0,)
    if not all(job.paths.result(rank).exists() for rank in ranks):
        return None
    return job.bring(ip.user_ns)


def remarks(state: JobState, brought: Brought | None, interrupts: int) -> tuple[str, ...]:
    """What to say about the results: nothing when all is as expected."""
    lines = [*failure_text.lost_lines(state), *(failure_text.left_early(state) if state.state == "succeeded" else ())]
    if state.state != "succeeded" and state.final:
        came = ", ".join(brought.names) if brought and brought.names else "nothing"
        lines.append(f"brought back as they were before the end: {came}")
    left = [(name, why) for name, why in (brought.left if brought else ()) if name != VALUE]
    if left:
        names_by_reason: dict[str, list[str]] = {}
        for name, why in left:
            names_by_reason.setdefault(why, []).append(name)
        # A reason may begin with the path to the culprit, which begins with the name.
        lines.append(
            "stayed behind: "
            + "; ".join(
                why if why.startswith(names[0]) else f"{', '.join(names)}: {why}"
                for why, names in names_by_reason.items()
            )
        )
    lines += brought.notes if brought else ()
    if not state.final and interrupts:
        gave_up = "the job does not answer; its driver goes on with it"
        shut_down = f"the kernel is shut down, the job goes on: `%dist attach {state.job}` shows it"
        lines.append(gave_up if interrupts > 2 else shut_down)
    return tuple(lines)


def _error(ip: InteractiveShell, job: Job, state: JobState) -> BaseException | None:
    """The exception to raise, dressed for IPython."""
    if not state.final:
        error: BaseException | None = JobCancelled(f"stopped waiting for job {job.id}, which is {state.state}")
    else:
        error = job.exception()
    if error is None:
        return None
    if lines := _failure(ip, job, state):
        return failure.dress(ip, error, [*lines, *failure.hint(error)])
    own = failure.refusal(error) if isinstance(error, TorchDistError) else failure.brief(error)
    return failure.dress(ip, error, own)


def _failure(ip: InteractiveShell, job: Job, state: JobState) -> list[str]:
    """The traceback of the rank whose exception ended the job; empty where none did."""
    first = state.ranks.get(state.first_failure) if state.first_failure is not None else None
    first = first or next(iter(state.failures()), None)
    if state.state != "failed" or first is None or first.error is None:
        return []
    return failure.rank_failure(state, first, failure.sources_of(job.spec, cell.labels(ip)))


def _value(job: Job, rich: RichOutput) -> Any:
    """The last line's value as a real one; what is a picture, or could not be pickled, as rank 0 rendered it."""
    if not job.paths.result(0).exists() or VALUE not in job.result() or _is_figure(job.value):
        rich.publish_result()
        return None
    return job.values() if job.plan.collect == "all" else job.value


def _is_figure(value: Any) -> bool:
    """A figure would be drawn again here, with this kernel's backend if it has one: rank 0 has drawn it already."""
    return any(kind.__module__ == "matplotlib.figure" for kind in type(value).__mro__)
