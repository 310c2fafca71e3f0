"""What processes of tests need not load."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LEAN = Path(__file__).parent / "lean"
"""Modules that stand in for some of the environment's."""


def without_grammars() -> None:
    """Keep ``rfc3987_syntax`` out of this process: importing it compiles 45 grammars, two seconds of a processor.

    jsonschema asks for it, and does without where it is not installed; nothing here has an IRI to check.
    """
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # documented: the import fails


def lean_path() -> str:
    """``PYTHONPATH`` of a Jupyter server that does without them, too."""
    return os.pathsep.join([str(LEAN), *filter(None, [os.environ.get("PYTHONPATH")])])
