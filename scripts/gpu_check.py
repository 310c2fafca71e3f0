"""``scripts/gpu_check``: one run on a GPU machine without internet, and one page of what came of it.

``collect`` downloads here what that machine lacks. There, without a word, it installs that into an environment of its
own and runs the steps, the most telling first. Standard library only: the page is written though nothing else works.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from scripts import gpu_wheels
from scripts.gpu_processes import LINES, ROOT, adopt_orphans, run, tail_of

TESTS = "tests/integration/gpu"

SECONDS = 470.0
"""For all steps together; the machine is lent for minutes."""
DRY_SECONDS = 230.0
DRY_FACTOR = 2
"""How much longer a step may take without a GPU, where other work may go on beside it."""


@dataclass(frozen=True)
class Step:
    """One row of the page: tests that run in a process of their own, for so many seconds at the most."""

    name: str
    what: str
    seconds: float
    tests: str
    """A file below ``TESTS``, or a test in it."""


STEPS = (
    Step("device", "a rank's device, its process group, what comes back, a loader's workers", 70, "test_device.py"),
    Step("training", "a cell by hand, under ddp and under fsdp: the losses of one CPU", 70, "test_training.py"),
    Step("failures", "exception, assertion on the device, out of memory, kill, interrupt", 60, "test_failures.py"),
    Step("notebook", "a kernel: a cell, its failure, doctor, a GPU that the kernel uses", 45, "test_notebook.py"),
    Step("gauges", "NVML's numbers of a busy rank beside torch's", 35, "test_gauges.py"),
    Step("plan", "--plan beside what the allocator held at its peak", 60, "test_plan.py"),
    Step("sharing", "two ranks on one GPU, a GPU that has a job: refused; free afterwards", 35, "test_sharing.py"),
    Step("nccl", "NCCL's log; torch's flight recorder, a collective that waits", 35, "test_nccl.py"),
    Step("launch", "the launch benchmark in short, beside torchrun", 60, "test_speed.py::test_launch"),
    Step("speed", "the training benchmark in short, beside torchrun", 60, "test_speed.py::test_training"),
    Step("compile", "torch.compile in a rank", 60, "test_compiling.py"),
)


@dataclass
class Result:
    """How a step ended."""

    said: str
    passed: bool
    seconds: float = 0.0
    numbers: list[tuple[str, str]] = field(default_factory=list)
    tail: str = ""
    """Of what failed: the end of what it printed."""


# --------------------------------------------------------------------------------------------------------- the page


@dataclass
class Page:
    """``gpu_check.md``, written anew after every step: a run that is cut off leaves what it knows."""

    path: Path
    dry: bool
    steps: Sequence[Step]
    facts: dict[str, str] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    began: float = field(default_factory=time.time)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text("\n".join(self._lines()) + "\n", encoding="utf-8")
        fresh.replace(self.path)

    def _lines(self) -> Iterable[str]:
        yield f"# gpu_check, {time.strftime('%Y-%m-%d %H:%M', time.localtime(self.began))}"
        yield ""
        if self.dry:
            yield from ("A dry run: every step on CPU ranks, without a GPU. It says nothing of GPUs.", "")
        yield from (
            "| machine | |",
            "|---|---|",
            *(f"| {name} | {_cell(value)} |" for name, value in self.facts.items()),
        )
        yield from ("", "| step | result | seconds | numbers |", "|---|---|---|---|")
        yield from map(self._row, self.steps)
        for step in self.steps:
            result = self.results.get(step.name)
            if result is not None and result.tail:
                yield from ("", f"## {step.name}: {result.said}", "", "```", result.tail.replace("```", "'''"), "```")

    def _row(self, step: Step) -> str:
        result = self.results.get(step.name, Result("not run yet", False))
        numbers = "<br>".join(f"{_cell(name)}: {_cell(value)}" for name, value in result.numbers)
        said = result.said if result.passed else f"**{_cell(result.said)}**"
        return f"| {step.name}: {step.what} | {said} | {result.seconds:.0f} | {numbers} |"


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace("\n", " ")


# ----------------------------------------------------------------------------------------------------------- the steps


def take(step: Step, python: str, dry: bool, seconds: float, place: Path) -> Result:
    """Run a step's tests."""
    log, report = place / f"{step.name}.log", place / f"{step.name}.xml"
    words = [
        python,
        "-m",
        "pytest",
        str(Path(TESTS, step.tests)),
        "-m",
        "not gpu" if dry else "gpu",
        "-v",
        "--tb=short",
    ]
    words += ["-c", "pyproject.toml", "--rootdir=."]
    words += ["-p", "pytest_timeout", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    limit, began = min(step.seconds * (DRY_FACTOR if dry else 1), seconds), time.monotonic()
    try:
        code = run(words, limit, log, step_environment())
    except OSError as error:
        return Result(f"could not start: {error}", False)
    result = read_report(report, tail_of(log))
    result.seconds = time.monotonic() - began
    if code is None:
        result.said = f"took longer than {limit:.0f} s, and was ended ({result.said})"
    result.passed &= code == 0
    if not result.passed:
        result.tail = result.tail or tail_of(log)
    return result


def step_environment() -> dict[str, str]:
    """Modules are compiled once, and pytest loads no plugin that it is not told to: each takes seconds."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environ, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def read_report(report: Path, printed: str) -> Result:
    """What pytest wrote down of its tests (JUnit's XML), which it does at its end; else what it ``printed`` last."""
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return Result("without a report", False, tail=printed)
    numbers = [(item.get("name", ""), item.get("value", "")) for case in cases for item in case.iter("property")]
    faults = [fault for case in cases for kind in ("failure", "error") for fault in case.iter(kind)]
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - failed - skipped
    counts = ((failed, "FAILED"), (passed, "passed"), (skipped, "skipped"))
    said = ", ".join(f"{count} {word}" for count, word in counts if count)
    words = "\n\n".join("\n".join((fault.text or "").splitlines()[-LINES:]) for fault in faults)
    return Result(said or "no test ran", passed > 0, numbers=numbers, tail=words)


def take_all(page: Page, python: str, seconds: float, place: Path) -> None:
    """Every step within its own time and that of all, the page written after each."""
    until = time.monotonic() + seconds
    for step in page.steps:
        left = until - time.monotonic()
        if left < 1:
            page.results[step.name] = Result("not run: the time of all steps was over", False)
        else:
            print(f"{step.name}: {step.what}", flush=True)
            page.results[step.name] = result = take(step, python, page.dry, left, place)
            print(f"  {result.said} ({result.seconds:.0f} s)", flush=True)
        page.write()


# --------------------------------------------------------------------------------------------------------- the machine

ASKED = """
import importlib.metadata as packages, json, sys
import torch
found = {"python": sys.version.split()[0], "torch": f"{torch.__version__}, CUDA {torch.version.cuda}"}
if torch.cuda.is_available():
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    found["GPUs as torch sees them"] = ", ".join(names)
names = ("ipykernel", "ipython", "numpy", "cloudpickle", "pytest", "accelerate", "transformers", "lightning")
have = {one.metadata["Name"]: one.version for one in packages.distributions() if one.metadata["Name"] in names}
found["packages"] = ", ".join(f"{name} {have[name]}" for name in sorted(have))
import jupyter_torchdist
found["jupyter_torchdist"] = jupyter_torchdist.__version__
print("found " + json.dumps(found))
"""


def machine() -> dict[str, str]:
    """What can be said without a package."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"system": f"{platform.platform()}, {cores} cores, {memory / 1e9:.0f} GB"}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    found["GPUs and driver"] = _said(query) or "none that nvidia-smi shows"
    if commit := _said(["git", "rev-parse", "--short", "HEAD"]):
        found["commit"] = commit
    return found


def _said(words: Sequence[str]) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""


def libraries(python: str, place: Path) -> dict[str, str]:
    """What the steps' Python says; it imports torch, which a fresh machine reads from its disk for the first time."""
    log = place / "machine.log"
    code = run([python, "-c", ASKED], 90, log)
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("found "):
            return dict(json.loads(line.removeprefix("found ")))
    return {"torch": f"could not be asked (code {code}): {tail_of(log)[-300:]}"}


# ---------------------------------------------------------------------------------------------------------------- main


def check(dry: bool, names: Sequence[str], seconds: float, out: Path) -> int:
    """Run the steps; 0 when each has passed."""
    began = time.monotonic()
    page = Page(out / "gpu_check.md", dry, [step for step in STEPS if not names or step.name in names])
    page.facts |= machine()
    page.write()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        place = Path(folder)
        try:
            python, page.facts["environment"] = gpu_wheels.environment(place)
            page.facts |= libraries(python, place)
            take_all(page, python, seconds - (time.monotonic() - began), place)
        except Exception as error:  # noqa: BLE001  # the page says it
            page.facts["it could not go on"] = f"{type(error).__name__}: {error}"
        page.facts["all"] = f"{time.monotonic() - began:.0f} s"
        page.write()
        keep_logs(place, out)
    print(f"The page: {page.path}")
    return 0 if all(page.results.get(step.name, Result("", False)).passed for step in page.steps) else 1


def keep_logs(place: Path, out: Path) -> None:
    """All that the steps printed, in one file: few files and few bytes come back."""
    with open(out / "gpu_check.log", "w", encoding="utf-8") as kept:
        for log in sorted(place.glob("*.log"), key=lambda log: log.stat().st_mtime):
            kept.write(f"===== {log.name}\n{log.read_text(errors='replace')[-1_000_000:]}\n")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["collect"], help="download what the GPU machine lacks")
    parser.add_argument("--dry-run", action="store_true", help="the same steps on CPU ranks")
    parser.add_argument("--only", metavar="STEP,…", default="", help=f"of {', '.join(step.name for step in STEPS)}")
    parser.add_argument("--seconds", type=float, help="for all steps together")
    chosen = parser.parse_args(words)
    if chosen.command:
        return gpu_wheels.collect()
    names = [name for name in chosen.only.split(",") if name]
    if unknown := set(names) - {step.name for step in STEPS}:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in STEPS)}")
    adopt_orphans()
    out = Path(os.environ.get("OUT") or ROOT / "out" / "gpu_check").absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs is ended on the way
    return check(chosen.dry_run, names, chosen.seconds or (DRY_SECONDS if chosen.dry_run else SECONDS), out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
