"""``--hosts``: which hosts, and how many ranks on each. ``--host-option``: how Python is found on them, and groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from .errors import OptionError
from .plan import Reach
from .typed import Record

LOCAL = "local"
"""The launcher of this machine."""

SSH = "ssh"
"""The launcher of ``--hosts``."""

KEYS = ("python", "scratch", "setup", "bring")
"""Settings of a host: fields of ``Reach``."""

BRING = "100M"
"""How much of the files that a cell writes on a host comes back at most."""

_NAME = re.compile(r"(?:[^\s@:,\[\]/=-][^\s@:,\[\]/=]*@)?[A-Za-z0-9_][A-Za-z0-9._-]*")
_GROUP = re.compile(r"@[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True)
class Host(Record):
    """A host by the name that ``ssh`` knows."""

    name: str
    slots: int | None = None
    """GPUs or CPU ranks there; None: as many as are free, or an equal part of --ranks."""
    reach: Reach = field(default_factory=Reach)


def parse_hosts(text: str) -> tuple[str, ...]:
    """``gpu1,gpu2:4,@group`` as single entries. Raises ``ValueError`` that says what was expected."""
    entries = tuple(entry.strip() for entry in text.split(",") if entry.strip())
    if not entries:
        raise ValueError("at least one host")
    for entry in entries:
        if not _GROUP.fullmatch(entry):
            _host(entry)
    return entries


def parse_setting(text: str) -> str:
    """``gpu1.python=PATH``, ``python=PATH`` (of all hosts) or ``@group=gpu1,gpu2:4``. Raises ``ValueError``."""
    left, given, value = text.partition("=")
    name, _, key = left.strip().rpartition(".")
    if given and value.strip():
        if _GROUP.fullmatch(left.strip()):
            return f"{left.strip()}={','.join(parse_hosts(value))}"
        if key in KEYS and (not name or _NAME.fullmatch(name)):
            if key == "bring":
                bytes_of(value)
            return f"{left.strip()}={value.strip()}"
    raise ValueError(f"HOST.KEY=VALUE or KEY=VALUE with one of {', '.join(KEYS)}, or @GROUP=HOST,HOST")


def bytes_of(text: str) -> int:
    """``500M``, ``10GB``, ``2Gi`` in bytes. Raises ``ValueError``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text.strip())
    if not match:
        raise ValueError(f"a size such as 500M or 10G; {text!r} is none")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " "))


def _host(entry: str) -> Host:
    name, colon, count = entry.partition(":")
    if not _NAME.fullmatch(name):
        raise ValueError(f"names of hosts, separated by commas, each with or without :N; {entry!r} is none")
    if colon and not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ValueError(f"a number of GPUs or ranks after the colon of {entry!r}")
    return Host(name, int(count) if colon else None)


def hosts_of(entries: Sequence[str], settings: Sequence[str]) -> tuple[Host, ...]:
    """The hosts of ``--hosts`` with their settings; a later setting counts, and one of a host more than one of all.

    Raises ``OptionError`` for an unknown group, and for a host that is there twice.
    """
    table = dict(text.split("=", 1) for text in settings)
    hosts = tuple(replace(host, reach=_reach(host.name, table)) for host in _resolved(entries, table, ()))
    names = [host.name for host in hosts]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise OptionError(
            f"--hosts: {twice} stands there {names.count(twice)} times", f"write it once, with {twice}:N for N ranks"
        )
    return hosts


def settings_of_all(settings: Sequence[str]) -> Reach:
    """The settings without a host's name, for nodes whose names are not known."""
    return _reach("", dict(text.split("=", 1) for text in settings))


def known_hosts(settings: Sequence[str]) -> tuple[str, ...]:
    """The entries of all groups, and the hosts that have settings: all hosts that ``torchdist.toml`` names."""
    table = dict(text.split("=", 1) for text in settings)
    groups = [name for name in table if name.startswith("@")]
    found = {host.name: host for host in _resolved(groups, table, ())}
    named = (name.rpartition(".")[0] for name in table if name not in groups)
    return tuple(
        name if (host := found.get(name)) is None or host.slots is None else f"{name}:{host.slots}"
        for name in dict.fromkeys([*found, *filter(None, named)])
    )


def _resolved(entries: Sequence[str], table: dict[str, str], inside: tuple[str, ...]) -> Iterator[Host]:
    for entry in entries:
        if not entry.startswith("@"):
            yield _host(entry)
        elif entry in inside:
            raise OptionError(f"the group {entry} contains itself", "correct it in torchdist.toml")
        elif entry in table:
            yield from _resolved(table[entry].split(","), table, (*inside, entry))
        else:
            known = ", ".join(name for name in table if name.startswith("@")) or "none"
            raise OptionError(
                f"--hosts: there is no group {entry}; known: {known}",
                f'write {entry[1:]} = ["gpu1", "gpu2:4"] below [hosts] in torchdist.toml',
            )


def _reach(name: str, table: dict[str, str]) -> Reach:
    return Reach(**{key: table.get(f"{name}.{key}", table.get(key, "")) for key in KEYS})
