"""A real IPython kernel, driven as a front end drives it: tests and benchmarks see what a user sees, and when."""

from __future__ import annotations

import ast
import os
import queue
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from types import TracebackType
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests import kernels

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(text: str) -> str:
    """``text`` without ANSI colours."""
    return _ANSI.sub("", text)


def apart(text: str) -> str:
    """``text`` with each line that several ranks said (``[ranks 0, 2–5] …``) once for each of them."""

    def once_each(match: re.Match[str]) -> str:
        runs = [run.split("–") for run in match[1].split(", ")]
        ranks = [rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)]
        return "\n".join(f"[rank {rank}]{match[2]}" for rank in ranks)

    return re.sub(r"^\[ranks ([\d–, ]+)\](.*)$", once_each, text, flags=re.MULTILINE)


@dataclass(frozen=True)
class CellError:
    """What the notebook shows of an exception; ``traceback`` without colours."""

    name: str
    value: str
    traceback: str


@dataclass
class Cell:
    """One cell's outputs, in the order of arrival."""

    code: str
    sent: float
    """``time.monotonic()``, the same clock for every process of the machine."""
    status: str = "running"
    """running, ok, error, aborted."""
    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    """MIME bundles: displays and their updates."""
    result: dict[str, Any] | None = None
    """MIME bundle of the last line's value."""
    error: CellError | None = None
    ended: float = 0.0
    messages: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """Everything that came from the kernel, with ``time.monotonic()`` of its arrival."""

    @property
    def text(self) -> str:
        """All that a person can read below the cell, without colours."""
        shown = [str(bundle.get("text/plain", "")) + str(bundle.get("text/html", "")) for bundle in self.displays]
        result = str((self.result or {}).get("text/plain", ""))
        error = self.error.traceback if self.error else ""
        return apart(plain("\n".join([self.stdout, self.stderr, *shown, result, error])))

    def add(self, now: float, message: dict[str, Any]) -> None:
        self.messages.append((now, message))
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            if content["name"] == "stdout":
                self.stdout += content["text"]
            else:
                self.stderr += content["text"]
        elif kind in ("display_data", "update_display_data"):
            self.displays.append(content["data"])
        elif kind == "execute_result":
            self.result = content["data"]
        elif kind == "error":
            self.error = CellError(content["ename"], content["evalue"], plain("\n".join(content["traceback"])))

    def seen(self, text: str) -> float | None:
        """When ``text`` first arrived in one message, or None."""
        for when, message in self.messages:
            if text in message_text(message):
                return when
        return None


def message_text(message: dict[str, Any]) -> str:
    """What one message adds to the page, without colours."""
    content = message["content"]
    data = content.get("data") or {}
    parts = [content.get("text", ""), *(data.get(mime, "") for mime in ("text/plain", "text/html"))]
    return apart(plain("\n".join([*(part for part in parts if isinstance(part, str)), *content.get("traceback", ())])))


class CellFailed(AssertionError):
    """A cell that was expected to work raised; the message is its traceback."""


