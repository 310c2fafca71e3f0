"""``scripts/gpu_check`` without a GPU: its steps on CPU ranks, its page, what it does with steps that hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from scripts import gpu_check, gpu_processes, gpu_wheels
from tests.leaks import RUNTIME, wait_until

ROOT = gpu_processes.ROOT
PROGRAM = str(ROOT / "scripts" / "gpu_check")

QUICK = """
def test_quick(record_property):
    record_property("speed", "3 | 4 <s>")
"""
FAILS = """
def test_fails():
    assert 1 == 2, "one is not two"
"""
HANGS = """
import subprocess, time, pathlib

def test_hangs():
    child = subprocess.Popen(["sleep", "987"], start_new_session=True)
    written = pathlib.Path(__file__).with_name("child.new")
    written.write_text(str(child.pid))
    written.rename(written.with_suffix(""))
    time.sleep(987)
"""
DIES = """
import os

def test_dies():
    os._exit(7)
"""


def environment(out: Path, **more: str) -> dict[str, str]:
    """Without this test's warm processes, which are not the script's to end."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHDIST_", "PYTEST_"))}
    return {**kept, RUNTIME: os.environ[RUNTIME], "OUT": str(out), **more}


def driver(tmp_path: Path, steps: dict[str, tuple[str, float]], *words: str, asks: bool = False) -> list[str]:
    """A command that runs the script with ``steps`` in place of its own: a test's text and seconds, by name.

    It ``asks`` for the versions of the libraries, for which torch is imported, or goes on without.
    """
    listed = []
    for name, (text, seconds) in steps.items():
        file = tmp_path / f"test_{name}.py"
        file.write_text(text)
        listed.append(f"g.Step({name!r}, 'a step', {seconds}, {str(file)!r})")
    source = f"""
        import sys
        from scripts import gpu_check as g
        g.STEPS = ({", ".join(listed)},)
        g.libraries = g.libraries if {asks} else lambda *_: {{}}
        sys.exit(g.main({["--dry-run", *words]!r}))
    """
    return [sys.executable, "-c", textwrap.dedent(source)]


