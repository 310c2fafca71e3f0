"""Joins standard input and output to this node's agent, starting it where there is none.

This is what the driver runs at the other end of an SSH connection: the channel's bytes pass unread.
"""

from __future__ import annotations

import os
import selectors
import sys

from ..protocol.connect import connect_agent


def main() -> None:
    """Copy both ways until either side ends."""
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
