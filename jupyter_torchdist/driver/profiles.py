"""Passes a client's request for a profile on to all nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..protocol.events import ProfileRequest
from .links import Link


def ask(links: Iterable[Link], request: ProfileRequest, say: Callable[..., None]) -> None:
    """Have every rank profile its next steps. The journal gets what is known of the nodes' clocks."""
    for link in links:
        if link.clock.known is not None and not link.shared:
            say("node.clock", node=link.node.name, **vars(link.clock.known))
        link.ask_profile(request)
