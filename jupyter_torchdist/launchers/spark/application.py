"""``python -m jupyter_torchdist.launchers.spark.application``: the process that holds a job's Spark application.

Standard input is a listening socket, on which one driver after the other comes (``helper.py``). The process outlives
them: a Spark application ends with the process that has its SparkContext.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...views.wording import count
from .. import held
from ..base import ENDED, QUEUED, RUNNING
from ..helper import ROOM, Helper
from . import task

LOOK_SECONDS = 0.5
LINE_SECONDS = 20.0
"""How long a channel waits for a line of its node."""

END_SECONDS = 8.0
"""How long tasks may take to end what runs on their nodes."""

CANCEL_SECONDS = 15.0
"""How long a cancel may take in all. Then this process ends, and with it the application."""

EXIT_SECONDS = 2.0
"""How long Java may take to end after it has closed its connections."""

ALONE_SECONDS = 300.0
"""Without a driver and without tasks for this time, nobody will come."""

END = bytes(4)
"""The command that ends a task: one without a text."""


class Application(Helper):
    def __init__(self) -> None:
        super().__init__()
        self._context: Any = None
        self._lines: dict[int, list[socket.socket]] = {}
        self._hosts: dict[int, str] = {}
        """By node: the lines that wait for a command; its host, once it has dialled."""
        self._changed = threading.Condition()
        self._ending = False
        self._job: threading.Thread | None = None

    def serve_all(self, drivers: socket.socket) -> None:
        drivers.settimeout(ALONE_SECONDS)
        while True:
            try:
                driver, _ = drivers.accept()
            except TimeoutError:
                if self._said.get("state") == RUNNING:
                    continue  # the tasks know whether anything runs
                return
            with driver:
                driver.setblocking(True)
                self.serve(driver)

    # -- what the driver asks for

    def submit(self, name: str, request: Mapping[str, Any]) -> None:
        self._job = threading.Thread(target=self._run, args=(name, request), daemon=True)
        self._job.start()

    def connect(self, ours: int, words: int, node: int, command: str) -> None:
        link = socket.socket(fileno=ours)
        threading.Thread(target=self._carry, args=(link, words, node, command), daemon=True).start()

    def cancel(self) -> None:
        threading.Timer(CANCEL_SECONDS, os._exit, (1,)).start()
        error = ""
        try:
            with self._changed:
                self._ending = True
                for line in [line for lines in self._lines.values() for line in lines]:
                    end(line)
            if self._job is not None and self._hosts:
                self._job.join(END_SECONDS)
            if self._context is not None:
                self._context.stop()
        except Exception as failure:  # noqa: BLE001  # told to the driver
            error = self.brief(failure)
        self.say(cancelled=True, error=error)
        os._exit(0)

    # -- the application

    def tell(self, state: str, reason: str = "", **more: Any) -> None:
        said = {"state": state, "reason": reason, **more}
        with self._changed:
            back = state == QUEUED and self._said.get("state", QUEUED) != QUEUED
            if said != self._said and not back and not self._ending:
                self._said = said
                self.say(**said)

    def _run(self, name: str, request: Mapping[str, Any]) -> None:
        self.tell(QUEUED, "Spark starts the application")
        try:
            self._context = self._started(name, request)
            self._stage(name, request["tasks"])
            self.tell(ENDED, "its barrier stage has ended")
        except Exception as error:  # noqa: BLE001  # told to the driver
            self.tell(ENDED, self.brief(error), again=True)
        if not self._ending:
            with contextlib.suppress(Exception):  # it has ended
                self._context.stop()
            os._exit(0)

    def _started(self, name: str, request: Mapping[str, Any]) -> Any:
        """The SparkContext."""
        pyspark: Any = importlib.import_module("pyspark")
        for module in (task, held):
            pyspark.cloudpickle.register_pickle_by_value(module)
        settings = {"spark.master": request["master"], "spark.app.name": name, **request["settings"]}
        return pyspark.SparkContext(conf=pyspark.SparkConf().setAll(list(settings.items())))

    def _stage(self, name: str, tasks: int) -> None:
        """Returns when the tasks have ended."""
        conf = self._context.getConf()
        host = conf.get("spark.driver.host")
        listener = socket.create_server((conf.get("spark.driver.bindAddress", host), 0))
        secret = secrets.token_bytes(32)
        order = {
            "name": name,
            "address": (host, listener.getsockname()[1]),
            "secret": secret,
            "hold": Path(held.__file__).with_name("hold.py").read_text(encoding="utf-8"),
        }
        threading.Thread(target=self._listen, args=(listener, secret, tasks), daemon=True).start()
        threading.Thread(target=self._look, args=(tasks,), daemon=True).start()
        nodes = self._context.parallelize(range(tasks), tasks)
        nodes.barrier().mapPartitions(functools.partial(task.run, order)).collect()

    def _look(self, tasks: int) -> None:
        """Until the tasks run: how many of their executors there are."""
        scala = self._context._jsc.sc()
        with contextlib.suppress(Exception):  # the application has ended
            while self._said.get("state") == QUEUED:
                have = scala.getExecutorMemoryStatus().size() - 1
                lack = f"waiting for {count(tasks, 'executor')}, of which Spark has given {have}"
                self.tell(QUEUED, lack if have < tasks else "Spark starts the tasks")
                time.sleep(LOOK_SECONDS)

    # -- lines to the tasks

    def _listen(self, listener: socket.socket, secret: bytes, tasks: int) -> None:
        while True:
            line, _ = listener.accept()
            threading.Thread(target=self._greet, args=(line, secret, tasks), daemon=True).start()

    def _greet(self, line: socket.socket, secret: bytes, tasks: int) -> None:
        try:
            here = task.receive(line, secret)
        except OSError:
            line.close()
            return
        with self._changed:
            if self._ending:
                end(line)
                return
            self._lines.setdefault(here["index"], []).append(line)
            self._hosts[here["index"]] = here["host"]
            if len(self._hosts) == tasks:
                self.tell(RUNNING, hosts=named([self._hosts[index] for index in range(tasks)]))
            self._changed.notify_all()

    def _carry(self, link: socket.socket, words: int, node: int, command: str) -> None:
        """Between a socket and a shell on a node, until one of them ends."""
        with self.carrying(link, words), self._line(node) as line:
            text = command.encode()
            line.sendall(len(text).to_bytes(4, "big") + text)
            threading.Thread(target=self._send, args=(link, line), daemon=True).start()
            copy(line, link)

    def _line(self, node: int) -> socket.socket:
        """Raises ``TimeoutError``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._lines.get(node), LINE_SECONDS):
                raise TimeoutError("its task in Spark does not answer")
            return self._lines[node].pop()

    def _send(self, link: socket.socket, line: socket.socket) -> None:
        with link, contextlib.suppress(OSError):  # the other direction tells why
            copy(link, line)
            line.shutdown(socket.SHUT_WR)

    def brief(self, error: BaseException) -> str:
        java = getattr(getattr(self._context, "_gateway", None), "proc", None)
        if java is not None and not hasattr(error, "java_exception"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                java.wait(EXIT_SECONDS)
                return "the Java process of the job's Spark application has ended"
        return brief(error)


def copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(ROOM):
            target.sendall(data)


def end(line: socket.socket) -> None:
    """End the task at the other end."""
    with line, contextlib.suppress(OSError):
        line.sendall(END)


def named(hosts: list[str]) -> list[str]:
    """Names of the nodes: two tasks of one host are told apart."""
    return [f"task {index} on {host}" if hosts.count(host) > 1 else host for index, host in enumerate(hosts)]


def brief(error: BaseException) -> str:
    """The line that says why: of a failed stage that of the failed task, in Python the exception's."""
    java = getattr(error, "java_exception", None)
    said = str(error if java is None else java.getMessage() or java)
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith(("\t", " "))]
    if len(lines) > 1 and "Most recent failure reason:" in lines[0]:
        return lines[2] if len(lines) > 2 and "Traceback" in lines[1] else lines[1]
    return (lines or [type(error).__name__])[0]


def main() -> None:
    for name in [name for name in os.environ if name.startswith("PYSPARK_GATEWAY")]:
        del os.environ[name]  # of the notebook's own session
    with socket.socket(fileno=0) as drivers:
        Application().serve_all(drivers)
    os._exit(0)


if __name__ == "__main__":
    main()
