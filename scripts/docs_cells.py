"""Runs the code blocks of pages that begin with ``%%distribute``, each page in a kernel of its own.

``python -m scripts.docs_cells [PAGE…]``; without pages all of ``docs``. Where there is no GPU, ``--gpus N`` is run as
``--ranks 2``. A block that fails is named with its page and line, and the exit code is 1.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat.v4
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from jupyter_torchdist.protocol.machine.inventory import gpus

from .messages import ROOT

BLOCK = re.compile(r"^```python\n(%%distribute.*?)^```$", re.DOTALL | re.MULTILINE)


def main(words: list[str]) -> int:
    pages = [Path(word).absolute() for word in words] or sorted((ROOT / "docs").rglob("*.md"))
    wrong = [failure for page in pages for failure in failures(page)]
    sys.stderr.writelines(f"{failure}\n" for failure in wrong)
    return 1 if wrong else 0


def failures(page: Path) -> list[str]:
    """``docs/cell.md:12: NameError: …`` for the first block that fails; what follows it may need it."""
    text = page.read_text(encoding="utf-8")
    blocks = [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in BLOCK.finditer(text)]
    if not blocks:
        return []
    without = not gpus()
    sources = [re.sub(r"--gpus \d+", "--ranks 2", block) if without else block for _, block in blocks]
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in ("%load_ext jupyter_torchdist", *sources)]
    shown = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    print(f"{shown}: {len(blocks)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": directory}})
        try:
            client.execute()
        except CellExecutionError as error:
            ran = sum(cell.execution_count is not None for cell in notebook.cells)
            line, _ = blocks[max(0, ran - 2)]
            return [f"{shown}:{line}: {error.ename}: {error.evalue}"]
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
