"""The server of ``torchdist mcp``, over stdin and stdout. An assistant starts it, and ends it by closing stdin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .. import __version__
from ..protocol.errors import TorchDistError, UserError
from ..protocol.machine.inventory import installed
from ..views.wording import in_shell
from . import tools

INSTRUCTIONS = """\
Jobs of jupyter_torchdist: distributed PyTorch training on this user's machine. Begin with `jobs`, then `job`.
For a failed job ask `findings`; for one that hangs `job` and `stacks`. `logs` reads bytes of one rank's output.
Answers are bounded: `rest` says how to ask for more."""


def serve(*, allow_control: bool) -> None:
    """Answer until stdin ends. ``cancel`` and ``rerun`` are there only with ``allow_control``. Raises ``UserError``."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp_types import ToolAnnotations
    except ModuleNotFoundError:
        found = installed("mcp")
        what = f"mcp {found} is installed" if found else "it is not installed"
        raise UserError(
            f"torchdist mcp needs version 2 of the package mcp, and {what}", "pip install 'jupyter_torchdist[mcp]'"
        ) from None
    server = MCPServer("torchdist", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    for tool in tools.READING:
        server.add_tool(_in_words(tool, ToolError), annotations=ToolAnnotations(read_only_hint=True))
    for tool in tools.CONTROL if allow_control else ():
        harm = ToolAnnotations(read_only_hint=False, destructive_hint=tool is tools.cancel)
        server.add_tool(_in_words(tool, ToolError), annotations=harm)
    server.run()


def _in_words(tool: Callable[..., Any], kind: type[Exception]) -> Callable[..., Any]:
    """The tool with errors of ours as the package's own, which reach the assistant with their words."""

    @functools.wraps(tool)
    def call(*args: Any, **words: Any) -> Any:
        try:
            return tool(*args, **words)
        except TorchDistError as error:
            raise kind(in_shell(f"{type(error).__name__}: {error}")) from None

    # The package looks for the names of types among the globals of ``call``.
    call.__signature__ = inspect.signature(tool, eval_str=True)  # type: ignore[attr-defined]
    return call
