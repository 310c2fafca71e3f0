"""Runs one cell on the ranks: submit, wait and show, bring the results, raise the exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..client import failures
from ..client.job import VALUE, Brought, Job
from ..client.submit import Request, submit
from ..protocol.errors import JobCancelled, TorchDistError
from ..protocol.state import JobState
from ..verbs import answers, planned, profiled
from ..verbs.schema import Standing
from ..verbs.waiting import Interrupts, wait
from ..views import failure_text
from . import background, cell, failure, session, show
from .rich import RichOutput

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def run(ip: InteractiveShell, request: Request, quiet: bool = False) -> Any:
    """Run the cell and return its value, or the job with ``--background``, or None with ``--plan``, which prints.

    ``quiet``: the cell ends in a semicolon, so its value is not shown.

    Raises what the first failing rank raised, ``JobCancelled`` after an interrupt, and what ``submit`` raises.
    """
    if request.options.plan:
        print(planned.text(request))
        return None
    with Interrupts() as interrupts:
        job = submit(request, starting=interrupts.hold)
        session.last = job
        if request.options.background:
            background.watch(ip, job)
            return None if quiet else job
        return foreground(ip, job, interrupts, lambda rich: None if quiet else _value(job, rich))


def foreground(
    ip: InteractiveShell,
    job: Job,
    interrupts: Interrupts,
    value: Callable[[RichOutput], Any],
    shown: Callable[[RichOutput], show.Watch] | None = None,
) -> Any:
    """Wait and show, bring the results, raise what the job raised. Returns what ``value`` returns.

    ``shown`` makes another watch than ``--watch`` names.
    """
    rich = RichOutput(ip, job.paths, visible=job.spec.options.watch != "off")
    notes = job.manifest.notes
    watch = shown(rich) if shown else show.watch(ip, job.paths, job.spec.options.watch, rich, notes)
    # On a request to shut down or restart, another thread of the kernel sets ``exit_now``.
    closing = (lambda: bool(ip.exit_now)) if show.is_notebook(ip) else None
    state = wait(job, interrupts, watch.tick, closing=closing)
    interrupts.release()
    try:
        brought = _bring(ip, job, state)
    except BaseException:  # damaged results, or an interrupt: the picture must not stay at "running"
        watch.finish(state, (f"the results were not brought; `td.attach({job.id!r}).bring()` tries again",))
        raise
    watch.finish(state, remarks(state, brought, interrupts.count))
    print(profiled.at_its_end(job), end="")
    try:
        if error := error_of(ip, job, state):
            raise error from error.__cause__
        return value(rich)
    finally:
        job.let_go()  # the notebook has the results now; ``td.last`` keeps the job


def standing(job: Job, interrupts: Interrupts, *, detach: bool) -> Any:
    """Wait without a view, for ``--json``: how the job stands then. ``detach``: an interrupt ends the waiting alone."""
    session.last = job
    return answers.plain(Standing.of(wait(job, interrupts, lambda state: None, detach=detach)))


def look_at(ip: InteractiveShell, job: Job) -> None:
    """Show a job that runs, without waiting for it, to a person whose front end updates its view.

    A program that runs a notebook waits here, as ``follow`` does: its next cell may need the job's end.
    """
    session.last = job
    if job.state.final or not session.somebody_is_there(ip) or not background.watch(ip, job):
        follow(ip, job)


def follow(ip: InteractiveShell, job: Job) -> JobState:
    """Show a job until its end. An interrupt only ends the display, because the job does not belong to this cell."""
    session.last = job
    watch = show.watch(ip, job.paths, job.spec.options.watch, RichOutput(ip, job.paths), job.manifest.notes)
    with Interrupts() as interrupts:
        interrupts.hold()
        state = wait(job, interrupts, watch.tick, detach=True)
        interrupts.release()
        watch.finish(state, () if state.final else (f"the job goes on: `%dist cancel {job.id}` ends it",))
    # ``Text`` has printed all output of the ranks, their tracebacks included.
    if not isinstance(watch, show.Text) and (lines := _failure(ip, job, state)):
        print("\n".join(failure.in_colours_of(ip, lines)))
    return state


def _bring(ip: InteractiveShell, job: Job, state: JobState) -> Brought | None:
    """Assign the results; None if the ranks left none, as after a kill."""
    ranks = range(job.plan.world_size) if job.plan.collect == "all" else (0,)
    if not all(job.paths.result(rank).exists() for rank in ranks):
        return None
    if job.spec.kind == "function":  # its names are its own
        return Brought((), notes=job.bring_state(ip.user_ns))
    return job.bring(ip.user_ns)


def remarks(state: JobState, brought: Brought | None, interrupts: int) -> tuple[str, ...]:
    """Remarks on the results; empty if everything is as expected."""
    lines = [*failure_text.lost_lines(state), *(failure_text.left_early(state) if state.state == "succeeded" else ())]
    if state.state != "succeeded" and state.final:
        came = ", ".join(brought.names) if brought and brought.names else "nothing"
        lines.append(f"brought back as they were before the end: {came}")
    left = [(name, why) for name, why in (brought.left if brought else ()) if name != VALUE]
    if left:
        names_by_reason: dict[str, list[str]] = {}
        for name, why in left:
            names_by_reason.setdefault(why, []).append(name)
        # A reason may begin with the path to the object that failed, and so with the name.
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


def error_of(ip: InteractiveShell, job: Job, state: JobState) -> BaseException | None:
    """The exception to raise, with its rendering for IPython."""
    if not state.final:
        error: BaseException | None = JobCancelled(f"stopped waiting for job {job.id}, which is {state.state}")
    else:
        error = job.exception()
    if error is None:
        return None
    if lines := _failure(ip, job, state):
        advice = [f"\n{note}" for note in getattr(error, "__notes__", ()) if failures.is_advice(note)]
        return failure.dress(ip, error, [*lines, *failure.hint(error), *advice])
    own = failure.refusal(error) if isinstance(error, TorchDistError) else failure.brief(error)
    return failure.dress(ip, error, own)


def _failure(ip: InteractiveShell, job: Job, state: JobState) -> list[str]:
    """The traceback of the rank whose exception ended the job; empty if there is none."""
    first = state.ranks.get(state.first_failure) if state.first_failure is not None else None
    first = first or next(iter(state.failures()), None)
    if state.state != "failed" or first is None or first.error is None:
        return []
    return failure.rank_failure(state, first, failure.sources_of(job.spec, cell.labels(ip)))


def _value(job: Job, rich: RichOutput) -> Any:
    """The last line's value. A figure, or a value that could not be pickled, is shown as rank 0 rendered it."""
    if not job.paths.result(0).exists() or VALUE not in job.result() or _is_figure(job.value):
        rich.publish_result()
        return None
    return job.values() if job.plan.collect == "all" else job.value


def _is_figure(value: Any) -> bool:
    """Whether the value is a Matplotlib figure: rank 0 has rendered it, and this kernel would render it again."""
    return any(kind.__module__ == "matplotlib.figure" for kind in type(value).__mro__)
