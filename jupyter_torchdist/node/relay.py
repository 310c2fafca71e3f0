"""Connects standard input and output to this node's agent. Starts the agent if none runs.

The driver runs this at the other end of an SSH connection. The relay copies bytes without decoding them.
"""

from __future__ import annotations

import os
import selectors
import sys

from ..protocol.wire.connect import connect_agent


def main() -> None:
    """Copy in both directions until one side closes."""
    agent = connect_agent(sys.executable).detach()
    routes = {0: agent, agent: 1}
    with selectors.DefaultSelector() as selector:
        for fd in routes:
            selector.register(fd, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                try:
                    data = os.read(key.fd, 1024 * 1024)
                except OSError:
                    return
                if not data:
                    return
                view = memoryview(data)
                while view:
                    try:
                        view = view[os.write(routes[key.fd], view) :]
                    except OSError:
                        return
