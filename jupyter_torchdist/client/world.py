"""What a rank on this machine shares with the process that started the job. Sent through a pipe, never stored."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

from ..protocol.errors import OptionError
from ..protocol.spec import Options
from ..protocol.world import LIBRARIES, World


def world_here(options: Options, cwd: Path) -> World:
    """The ``World`` of this process. Raises ``OptionError`` for a variable of ``--env`` that is not set here."""
    return World(
        environ={**os.environ, **chosen_variables(options)},
        cwd=str(cwd),
        sys_path=tuple(sys_path(cwd)),
        umask=umask(),
        rlimits=rlimits(),
        python=sys.executable,
        libraries=libraries(),
    )


def libraries() -> tuple[str, ...]:
    """The packages in ``LIBRARIES`` that are imported here, with their public subpackages and modules."""
    names = [name.split(".") for name in list(sys.modules) if name.startswith(LIBRARIES)]
    return tuple(
        sorted(".".join(parts) for parts in names if parts[0] in LIBRARIES and len(parts) <= 2 and parts[-1][0] != "_")
    )


def chosen_variables(options: Options) -> dict[str, str]:
    """The variables of ``--env``, with the values given there or else the values in this process."""
    chosen = {}
    for item in options.env:
        name, given, value = item.partition("=")
        if not given and name not in os.environ:
            # This also happens in a rerun, because values of the environment are never stored.
            hint = f"write --env {name}=VALUE, or set it here before: os.environ[{name!r}] = …"
            raise OptionError(f"--env {name}: there is no such variable here", hint)
        chosen[name] = value if given else os.environ[name]
    return chosen


def sys_path(cwd: Path) -> list[str]:
    """``sys.path`` with absolute entries only, because ranks may change their directory. At its end, the directories
    of extension modules outside of all entries: of ``%%cython``, or of PyTorch's ``load_inline``."""
    entries = [str(cwd / entry) for entry in sys.path]
    specs = (getattr(module, "__spec__", None) for name, module in list(sys.modules.items()) if "." not in name)
    built = [str(spec.origin) for spec in specs if spec is not None and isinstance(spec.loader, ExtensionFileLoader)]
    outside = (
        os.path.dirname(file) for file in built if not file.startswith(tuple(f"{one}{os.sep}" for one in entries))
    )
    return [*entries, *dict.fromkeys(outside)]


def umask() -> int:
    """This process's file mode mask, read from /proc if possible, else by setting it for a moment."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def rlimits() -> dict[str, tuple[int, int]]:
    """Resource limits by name, (soft, hard)."""
    import resource  # Not on Windows, where the kernel's side only says that.

    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}
