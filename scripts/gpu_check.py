"""``scripts/gpu_check``: one run on a GPU machine without internet, and one page of what came of it.

``collect`` downloads here what that machine lacks. There, without a word, it installs that into an environment of its
own and runs the steps, the most telling first. Standard library only: the page is written though nothing else works.
"""

from __future__ import annotations

import argparse
import ctypes
import html
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".gpu-check"
WHEELS = FOLDER / "wheels"
TESTS = "tests/integration/gpu"

PYTHON = (3, 12)
"""That of the GPU machine; the wheels are for it alone."""
GLIBC = ("2_5", "2_12", "2_17", "2_24", "2_26", "2_27", "2_28")
"""Every tag that such a machine takes: pip compares them by name."""
PLATFORMS = [
    *(f"manylinux_{tag}_x86_64" for tag in GLIBC),
    *(f"manylinux{tag}_x86_64" for tag in ("1", "2010", "2014")),
]
IN_THE_IMAGE = ("torch",)
"""What is there, with its CUDA libraries, and far too large to travel."""
FOR_THE_TESTS = ("jupyter-client", "psutil", "pytest", "pytest-timeout")
MOST_BYTES = 60_000_000

SECONDS = 470.0
"""For all steps together; the machine is lent for minutes."""
DRY_SECONDS = 230.0
END_SECONDS = 3.0
"""That a step has to write down where it stands, once its time is over."""
LINES = 60
"""Of what failed, on the page."""


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


# -------------------------------------------------------------------------------------------------- running processes


def adopt_orphans() -> None:
    """Whatever a step leaves behind becomes a child of this process (prctl(2)), which ends it."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def run(words: Sequence[str], seconds: float, log: Path, environ: dict[str, str] | None = None) -> int | None:
    """The exit code of a command, its output in ``log``; None when its time was over, and it was ended.

    Nothing that it started lives on. It is told first (SIGABRT): pytest then writes where each thread stands.
    """
    with open(log, "wb") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, env=environ, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            return None
        finally:
            end_descendants()
            process.wait()


def end_descendants() -> None:
    """Kill what is below this process, and what becomes its child by that, until nothing is left."""
    until = time.monotonic() + 10  # one in the kernel's hands may not end
    while (below := descendants()) and time.monotonic() < until:
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        time.sleep(0.02)


def descendants() -> list[int]:
    """Processes below this one, those that have ended and were not waited for included."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):  # ended meanwhile
                parent = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def tail_of(log: Path) -> str:
    with suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-LINES:])
    return ""


# ----------------------------------------------------------------------------------------------------------- the steps


def take(step: Step, python: str, dry: bool, seconds: float, place: Path) -> Result:
    """Run a step's tests."""
    log, report = place / f"{step.name}.log", place / f"{step.name}.xml"
    marked = "not gpu and (soak or not soak)" if dry else "gpu"
    words = [python, "-m", "pytest", f"{TESTS}/{step.tests}", "-m", marked, "-v", "-p", "no:randomly", "--tb=short"]
    words += ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    limit, began = min(step.seconds, seconds), time.monotonic()
    try:
        code = run(words, limit, log, {**os.environ, "PYTHONUNBUFFERED": "1"})
    except OSError as error:
        return Result(f"could not start: {error}", False)
    took = time.monotonic() - began
    if code is None:
        return Result(f"took longer than {limit:.0f} s, and was ended", False, took, tail=tail_of(log))
    return read_report(code, report, log, took)


def read_report(code: int, report: Path, log: Path, seconds: float) -> Result:
    """What pytest wrote down of its tests (JUnit's XML)."""
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return Result(f"ended with code {code} and no report", False, seconds, tail=tail_of(log))
    numbers = [(item.get("name", ""), item.get("value", "")) for case in cases for item in case.iter("property")]
    faults = [fault for case in cases for kind in ("failure", "error") for fault in case.iter(kind)]
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - failed - skipped
    said = ", ".join(
        f"{count} {word}" for count, word in ((failed, "FAILED"), (passed, "passed"), (skipped, "skipped")) if count
    )
    words = "\n\n".join("\n".join((fault.text or "").splitlines()[-LINES:]) for fault in faults)
    return Result(
        said or "no test ran", code == 0 and passed > 0, seconds, numbers, words or ("" if code == 0 else tail_of(log))
    )


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
    found["GPUs as torch sees them"] = ", ".join(torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count()))
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


