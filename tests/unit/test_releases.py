"""README claims the releases of PyTorch and Python that were seen to pass, and no other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.releases import OLDEST, release_of
from scripts import releases

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

REPORT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10">
<testcase/></testsuite></testsuites>"""


def test_the_table_is_current() -> None:
    assert releases.in_readme(README) == README, "run python -m scripts.releases"


def test_what_is_claimed_is_what_is_checked() -> None:
    claimed = re.search(r"PyTorch (\d+)\.(\d+) to (\d+)\.(\d+) are supported", README)
    assert claimed is not None
    assert tuple(map(int, claimed.groups()[:2])) == OLDEST
    assert "torch>={}.{}".format(*OLDEST) in PROJECT["dependencies"]
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in README


def test_what_is_claimed_was_run_and_passed() -> None:
    """Every minor release of PyTorch on one Python, and every Python on one PyTorch; nothing that ran has failed."""
    claimed = re.search(r"PyTorch (\d+)\.(\d+) to (\d+)\.(\d+) are supported", README)
    assert claimed is not None
    _, oldest, major, newest = map(int, claimed.groups())
    seen = releases.read()
    assert {release_of(torch)[:2] for torch in seen} == {(major, minor) for minor in range(oldest, newest + 1)}
    pythons = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", one)}
    assert {python for every in seen.values() for python in every} == pythons
    runs = {(torch, python): suites for torch, every in seen.items() for python, suites in every.items()}
    assert all({"unit", "cells", "quickstart"} <= set(suites) for suites in runs.values())
    assert [(*run, name) for run, suites in runs.items() for name in suites if suites[name]["failed"]] == []


def test_counts_of_a_report() -> None:
    assert releases.counts(REPORT) == {"passed": 4, "failed": 3, "skipped": 3}


def test_what_failed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "SEEN", tmp_path / "releases.json")
    releases.note("unit", {"passed": 4, "failed": 1, "skipped": 0})
    assert "**unit tests: 1 failed**" in releases.table()
    for name in releases.SUITES:
        releases.note(name, {"passed": 4, "failed": 0, "skipped": 0})
    assert releases.table().endswith("| all tests |\n")


def test_an_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert releases.main(["units"]) == 2
    assert "There is no suite 'units'; there are unit, cells" in capsys.readouterr().err
