"""Interrupts, background jobs and kernels that die, in a real kernel."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from jupyter_torchdist.protocol.process import processes_of_job
from jupyter_torchdist.store import catalog, journal
from tests.leaks import wait_until
from tests.notebook import Notebook

SLEEP = "%%distribute --ranks 2 --watch text {options}\nimport time\npartial = 7\nprint('asleep')\ntime.sleep(100)\n"
BODY = "import time\nprint('asleep')\ntime.sleep(100)\n"
DEAF = (
    "%%distribute --ranks 2 --watch text {options}\nimport time\nprint('asleep')\n"
    "while True:\n    try:\n        time.sleep(100)\n    except KeyboardInterrupt:\n        print('no')\n"
)


def nothing_runs() -> bool:
    return all(not processes_of_job(summary.job) for summary in catalog.jobs())


def state() -> str:
    return catalog.jobs()[0].state


def test_an_interrupt_stops_the_ranks_and_brings_what_is_there(one_kernel: Notebook) -> None:
    cell = one_kernel.start(SLEEP.format(options=""))
    one_kernel.wait_for(cell, "[rank 1] asleep")
    one_kernel.interrupt()
    one_kernel.finish(cell)
    assert cell.error is not None and cell.error.name == "JobCancelled"
    assert "brought back as they were before the end: " in cell.text and "partial" in cell.text
    assert "Traceback" not in cell.error.traceback
    assert one_kernel.value("partial") == 7
    assert one_kernel.value("issubclass(__import__('sys').last_type, KeyboardInterrupt)") is True
    assert state() == "cancelled" and nothing_runs()


def test_ranks_that_do_not_hear_it_are_killed_after_grace(one_kernel: Notebook) -> None:
    cell = one_kernel.start(DEAF.format(options="--grace 1s"))
    one_kernel.wait_for(cell, "[rank 1] asleep")
    began = time.monotonic()
    one_kernel.interrupt()
    one_kernel.finish(cell)
    assert cell.error is not None and cell.error.name == "JobCancelled"
    assert 0.9 < time.monotonic() - began < 10
    assert nothing_runs()


def test_a_second_interrupt_kills_at_once(one_kernel: Notebook) -> None:
    cell = one_kernel.start(DEAF.format(options="--grace 60s"))
    one_kernel.wait_for(cell, "[rank 1] asleep")
    one_kernel.interrupt()
    one_kernel.wait_for(cell, "no")
    one_kernel.interrupt()
    one_kernel.finish(cell, 20)
    assert cell.error is not None and cell.error.name == "JobCancelled"
    assert catalog.jobs()[0].reason == "killed on request"
    assert state() == "cancelled" and nothing_runs()
    assert (one_kernel.run("1 + 1").result or {})["text/plain"] == "2"


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.06, 0.1, 0.2])
def test_an_interrupt_at_any_moment_leaves_nothing(one_kernel: Notebook, delay: float) -> None:
    one_kernel.run("1 + 1")
    cell = one_kernel.start(
        f"print('begun')\nget_ipython().run_cell_magic('distribute', '--ranks 2 --grace 1s', {BODY!r})"
    )
    one_kernel.wait_for(cell, "begun")  # before that ipykernel itself ignores an interrupt
    time.sleep(delay)
    one_kernel.interrupt()
    one_kernel.finish(cell, 30)
    assert cell.error is not None
    assert cell.error.name in ("JobCancelled", "KeyboardInterrupt")
    assert wait_until(nothing_runs)
    assert all(summary.final for summary in catalog.jobs())
    assert (one_kernel.run("1 + 1").result or {})["text/plain"] == "2"


def test_a_background_job_gives_the_notebook_back(one_kernel: Notebook) -> None:
    one_kernel.run("losses = []")
    cell = one_kernel.run("%%distribute --ranks 2 --background --name bg\nlosses.append(1)\nvalue = 5\nprint('done')")
    assert re.search(r"<Job \S+ 'bg'", (cell.result or {})["text/plain"])
    one_kernel.run("job = _\nstate = job.wait()")
    assert one_kernel.value("(state.state, losses, 'value' in globals())") == ("succeeded", [], False)
    one_kernel.run("brought = job.bring()")
    assert one_kernel.value("(value, losses)") == (5, [1])


def test_timeout(one_kernel: Notebook) -> None:
    cell = one_kernel.try_run(SLEEP.format(options="--timeout 1s --grace 1s"))
    assert cell.error is not None and cell.error.name == "JobTimedOut"
    assert nothing_runs()


def test_a_job_outlives_its_kernel_and_is_attached_again(
    kernel: Notebook, new_notebook: Callable[[], Notebook]
) -> None:
    cell = kernel.start(
        "%%distribute --ranks 2 --watch text --name survivor\nimport time\nprint('asleep')\n"
        "time.sleep(3)\nprint('awake')\nvalue = 11\n"
    )
    kernel.wait_for(cell, "[rank 1] asleep")
    kernel.kill()
    other = new_notebook()
    attached = other.run("job = %dist attach survivor\n")
    assert "[rank 0] awake" in attached.text and "[rank 1] asleep" in attached.text
    assert other.value("'value' in globals()") is False
    other.run("job.bring()")
    assert other.value("value") == 11
    kernel.restart()


def test_an_interrupt_while_attached_only_stops_looking(kernel: Notebook, new_notebook: Callable[[], Notebook]) -> None:
    kernel.run(SLEEP.format(options="--background --watch text --name long"))
    other = new_notebook()
    cell = other.start("%dist attach long")
    other.wait_for(cell, "[rank 1] asleep")
    other.interrupt()
    other.finish(cell)
    assert cell.status == "ok" and "goes on" in cell.text
    assert state() == "running"
    assert "cancelled" in kernel.run("%dist cancel long").stdout
    assert nothing_runs()


def test_rerun_runs_what_was_captured(one_kernel: Notebook) -> None:
    one_kernel.run("value = 1")
    one_kernel.run("%%distribute --ranks 1 --name first --watch text\nprint('value', value)")
    one_kernel.run("value = 2")
    assert "[rank 0] value 1" in one_kernel.run("again = %dist rerun first").text
    assert one_kernel.value("again.state.state") == "succeeded"
    assert len(catalog.jobs()) == 2


def test_verbs(one_kernel: Notebook) -> None:
    assert "no jobs yet" in one_kernel.run("%dist").stdout
    one_kernel.run("%%distribute --ranks 2 --name one\nfor number in range(30):\n    print('line', number)")
    (summary,) = catalog.jobs()
    assert "one" in one_kernel.run("%dist").stdout
    assert "print('line', number)" in one_kernel.run("%dist show one").stdout
    assert one_kernel.run(f"%dist logs {summary.job[:-2]} --rank 1 --tail 2").stdout == "line 28\nline 29\n"
    assert one_kernel.run("%dist logs one --grep 'line 7$'").stdout == "[rank 0] line 7\n[rank 1] line 7\n"
    assert "has ended already" in one_kernel.run("%dist cancel one").stdout
    assert "core" in one_kernel.run("%dist nodes").stdout
    assert "2 ranks" in one_kernel.run("%dist plan --ranks 2").stdout
    error = one_kernel.try_run("%dist lgs one").error
    assert error is not None and "did you mean logs?" in error.traceback
    error = one_kernel.try_run("%dist show on").error
    assert error is not None and error.name == "JobNotFound"
    assert summary.job in one_kernel.run("%dist rm one").stdout
    assert catalog.jobs() == []


def test_completion(one_kernel: Notebook) -> None:
    one_kernel.run("%%distribute --ranks 1 --name long-name --watch off\npass")

    def complete(code: str) -> list[str]:
        reply = one_kernel.client.complete(code, len(code), reply=True, timeout=30)
        return list(reply["content"]["matches"])

    assert "--ranks" in complete("%%distribute --ra")
    assert "compact" in complete("%%distribute --watch c")
    assert "logs" in complete("%dist lo")
    assert "long-name" in complete("%dist show lo")


def test_the_journal_tells_the_same(one_kernel: Notebook) -> None:
    one_kernel.run("%%distribute --ranks 2\npass")
    (summary,) = catalog.jobs()
    from jupyter_torchdist.protocol.paths import home

    assert journal.state(home().job(summary.job)).state == "succeeded"


def test_a_background_job_is_shown_without_waiting(one_kernel: Notebook) -> None:
    """The view below the cell goes on by itself, and says in the end where the values are; so does an attached one."""
    cell = one_kernel.run("%%distribute --ranks 2 --background --name bg\nimport time\ntime.sleep(1.5)\nvalue = 5")
    assert cell.displays and not re.search("starting|running|submitted", (cell.result or {})["text/plain"]), "it stays"
    attached = one_kernel.finish(one_kernel.start("%dist attach bg", by_a_person=True))
    assert attached.displays and one_kernel.value("1 + 1") == 2, "no cell waits"
    shown = ""
    while "succeeded" not in shown:  # from a thread, for whichever cell ran last
        message = one_kernel.client.get_iopub_msg(timeout=30)
        if message["msg_type"] == "update_display_data":
            shown = message["content"]["data"]["text/plain"]
    assert "its values are still with the job: `td.attach(" in shown
    one_kernel.run("import jupyter_torchdist as td\ntd.last.bring()")
    assert one_kernel.value("value") == 5