# --------------------------------------------------------------------------------------------------------- the packages


def requirements() -> list[str]:
    """Ours and the tests', as ``pyproject.toml`` says them, but for what is in the machine's image."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = [one for one in project["optional-dependencies"]["dev"] if _name(one) in FOR_THE_TESTS]
    return [one for one in (*project["dependencies"], *tests) if _name(one) not in IN_THE_IMAGE]


def _name(requirement: str) -> str:
    return requirement.replace("_", "-").partition(">")[0].partition("=")[0].strip().lower()


def collect() -> int:
    """Download the wheels that the machine may lack; say what to carry."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as fresh:
        words = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--only-binary=:all:"]
        words += [f"--platform={name}" for name in PLATFORMS]
        version = ".".join(map(str, PYTHON))
        words += [f"--python-version={version}", "--implementation=cp", f"--abi=cp{version.replace('.', '')}"]
        words += ["--abi=abi3", "--abi=none", f"--constraint={ROOT / 'constraints.txt'}", f"--dest={fresh}"]
        done = subprocess.run([*words, *requirements()], capture_output=True, text=True)
        if done.returncode:
            print(f"The wheels could not be downloaded:\n{done.stderr.strip()}", file=sys.stderr)
            return 1
        shutil.rmtree(WHEELS, ignore_errors=True)
        shutil.copytree(fresh, WHEELS)
    found = list(WHEELS.iterdir())
    size = sum(wheel.stat().st_size for wheel in found)
    print(f"{len(found)} wheels, {size / 1e6:.1f} MB, in {WHEELS.relative_to(ROOT)}: carry that folder, and there run")
    print("  bash scripts/gpu_check")
    if size > MOST_BYTES:
        print(f"That is more than the {MOST_BYTES / 1e6:.0f} MB that may travel.", file=sys.stderr)
        return 1
    return 0


def environment(place: Path) -> tuple[str, str]:
    """The Python that the steps run on, and how it came to be.

    Where the wheels fit: an environment of its own over this Python's, in which pip puts only what is missing or too
    old. Raises ``RuntimeError`` when that fails.
    """
    if not WHEELS.is_dir() or sys.version_info[:2] != PYTHON:
        return sys.executable, "as it was found" if WHEELS.is_dir() else "as it was found: no wheels were carried"
    target, log = place / "environment", place / "install.log"
    python = str(target / "bin" / "python")
    _must([sys.executable, "-m", "venv", "--without-pip", str(target)], log)
    (library,) = target.glob("lib/python*/site-packages")
    below = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    lines = [f"import site; site.addsitedir({entry!r})" for entry in below]
    (library / "gpu_check.pth").write_text("\n".join([str(ROOT), *lines]) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"]
    _must([*pip, "--no-index", "--no-cache-dir", f"--find-links={WHEELS}", *requirements()], log)
    names = sorted(entry.name.split(".dist-info")[0] for entry in library.glob("*.dist-info"))
    return python, f"installed over it: {', '.join(names)}"


def _must(words: Sequence[str], log: Path) -> None:
    code = run(words, 60, log)
    if code != 0:
        raise RuntimeError(f"{' '.join(words[1:4])} ended with {code}:\n{tail_of(log)}")


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
            python, page.facts["environment"] = environment(place)
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


def main(words: Sequence[str], run_check: Callable[..., int] = check) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["collect"], help="download what the GPU machine lacks")
    parser.add_argument("--dry-run", action="store_true", help="the same steps on CPU ranks")
    parser.add_argument("--only", metavar="STEP,…", default="", help=f"of {', '.join(step.name for step in STEPS)}")
    parser.add_argument("--seconds", type=float, help="for all steps together")
    chosen = parser.parse_args(words)
    if chosen.command:
        return collect()
    names = [name for name in chosen.only.split(",") if name]
    if unknown := set(names) - {step.name for step in STEPS}:
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    adopt_orphans()
    out = Path(os.environ.get("OUT") or ROOT / "out" / "gpu_check").absolute()
    return run_check(chosen.dry_run, names, chosen.seconds or (DRY_SECONDS if chosen.dry_run else SECONDS), out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
