"""A slow cable: carries frames between two interfaces, each as many milliseconds later. Standard library only.

It stands in for ``sch_netem``, which many kernels lack. Frames travel with their ``virtio_net_hdr``, so checksums and
large segments that the kernel has put off stay put off.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque

ETH_P_ALL, SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, SO_RCVBUFFORCE = 3, 263, 15, 23, 33
LARGEST = 70_000
"""Bytes: a segment of 64 KiB and its headers."""
BURST = 256
"""Frames that are read at once before the other side has its turn."""


def tap(interface: str) -> socket.socket:
    """All frames that come in by the interface; what is sent goes out by it."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
    end.bind((interface, ETH_P_ALL))
    end.setblocking(False)
    return end


def take(end: socket.socket, frames: deque[tuple[float, bytes]], due: float) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(BURST):
            frames.append((due, end.recv(LARGEST)))


def carry(one: socket.socket, other: socket.socket, seconds: float) -> None:
    """Until an interface is gone, which is an ``OSError``."""
    waiting: dict[socket.socket, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}
    peers = {one: other, other: one}
    while True:
        now = time.monotonic()
        for end, frames in waiting.items():
            while frames and frames[0][0] <= now:
                with contextlib.suppress(BlockingIOError):  # its queue is full: the frame is lost, as on any cable
                    peers[end].send(frames.popleft()[1])
        pause = min((frames[0][0] - now for frames in waiting.values() if frames), default=None)
        for end in select.select(list(waiting), [], [], pause)[0]:
            take(end, waiting[end], time.monotonic() + seconds)


if __name__ == "__main__":
    ends = tap(sys.argv[1]), tap(sys.argv[2])
    print("ready", flush=True)
    carry(*ends, float(sys.argv[3]) / 1000)
