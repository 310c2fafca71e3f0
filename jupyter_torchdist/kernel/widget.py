"""The widget under a cell: views in the browser, fed by the kernel, for front ends without our server extension.

This file alone imports anywidget, which is optional. A widget is shown only to a person: programs that run notebooks
(nbclient, papermill, nbconvert) would store its state, the whole JavaScript, in what they save.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from ipykernel.comm.comm import BaseComm

from ..feed import Feed
from ..protocol import codec
from ..protocol.paths import Home, JobPaths
from . import pump
from .subshell import HOOK, MainShell, subshells

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SCRIPT = Path(__file__).parents[1] / "static" / "widget.js"
"""Built from ``labextension/src/widget.ts``; a checkout that was never built has none."""
STYLE = SCRIPT.with_suffix(".css")
VIEW_TYPE = "application/vnd.jupyter.widget-view+json"
LARGE = 16 * 1024
"""Characters of JSON from which on a message travels as a binary buffer, where the front end can take one."""
STRAYS = 2.0
"""Seconds for which a message may still be on its way to the main shell once there is a subshell of ours."""
IDLE = 0.1
"""Seconds after which the kernel has said that a message was handled."""
KEPT = 8
"""Widgets of ended jobs that stay alive with their views; earlier ones become still pictures."""


class JobWidget(anywidget.AnyWidget):
    """The model. ``snapshot`` is what a view shows before it has heard anything: {job, host, state, text}."""

    _esm = SCRIPT if SCRIPT.exists() else ""
    _css = STYLE if STYLE.exists() else ""
    snapshot = traitlets.Dict().tag(sync=True)


class Live:
    """The widget of one job, from the cell's start until nobody looks any more."""

    def __init__(self, kernel: Any, paths: JobPaths, still: Callable[[], None]) -> None:
        """``still``: show the picture again, this time without the widget. It is called from a thread."""
        self._paths, self._still = paths, still
        self._kernel, self._subshells = kernel, subshells(kernel)
        self._idle_at = math.inf
        self._main = MainShell.of(kernel)
        self._pump = pump.Pump(self)
        self._pump.start()  # first, so that the subshell is there before a browser can answer
        first = {"job": paths.job, "host": socket.gethostname(), "state": "", "text": ""}
        self._widget: JobWidget | None = JobWidget(snapshot=first)
        self._comm: Any = self._widget.comm
        self._routed = self._subshells.route(self._comm)
        self._heard_elsewhere = math.inf
        self._widget.on_msg(lambda _widget, content, _buffers: self._hear(content))
        _remember(self)

    # ---- for the picture

    @property
    def forms(self) -> dict[str, Any]:
        """What the widget adds to the output's bundle; nothing once it is closed."""
        if (widget := self._widget) is None:
            return {}
        return {VIEW_TYPE: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}

    @property
    def over(self) -> bool:
        """Whether the job has ended, so that nobody waits for this widget."""
        return self._widget is None or self.ended()

    def tick(self) -> None:
        """From the waiting cell: what came while no subshell of ours heard is in the main shell's queue."""
        self._stay_busy()
        if not (self._routed and self._subshells.name):
            self._heard_elsewhere = math.inf
        elif self._heard_elsewhere == math.inf:
            self._heard_elsewhere = time.monotonic()
        if self._main and self._widget and time.monotonic() - self._heard_elsewhere < STRAYS:
            self._main.poll({self._comm.comm_id: self._comm.handle_msg})

    def _stay_busy(self) -> None:
        """After each message on any channel the kernel says *idle*, and front ends show that of the whole kernel."""
        if time.monotonic() >= self._idle_at:
            self._idle_at = math.inf
            kernel, status = self._kernel, {"execution_state": "busy"}
            kernel.session.send(kernel.iopub_socket, "status", status, kernel.get_parent("shell"))

    def _idles(self) -> None:
        """The kernel is about to say so."""
        self._idle_at = min(self._idle_at, time.monotonic() + IDLE)

    def show(self, snapshot: dict[str, Any]) -> None:
        """What a view that opens from now on begins with."""
        if (widget := self._widget) is not None:  # the pump's thread may take it away at any time
            widget.snapshot = snapshot

    def retire(self) -> None:
        """Close the widget; where it was, the still picture is shown."""
        if self._widget is not None:
            self._pump.close()
            self._end()

    # ---- for the pump

    def feed(self) -> Feed:
        """A new view's."""
        return Feed(self._paths, Home(self._paths.root.parent.parent))

    def send(self, view: str, messages: list[dict[str, Any]], binary: bool) -> None:
        """Messages of the comm, each with some of ``messages`` in it as text or as a buffer of UTF-8."""
        for text in pump.bundles(map(codec.dumps, messages)):
            if (widget := self._widget) is None:
                return
            if binary and len(text) > LARGE:
                widget.send({"view": view}, [text.encode()])
            else:
                widget.send({"view": view, "messages": text})

    def ended(self) -> bool:
        """Whether the job has ended, or its files are gone."""
        return self._paths.summary.exists() or not self._paths.spec.exists()

    def abandoned(self) -> None:
        """Nobody looks: the widget goes, the picture stays."""
        self._end()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The subshell, while the thread lives."""
        with self._subshells.held():
            self._idles()
            yield

    def _hear(self, content: Any) -> None:
        """In whatever thread the kernel chose."""
        self._idles()
        if isinstance(content, dict):
            with contextlib.suppress(ValueError, TypeError):
                message = codec.loads(content["message"]) if content.get("message") else None
                self._pump.hand({**content, "message": message})

    def _end(self) -> None:
        widget, self._widget = self._widget, None
        if widget is not None:
            self._still()  # before the model goes: a view without one shows an error
            widget.close()


_lives: list[Live] = []


def _remember(live: Live) -> None:
    """Keep the number of widgets bounded: every one is state that the browser loads again with the page."""
    _lives[:] = [earlier for earlier in _lives if earlier.forms]
    ended = [earlier for earlier in _lives if earlier.over]
    for earlier in ended[: max(0, len(ended) - KEPT)]:
        earlier.retire()
    _lives.append(live)


def possible(ip: InteractiveShell) -> bool:
    """Whether a person sits at a front end that may show a widget, and what they ask would be heard."""
    kernel = getattr(ip, "kernel", None)
    return kernel is not None and SCRIPT.exists() and _somebody_is_there(ip) and _hears(kernel)


def _somebody_is_there(ip: InteractiveShell) -> bool:
    """Whether ``input()`` would be answered: programs that run notebooks say that it will not."""
    parent: Any = getattr(ip, "get_parent", dict)() or {}
    return bool(parent.get("content", {}).get("allow_stdin"))


def _hears(kernel: Any) -> bool:
    return hasattr(BaseComm, HOOK) or MainShell.of(kernel) is not None
