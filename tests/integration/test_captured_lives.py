"""What was captured dies with its last name, without the garbage collector: no cycle of ours may hold it."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook

ARRAY = "import numpy as np\na = np.ones(100_000)\nheld = weakref.ref(a)"
"""Large enough to travel as a buffer of its own."""

JOBS = {
    "a job that reads it": (ARRAY, "%%distribute --ranks 2\ns = a.sum()"),
    "a job that changes it": (ARRAY, "%%distribute --ranks 2\na += 1"),
    "all ranks' values": (ARRAY, "%%distribute --ranks 2 --collect all\na += 1"),
    "a tensor in an object": (
        "import torch\nclass Box: pass\na = Box()\na.t = torch.ones(100_000)\nheld = weakref.ref(a.t)",
        "%%distribute --ranks 2\na.t.add_(1);",
    ),
    "a variable of a function": (
        f"{ARRAY}\ndef make(a):\n    return lambda: a.sum()\na = make(a)",
        "%%distribute --ranks 2\ns = a()",
    ),
    "a job that fails": (ARRAY, "%%distribute --ranks 2\ns = a.sum()\n1 / 0"),
    "a job that is stopped": (
        ARRAY,
        "%%distribute --ranks 2 --timeout 3s\nimport time\na += 1\ntime.sleep(600)",
    ),
    "a cell that is refused": (
        f"{ARRAY}\nimport threading\nb = [a, threading.Lock()]",
        "%%distribute --ranks 2\nprint(a, b)",
    ),
    "a name that stays behind": (
        f"{ARRAY}\nimport threading\nb = [a, threading.Lock()]",
        "%%distribute --ranks 2\nif a is None:\n    print(b)\nb = 3",
    ),
    "a cell that does not run": (ARRAY, "%%distribute --ranks 2\nprint(a, nobody_has_this)"),
    "a plan": (ARRAY, "%%distribute --ranks 2 --plan\nprint(a)"),
    "a function": (f"{ARRAY}\ndef f(x): return x.sum()", "td.launch(f, (a,), ranks=2)"),
    "a name that a function uses": (f"{ARRAY}\ndef f(): return a.sum()", "td.launch(f, ranks=2)"),
    "a decorated function": (
        f"{ARRAY}\n@td.distributed(ranks=2)\ndef f(x): return x.sum()",
        "f.distributed(a)",
    ),
    "a function that fails": (f"{ARRAY}\ndef f(x): 1 / 0", "td.launch(f, (a,), ranks=2)"),
    "a function that is refused": (
        f"{ARRAY}\nimport threading\nb = [a, threading.Lock()]\ndef f(x): 1 / 0",
        "td.launch(f, (b,), ranks=2)",
    ),
}


@pytest.mark.parametrize("cells", JOBS.values(), ids=JOBS.keys())
def test_dies_with_its_last_name(one_kernel: Notebook, cells: tuple[str, str]) -> None:
    kernel = one_kernel
    kernel.run("import gc, weakref\nimport jupyter_torchdist as td\ngc.collect()\ngc.disable()")
    try:
        kernel.run(cells[0])
        kernel.try_run(cells[1])
        kernel.run("a = b = f = None")
        assert kernel.value("held() is None")
    finally:
        kernel.run("gc.enable()")


def test_dies_after_an_interrupt(one_kernel: Notebook) -> None:
    kernel = one_kernel
    kernel.run(f"import gc, weakref\ngc.collect()\ngc.disable()\n{ARRAY}")
    cell = kernel.start(
        "%%distribute --ranks 2 --watch text\nimport time\na += 1\nprint('begun')\nwhile True: time.sleep(0.1)"
    )
    kernel.wait_for(cell, "begun")
    kernel.interrupt()
    assert kernel.finish(cell).status == "error"
    kernel.run("a = None")
    dead = kernel.value("held() is None")
    kernel.run("gc.enable()")
    assert dead


def test_a_background_job_lets_go_with_its_names(one_kernel: Notebook) -> None:
    kernel = one_kernel
    kernel.run(f"import gc, weakref\nimport jupyter_torchdist as td\ngc.collect()\ngc.disable()\n{ARRAY}")
    kernel.run("%%distribute --ranks 2 --background\ns = a.sum();")
    kernel.run("td.last.wait()\ntd.last.bring()\na = None")
    dead = kernel.value("held() is None")
    kernel.run("gc.enable()")
    assert dead


def test_a_failed_job_dies_with_its_last_name(one_kernel: Notebook) -> None:
    kernel = one_kernel
    kernel.run(f"import gc, weakref\nimport jupyter_torchdist as td\ngc.collect()\ngc.disable()\n{ARRAY}")
    kernel.run("%%distribute --ranks 2 --background\nprint(a)\n1 / 0;")
    kernel.run(
        "job = td.last\njob.wait()\n"
        "try:\n    job.raise_for_state()\nexcept ZeroDivisionError:\n    pass\n"
        "gone = weakref.ref(job)\na = job = None"
    )
    kernel.run("%%distribute --ranks 2\nother = 1")
    dead = kernel.value("(gone() is None, held() is None)")
    kernel.run("gc.enable()")
    assert dead == (True, True)