def rows(page: str) -> dict[str, list[str]]:
    """The cells of the table of steps, by step."""
    found = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in page.splitlines() if "|" in line]
    return {cells[0].partition(":")[0]: cells[1:] for cells in found if len(cells) == 4 and ":" in cells[0]}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_step_that_hangs_is_ended_and_told_and_the_next_ones_run(tmp_path: Path) -> None:
    steps = {"hangs": (HANGS, 3.0), "dies": (DIES, 60.0), "fails": (FAILS, 60.0), "quick": (QUICK, 60.0)}
    done = subprocess.run(
        driver(tmp_path, steps, asks=True), cwd=ROOT, env=environment(tmp_path / "out"), capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    page = (tmp_path / "out" / "gpu_check.md").read_text()
    told = rows(page)
    assert list(told) == list(steps)
    assert "took longer than 6 s, and was ended" in told["hangs"][0]
    assert "without a report" in told["dies"][0] and "FAILED" in told["fails"][0]
    assert told["quick"][0] == "1 passed" and told["quick"][2] == r"speed: 3 \| 4 &lt;s&gt;"
    assert "one is not two" in page and "in test_hangs" in page, "where it stood"
    assert "A dry run" in page and "torch" in page
    child = int((tmp_path / "child").read_text())
    assert wait_until(lambda: not alive(child))
    assert "test_hangs" in (tmp_path / "out" / "gpu_check.log").read_text()


def test_what_no_time_is_left_for_is_told(tmp_path: Path) -> None:
    steps = {"hangs": (HANGS, 600.0), "quick": (QUICK, 60.0)}
    subprocess.run(driver(tmp_path, steps, "--seconds", "8"), cwd=ROOT, env=environment(tmp_path), capture_output=True)
    told = rows((tmp_path / "gpu_check.md").read_text())
    assert "and was ended" in told["hangs"][0]
    assert "not run: the time of all steps was over" in told["quick"][0]


def test_a_run_that_is_cut_off_leaves_its_page_and_no_process(tmp_path: Path) -> None:
    steps = {"quick": (QUICK, 60.0), "hangs": (HANGS, 600.0)}
    process = subprocess.Popen(
        driver(tmp_path, steps, "--seconds", "600"), cwd=ROOT, env=environment(tmp_path), stdout=subprocess.DEVNULL
    )
    assert wait_until(lambda: (tmp_path / "child").exists())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    told = rows((tmp_path / "gpu_check.md").read_text())
    assert told["quick"][0] == "1 passed" and told["hangs"][0] == "**not run yet**"
    assert wait_until(lambda: not alive(int((tmp_path / "child").read_text())))


def test_a_dry_run_of_one_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [PROGRAM, "--dry-run", "--only", "sharing"], env=environment(tmp_path), capture_output=True, text=True
    )
    page = (tmp_path / "gpu_check.md").read_text()
    assert done.returncode == 0, page
    assert rows(page)["sharing"][0] == "3 passed"
    assert "refusal: " in rows(page)["sharing"][2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_check.log", "gpu_check.md"]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_dry_run(tmp_path: Path) -> None:
    """All of it within four minutes. A machine that is busy may not come to its end, and that is told."""
    done = subprocess.run(
        [PROGRAM, "--dry-run"], env=environment(tmp_path), capture_output=True, text=True, timeout=240
    )
    page = (tmp_path / "gpu_check.md").read_text()
    told = rows(page)
    assert list(told) == [step.name for step in gpu_check.STEPS]
    unlike = {
        name: cells[0] for name, cells in told.items() if not re.fullmatch(r"\d+ passed(, \d+ skipped)?", cells[0])
    }
    assert not [said for said in unlike.values() if "FAILED" in said], page
    assert done.returncode == (1 if unlike else 0), unlike


def test_a_step_that_there_is_not() -> None:
    done = subprocess.run([PROGRAM, "--dry-run", "--only", "lauch"], capture_output=True, text=True)
    assert done.returncode == 2 and "no such step: lauch" in done.stderr and "launch" in done.stderr


def test_wheels_that_cannot_be_had(tmp_path: Path) -> None:
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run([PROGRAM, "collect"], env=environ, capture_output=True, text=True)
    assert done.returncode == 1 and "could not be downloaded" in done.stderr
    assert "ERROR: " in done.stderr and "anywidget" in done.stderr and "Traceback" not in done.stderr


def test_what_is_asked_for_is_what_the_project_says_but_for_torch() -> None:
    found = gpu_wheels.requirements()
    names = {gpu_wheels._name(one) for one in found}
    assert {"anywidget", "cloudpickle", "ipykernel", "ipython", "pyyaml", "regex", *gpu_wheels.FOR_THE_TESTS} <= names
    assert "torch" not in names and "numpy" not in names


def wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"version = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


INSTALLS = """
import sys
from pathlib import Path
from scripts import gpu_processes, gpu_wheels as g

place = Path(sys.argv[1])
g.WHEELS, g.PYTHON = place / "wheels", sys.version_info[:2]
g.requirements = lambda: ["missing_one>=2", "pytest>=8", "comm>=9999"]
gpu_processes.adopt_orphans()
python, said = g.environment(place)
print(said)
asked = "import missing_one as a, comm as b, pytest, jupyter_torchdist as td; print(a.version, b.version, td.__file__)"
gpu_processes.run([python, "-c", asked], 60, place / "asked")
print((place / "asked").read_text())
"""


def test_only_what_is_missing_or_too_old_is_installed(tmp_path: Path) -> None:
    """Into an environment of its own, over the one that runs the script, and without a network."""
    wheel(tmp_path / "wheels", "missing_one", "2.1")
    wheel(tmp_path / "wheels", "comm", "10000.0")
    wheel(tmp_path / "wheels", "pytest", "99999.0")
    done = subprocess.run([sys.executable, "-c", INSTALLS, tmp_path], cwd=ROOT, capture_output=True, text=True)
    said, asked = done.stdout.splitlines()[:2]
    assert said == "installed over it: comm-10000.0, missing_one-2.1", done.stderr
    assert asked == f"2.1 10000.0 {ROOT / 'jupyter_torchdist' / '__init__.py'}"