class Notebook:
    """A kernel of its own. Use it as a context: leaving it ends the kernel.

    ``server``: fork it there, instead of starting a new interpreter. ``within``: the words of a command that runs it.
    """

    def __init__(
        self,
        cwd: Path,
        environ: Mapping[str, str] | None = None,
        server: kernels.ForkServer | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.cwd = cwd
        # Unix sockets, not ports: two kernels that start at once cannot race for one.
        self._sockets = Path(tempfile.mkdtemp(prefix="tdk-", dir="/tmp"))
        self.manager = KernelManager(
            kernel_name="python3",
            transport="ipc",
            ip=str(self._sockets / "k"),
            connection_file=str(self._sockets / "kernel.json"),
        )
        assert self.manager.kernel_spec is not None
        if within:  # behind other words, "python" of the specification would be whatever PATH has
            self.manager.kernel_spec.argv[:1] = [*within, sys.executable]
        if server is not None:
            self.manager.provisioner = kernels.ForkProvisioner(
                server=server, kernel_id=self._sockets.name, kernel_spec=self.manager.kernel_spec, parent=self.manager
            )
        private = {"IPYTHONDIR": str(self._sockets / "ipython"), "JUPYTER_RUNTIME_DIR": str(self._sockets)}
        self.environ = {**os.environ, **private, **(environ or {})}
        self.environ.pop("PYTEST_CURRENT_TEST", None)
        self._connect(lambda: self.manager.start_kernel(cwd=str(cwd), env=self.environ))

    def _connect(self, start: Callable[[], object]) -> None:
        start()
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def __enter__(self) -> Notebook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        pid = self.manager.provisioner.pid  # type: ignore[union-attr]
        assert isinstance(pid, int)
        return pid

    def load(self) -> Notebook:
        self.run("%load_ext jupyter_torchdist")
        return self

    def run(self, code: str, timeout: float = 60.0) -> Cell:
        """Run a cell to its end. Raises ``CellFailed`` when it raised, ``TimeoutError`` when it does not end."""
        cell = self.try_run(code, timeout)
        if cell.error or cell.status != "ok":
            raise CellFailed(cell.text or cell.status)
        return cell

    def try_run(self, code: str, timeout: float = 60.0) -> Cell:
        """Run a cell to its end, whichever it is."""
        return self.finish(self.start(code), timeout)

    def start(self, code: str, by_a_person: bool = False) -> Cell:
        """Send a cell and return at once; ``wait_for`` and ``finish`` go on with it."""
        sent = time.monotonic()
        self._parent = self.client.execute(code, allow_stdin=by_a_person)
        return Cell(code, sent)

    def finish(self, cell: Cell, timeout: float = 60.0) -> Cell:
        deadline = time.monotonic() + timeout
        while self._take(cell, deadline):
            pass
        while True:
            reply = self.client.get_shell_msg(timeout=max(deadline - time.monotonic(), 0.1))
            if reply["parent_header"].get("msg_id") == self._parent:
                cell.status = reply["content"]["status"]
                return cell

    def wait_for(self, cell: Cell, text: str, timeout: float = 30.0) -> float:
        """When ``text`` was first seen below the running cell. Raises ``TimeoutError`` when it does not appear."""
        deadline = time.monotonic() + timeout
        while (when := cell.seen(text)) is None:
            if not self._take(cell, deadline):
                raise AssertionError(f"the cell ended without {text!r}:\n{cell.text}")
        return when

    def _take(self, cell: Cell, deadline: float) -> bool:
        """Take one message of the cell; False when it was the last one."""
        try:
            message = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            if time.monotonic() < deadline and self.manager.is_alive():
                return True
            raise TimeoutError(f"the cell did not end in time; until now:\n{cell.text}") from None
        if message["parent_header"].get("msg_id") != self._parent:
            return True
        now = time.monotonic()
        cell.add(now, message)
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            cell.ended = now
            return False
        return True

    def value(self, expression: str) -> Any:
        """A value of the notebook, by way of its ``repr``: numbers, strings and containers of them."""
        whole = f"repr(({expression}))"  # IPython shows 1,000 entries of a list
        self.client.execute("", silent=True, user_expressions={"value": whole})
        while True:
            reply = self.client.get_shell_msg(timeout=60)
            found = reply["content"].get("user_expressions", {}).get("value")
            if found is not None:
                break
        if found["status"] != "ok":
            raise CellFailed(f"{expression}: {found['ename']}: {found['evalue']}")
        return ast.literal_eval(ast.literal_eval(found["data"]["text/plain"]))

    def interrupt(self) -> None:
        """What the ■ button does."""
        self.manager.interrupt_kernel()

    def kill(self) -> None:
        """SIGKILL, as the out-of-memory killer would; ``restart`` brings a new kernel."""
        os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while self.manager.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def restart(self) -> None:
        self.client.stop_channels()
        self._connect(lambda: self.manager.restart_kernel(now=True))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=not self.manager.is_alive())
        self.manager.context.destroy(linger=0)
        rmtree(self._sockets, ignore_errors=True)
