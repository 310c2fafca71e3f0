"""``!command`` with the notebook's values in it, as IPython expands it."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.utils.text import DollarFormatter

from jupyter_torchdist.marshal import commands

SCOPE: dict[str, Any] = {"name": "x y", "n": 3, "items": [1, 2], "row": {"k": "v"}}


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("ls", set()),
        ("ls {name} $n", {"name", "n"}),
        ("echo {items[n - 2]} {row['k']} {n!r} {items[0:1]}", {"items", "n", "row"}),
        ("echo {n:>4}", set()),
        ("echo '$n' \"$n\" $$n ${n}", {"n"}),
        ("echo $HOME $n", {"HOME", "n"}),
        ("awk '{print $1}'", set()),
        ("echo {", set()),
        ("echo {}", set()),
        ("echo {{n}} $row", {"row"}),
    ],
)
def test_commands_are_read_and_expanded_as_in_ipython(command: str, names: set[str]) -> None:
    assert commands.names(command) == names
    try:
        wanted = DollarFormatter().vformat(command, [], SCOPE)
    except Exception:
        wanted = command  # as ``InteractiveShell.var_expand`` does
    assert commands.expand(command, SCOPE) == wanted
