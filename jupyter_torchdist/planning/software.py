"""Compares the software of hosts with the notebook's, before anything starts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..protocol.bundle import Package
from ..protocol.errors import ResourceError
from ..protocol.plan import Inventory, Plan, Wanted

_CUDA = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12")
"""Distributions whose version is that of CUDA. A build of torch for CUDA of an index of PyTorch names it, too."""

_OF_TORCH = ("nvidia-", "cuda-", "triton")
_NVML = "nvidia-ml-py"


def compare(packages: Sequence[Package], python: str, torch: str, hosts: Sequence[Inventory]) -> str:
    """A note of several lines on what differs; empty if nothing does. ``python`` and ``torch`` are the notebook's.

    Raises ``ResourceError`` for a package that the cell needs and a host lacks, with the commands that mend it.
    """
    hosts = [host for host in hosts if host.software is not None]
    if lacking := [(host, missing) for host in hosts if (missing := [one for one in packages if _lacks(host, one)])]:
        _refuse([(host, sure) for host, missing in lacking if (sure := [one for one in missing if one.certain])])
    rows = {
        "Python": _row(_minor(python), hosts, lambda host: _minor(host.python)),
        "torch": _row(_public(torch), hosts, lambda host: _public(host.torch)),
        "CUDA": _row("", hosts, _cuda),
        **{one.name: _row(one.version, hosts, _version_of(one)) for one in packages if one.name != "torch"},
    }
    differing = {what: row for what, row in rows.items() if row}
    if not differing:
        return ""
    lines = [f"{what} {row}" for what, row in differing.items()]
    return "\n  ".join([f"what hosts have differs from this notebook: {', '.join(differing)}", *lines])


def wanted(here: Mapping[str, str], host: Inventory) -> Wanted | None:
    """What ``--env-sync`` installs on a host that is to have the packages ``here`` (versions by name).

    torch of the same version stays the host's own, whatever it was built for. The libraries of CUDA come with torch.
    """
    if host.software is None:
        return None
    there = host.software.versions
    pins = tuple(
        f"{name}=={_public(version)}"
        for name, version in sorted(here.items())
        if _public(version) != _public(there.get(name, "")) and (name == _NVML or not name.startswith(_OF_TORCH))
    )
    return Wanted(pins, there, host.python, host.platform)


def with_packages(plan: Plan, here: Mapping[str, str], hosts: Sequence[Inventory]) -> Plan:
    """The plan with what ``--env-sync`` installs on each node."""
    found = {host.host: wanted(here, host) for host in hosts}
    return replace(plan, nodes=tuple(replace(node, packages=found.get(node.host)) for node in plan.nodes))


def after_sync(here: Mapping[str, str], host: Inventory) -> Inventory:
    """The host as it is when ``--env-sync`` has installed what it lacks."""
    packages = wanted(here, host)
    if packages is None or host.software is None:
        return host
    new = dict(pin.split("==") for pin in packages.pins)
    software = replace(host.software, versions={**host.software.versions, **new})
    return replace(host, software=software, torch=new.get("torch", host.torch))


def _row(here: str, hosts: Sequence[Inventory], version: Callable[[Inventory], str]) -> str:
    """``2.1.0 here, 1.26.4 on gpu1, gpu2``; empty if all is equal. Without ``here`` hosts are compared."""
    there: dict[str, list[str]] = {}
    for host in hosts:
        there.setdefault(version(host), []).append(host.host)
    if set(there) <= {here or next(iter(there), "")}:
        return ""
    words = [f"{found or 'none'} on {', '.join(names)}" for found, names in there.items()]
    return "; ".join([f"{here} here", *words] if here else words)


def _version_of(package: Package) -> Callable[[Inventory], str]:
    def version(host: Inventory) -> str:
        assert host.software is not None
        found = host.software.versions.get(package.name, "")
        return found or (package.version if package.module in host.software.modules else "")

    return version


def _lacks(host: Inventory, package: Package) -> bool:
    assert host.software is not None
    return package.name not in host.software.versions and package.module not in host.software.modules


def _refuse(lacking: Sequence[tuple[Inventory, Sequence[Package]]]) -> None:
    """Raises ``ResourceError`` if there is any."""
    if not lacking:
        return
    words = "; ".join(
        f"{host.host} ({host.reach.python}) lacks {', '.join(f'{one.name} ({one.user})' for one in missing)}"
        for host, missing in lacking
    )
    commands = "".join(f"\n    {install(host, *map(_wanted, missing))}" for host, missing in lacking)
    raise ResourceError(f"the cell needs packages: {words}", f"install them, and run the cell again:{commands}")


def _wanted(package: Package) -> str:
    public = _public(package.version)
    return f"{package.name}=={public}" if public else package.name


def install(host: Inventory, *what: str) -> str:
    """The command of a shell here that installs packages in the Python of a host."""
    has_pip = host.software is None or "pip" in host.software.modules
    python = host.reach.python
    words = [python, "-m", "pip", "install"] if has_pip else ["uv", "pip", "install", "-p", python]
    quoted = [word if shlex.quote(word) == word else f'"{word}"' for word in (*words, *what)]
    return f"ssh {host.host} '{' '.join(quoted)}'"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _public(version: str) -> str:
    """Without the mark of the build: a laptop has another one than a machine with GPUs."""
    return version.partition("+")[0]


def _cuda(host: Inventory) -> str:
    """The CUDA for which the host's torch was built; empty if it is for the CPU."""
    _, _, build = host.torch.partition("+")
    assert host.software is not None
    found = (host.software.versions[name] for name in _CUDA if name in host.software.versions)
    if build.startswith("cu"):
        return f"{build[2:-1]}.{build[-1]}"
    return build.removeprefix("cpu") or _minor(next(found, ""))
