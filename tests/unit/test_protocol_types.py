"""TypeScript's types are generated from Python's, and the file is current."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest

from jupyter_torchdist.protocol.feed import Progress
from jupyter_torchdist.protocol.gauges import Gauges
from scripts import protocol_types

SCRIPT = Path(protocol_types.__file__)


def test_the_file_is_current() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_file_that_is_not_current_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(protocol_types, "TARGET", tmp_path / "protocol.ts")
    assert protocol_types.main(["--check"]) == 1
    assert "run python scripts/protocol_types.py" in capsys.readouterr().err
    assert protocol_types.main([]) == 0
    assert protocol_types.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (int | None, "number | null"),
        (tuple[str, ...], "string[]"),
        (tuple[tuple[str, int], ...], "[string, number][]"),
        (list[int | None], "(number | null)[]"),
        (dict[int, str], "Record<string, string>"),
        (dict[str, Any], "Record<string, unknown>"),
        (dict[str, Annotated[Any, Gauges]], "Record<string, Gauges>"),
        (Sequence[float], "number[]"),
        (Progress | None, "Progress | null"),
    ],
)
def test_types(hint: Any, text: str) -> None:
    assert protocol_types.typescript(hint) == text


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(TypeError, match="no TypeScript form"):
        protocol_types.typescript(complex)


def test_fields_carry_their_docstrings() -> None:
    text = protocol_types.generate()
    assert "/** `cell` (the source runs in `__main__`)" in text
    assert "  gauges?: Record<string, Gauges>;" in text
    assert "export const FINAL_STATES = ['succeeded'," in text
