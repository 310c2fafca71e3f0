"""``make docs``: pages that link to nothing, or whose cells fail, are named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import docs_cells

ROOT = Path(__file__).parents[2]


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "sphinx", "-c", "docs", "--fail-on-warning", "--keep-going", "-q", ".", str(target)]
    return subprocess.run(words, cwd=source, text=True, capture_output=True)


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Sphinx 9 is not for Python 3.10")
def test_the_pages_are_built_and_a_broken_link_is_named(tmp_path: Path) -> None:
    for name in ("docs", "notebooks", "tests/strategies", "tests/cells", "tests/benchmarks/RESULTS.md", "README.md",
                 "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"):  # fmt: skip
        place = tmp_path / "source" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, place)
    done = build(tmp_path / "source", tmp_path / "html")
    assert done.returncode == 0, done.stderr
    assert "One channel per node" in (tmp_path / "html" / "docs" / "development" / "launchers.html").read_text()
    page = tmp_path / "source" / "docs" / "limits.md"
    page.write_text(page.read_text() + "\n[nothing](nowhere.md)\n")
    done = build(tmp_path / "source", tmp_path / "html")
    assert done.returncode != 0
    assert "docs/limits.md" in done.stderr and "nowhere.md" in done.stderr


def test_a_cell_that_fails_is_named_with_its_page_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\n%%distribute --ranks 1\nfine = 1\n```\n\n```python\nnot run\n```\n\n"
                    "```python\n%%distribute --ranks 1\nraise ValueError('no good')\n```\n")  # fmt: skip
    assert docs_cells.failures(page) == [f"{page}:13: ValueError: no good"]
