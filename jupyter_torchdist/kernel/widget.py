"""The widget under a cell: views in the browser, fed by the kernel, for front ends without our server extension.

Only this file imports anywidget, which is optional. Only a person gets a widget: programs that run notebooks
(nbclient, papermill, nbconvert) would save its state, with all of its JavaScript, in the notebook.
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
from . import pump, session
from .subshell import HOOK, MainShell, subshells

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SCRIPT = Path(__file__).parents[1] / "static" / "widget.js"
"""Built from ``labextension/src/widget.ts``; missing in a checkout that was never built."""
STYLE = SCRIPT.with_suffix(".css")
VIEW_TYPE = "application/vnd.jupyter.widget-view+json"
LARGE = 16 * 1024
"""A message with more characters of JSON is sent as a binary buffer, if the front end supports it."""
STRAYS = 2.0
"""For so many seconds after our subshell exists, messages may still arrive at the main shell."""
IDLE = 0.1
"""Seconds after which the kernel has sent *idle* for a handled message."""
KEPT = 8
"""How many widgets of ended jobs are kept with their views; older ones become still pictures."""


class JobWidget(anywidget.AnyWidget):
    """The model. ``snapshot`` is what a view shows before its first message: {job, host, state, text}."""

    _esm = SCRIPT if SCRIPT.exists() else ""
    _css = STYLE if STYLE.exists() else ""
    snapshot = traitlets.Dict().tag(sync=True)


class Live:
    """The widget of one job, from the cell's start until its last view is closed."""

    def __init__(self, kernel: Any, paths: JobPaths, still: Callable[[], None]) -> None:
        """``still`` shows the picture again without the widget. It is called from a thread."""
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
        """The widget's MIME types for the output's bundle; empty once the widget is closed."""
        if (widget := self._widget) is None:
            return {}
        return {VIEW_TYPE: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}

    @property
    def over(self) -> bool:
        """Whether the widget is closed or its job has ended."""
        return self._widget is None or self.ended()

    def tick(self) -> None:
        """Called by the waiting cell: handle messages in the main shell's queue that our subshell did not receive."""
        self._stay_busy()
        if not (self._routed and self._subshells.name):
            self._heard_elsewhere = math.inf
        elif self._heard_elsewhere == math.inf:
            self._heard_elsewhere = time.monotonic()
        if self._main and self._widget and time.monotonic() - self._heard_elsewhere < STRAYS:
            self._main.poll({self._comm.comm_id: self._comm.handle_msg})

    def _stay_busy(self) -> None:
        """Send *busy* again: after each message the kernel sends *idle*, and front ends show it for the kernel."""
        if time.monotonic() >= self._idle_at:
            self._idle_at = math.inf
            kernel, status = self._kernel, {"execution_state": "busy"}
            kernel.session.send(kernel.iopub_socket, "status", status, kernel.get_parent("shell"))

    def _idles(self) -> None:
        """The kernel will soon send *idle*."""
        self._idle_at = min(self._idle_at, time.monotonic() + IDLE)

    def show(self, snapshot: dict[str, Any]) -> None:
        """Set what a new view shows first."""
        if (widget := self._widget) is not None:  # the pump's thread may close the widget at any time
            widget.snapshot = snapshot

    def retire(self) -> None:
        """Close the widget and show the still picture in its place."""
        if self._widget is not None:
            self._pump.close()
            self._end()

    # ---- for the pump

    def feed(self) -> Feed:
        """The feed for a new view."""
        return Feed(self._paths, Home(self._paths.root.parent.parent))

    def send(self, view: str, messages: list[dict[str, Any]], binary: bool) -> None:
        """Send ``messages`` in few comm messages, as text or as a buffer of UTF-8."""
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
        """There is no view: close the widget and show the picture."""
        self._end()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the subshell while the thread runs."""
        with self._subshells.held():
            self._idles()
            yield

    def _hear(self, content: Any) -> None:
        """Handle a message of the comm, in any thread."""
        self._idles()
        if isinstance(content, dict):
            with contextlib.suppress(ValueError, TypeError):
                message = codec.loads(content["message"]) if content.get("message") else None
                self._pump.hand({**content, "message": message})

    def _end(self) -> None:
        widget, self._widget = self._widget, None
        if widget is not None:
            self._still()  # before the model closes: a view without a model shows an error
            widget.close()


_lives: list[Live] = []


def _remember(live: Live) -> None:
    """Limit the number of widgets: the browser loads the state of each one again with the page."""
    _lives[:] = [earlier for earlier in _lives if earlier.forms]
    ended = [earlier for earlier in _lives if earlier.over]
    for earlier in ended[: max(0, len(ended) - KEPT)]:
        earlier.retire()
    _lives.append(live)


def possible(ip: InteractiveShell) -> bool:
    """Whether a person uses a front end that may show a widget, and its messages would be handled."""
    kernel = getattr(ip, "kernel", None)
    return kernel is not None and SCRIPT.exists() and session.somebody_is_there(ip) and _hears(kernel)


def _hears(kernel: Any) -> bool:
    return hasattr(BaseComm, HOOK) or MainShell.of(kernel) is not None
