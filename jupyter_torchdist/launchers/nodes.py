"""What an engine with a queue has, and whether it is enough for a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import ResourceError
from ..protocol.spec import Options
from ..views.wording import count


@dataclass(frozen=True)
class Node:
    """What one node has."""

    name: str
    cores: int
    gpus: int
    kind: str = "gpu"
    """Of its GPUs, as the engine names it."""


def cores_asked_for(node: Node, options: Options, values: Mapping[str, Any], nodes: int) -> int:
    """On a node, of ``nodes``. ``values``: the launcher's options; of those ``cpus`` and ``exclusive`` count."""
    if "cpus" in values:
        return int(values["cpus"])
    if values.get("exclusive"):
        return node.cores
    if options.ranks is not None:
        return min(node.cores, -(-options.ranks // nodes))
    each = node.gpus if options.gpus is None else -(-options.gpus // nodes)
    return max(1, node.cores * each // max(1, node.gpus))


def check_gpus(options: Options, nodes: Sequence[Node], where: str, remedy: str) -> None:
    """Raises ``ResourceError`` when the nodes lack GPUs; ``remedy``: how to get nodes that have some."""
    if options.ranks is not None:
        return
    have = sum(node.gpus for node in nodes)
    if not have:
        raise ResourceError(f"the nodes of {where} have no GPUs", f"{remedy}, or --ranks N for CPU ranks")
    if options.gpus is not None and options.gpus > have:
        each = f"have {nodes[0].gpus} each" if len(nodes) > 1 else f"has {nodes[0].gpus}"
        raise ResourceError(
            f"--gpus {options.gpus}: {count(len(nodes), 'node')} of {where} {each}",
            f"--gpus {have}, or --nodes {-(-options.gpus // max(1, nodes[0].gpus))}",
        )
