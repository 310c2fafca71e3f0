"""`make test-torch`: run the tests with this environment's PyTorch and Python, and note what was seen in README.md.

``python -m scripts.releases SUITE…`` runs the suites named, puts their numbers into ``tests/releases.json`` and writes
README's table anew. Without a suite it only writes the table. It exits with 1 when a test failed.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from jupyter_torchdist.protocol.releases import release_of

ROOT = Path(__file__).resolve().parent.parent
SEEN = ROOT / "tests" / "releases.json"
README = ROOT / "README.md"
MARKS = ("<!-- seen: written by scripts/releases.py -->\n", "<!-- seen: end -->\n")

SUITES = {
    "unit": ("unit tests", ("--ignore", "tests/unit/test_releases.py", "tests/unit")),
    "cells": ("three cells under each strategy", ("-m", "soak or not soak", "tests/strategies/test_releases.py")),
    "quickstart": ("the quickstart", ("tests/integration/test_notebooks.py",)),
    "integration": ("integration tests", ("-m", "not soak and not strategies", "tests/integration")),
    "strategies": ("strategy tests", ("-m", "strategies and not soak", "tests/integration", "tests/strategies")),
}
"""Of each suite: how README calls it, and what pytest is asked to run.

The test of the table itself is left out: it fails until the table is whole.
"""

Counts = Mapping[str, int]
"""Tests of one suite: ``passed``, ``failed`` and ``skipped``."""


def main(suites: Sequence[str]) -> int:
    if unknown := [name for name in suites if name not in SUITES]:
        print(f"There is no suite {unknown[0]!r}; there are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    failed = [name for name in suites if note(name, run(name))]
    write_table()
    return 1 if failed else 0


def run(name: str) -> Counts:
    """Run one suite in an interpreter of its own; what pytest prints is shown as it comes."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "junit.xml")
        arguments = [*SUITES[name][1], f"--junitxml={report}", "--numprocesses", "2", "--dist", "worksteal", "-q"]
        code = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode
        if code not in (0, 1):
            raise SystemExit(f"pytest ended with exit code {code} in the suite {name!r}: nothing is noted")
        return counts(report.read_text(encoding="utf-8"))


def counts(report: str) -> Counts:
    """What a report in JUnit's form says."""
    suite = ElementTree.fromstring(report).find("testsuite")  # written by pytest just now
    assert suite is not None
    failed, skipped = (int(suite.attrib[kind]) for kind in ("failures", "skipped"))
    failed += int(suite.attrib["errors"])
    return {"passed": int(suite.attrib["tests"]) - failed - skipped, "failed": failed, "skipped": skipped}


def note(name: str, seen: Counts) -> int:
    """Put a suite's counts beside those of other suites and other environments; gives how many failed."""
    every = read()
    torch, python = metadata.version("torch").partition("+")[0], ".".join(platform.python_version_tuple()[:2])
    every.setdefault(torch, {}).setdefault(python, {})[name] = dict(seen)
    SEEN.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return seen["failed"]


def read() -> dict[str, dict[str, dict[str, Counts]]]:
    """By PyTorch's release and by Python's minor release: the suites that ran, and their counts."""
    found: dict[str, dict[str, dict[str, Counts]]] = (
        json.loads(SEEN.read_text(encoding="utf-8")) if SEEN.exists() else {}
    )
    return found


def table() -> str:
    lines = ["| PyTorch | Python | seen to pass |\n", "|---|---|---|\n"]
    for torch, pythons in sorted(read().items(), key=lambda item: release_of(item[0])):
        for python, suites in sorted(pythons.items(), key=lambda item: release_of(item[0])):
            lines.append(f"| {torch} | {python} | {_words(suites)} |\n")
    return "".join(lines)


def _words(suites: Mapping[str, Counts]) -> str:
    ran = [name for name in SUITES if name in suites]
    good = [SUITES[name][0] for name in ran if not suites[name]["failed"]]
    bad = [f"**{SUITES[name][0]}: {suites[name]['failed']} failed**" for name in ran if suites[name]["failed"]]
    return "all tests" if len(good) == len(SUITES) else "; ".join(filter(None, [", ".join(good), *bad]))


def in_readme(text: str) -> str:
    """``text`` with the table of today."""
    before, begin, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    assert begin and end, "README.md has no place for the table"
    return f"{before}{begin}{table()}{end}{after}"


def write_table() -> None:
    README.write_text(in_readme(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
