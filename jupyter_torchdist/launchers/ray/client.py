"""``python -m jupyter_torchdist.launchers.ray.client [ADDRESS]``: a process that imports Ray, so that no other has to.

With ADDRESS (``auto``, ``HOST:PORT``), it prints what the cluster has, or an error, as one object of JSON. Without, it
is the driver's: standard input is a socket of packets (``helper.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...views.wording import count
from .. import held
from ..base import ENDED, QUEUED, RUNNING
from ..helper import ROOM, Helper
from . import actor

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
# jsonschema does without it; its import makes grammars, for two seconds of a processor.

NAMESPACE = "jupyter_torchdist"
LOOK_SECONDS = 0.5
ALIVE_SECONDS = 5.0
"""Seconds between two looks at actors that run, and how long one may take to answer."""


def connected(address: str) -> Any:
    """The module ``ray``, connected. Raises ``ConnectionError`` and others, with Ray's words."""
    ray: Any = importlib.import_module("ray")
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    for module in (actor, held):
        ray.cloudpickle.register_pickle_by_value(module)
    return ray


def inventory(ray: Any) -> dict[str, Any]:
    """``address`` of the cluster, and its ``nodes`` that take work."""
    nodes = []
    for node in ray.nodes():
        resources = node["Resources"]
        if node["Alive"] and resources.get("CPU", 0) >= 1:
            kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
            name, gpus = node["NodeManagerHostname"], int(resources.get("GPU", 0))
            nodes.append({"name": name, "cores": int(resources["CPU"]), "gpus": gpus, "kind": (kinds or ["gpu"])[0]})
    return {"address": ray.get_runtime_context().gcs_address, "nodes": nodes}


class _Client(Helper):
    """The driver's hands in Ray. A group's nodes have the names ``GROUP.0``, ``GROUP.1``, …"""

    def __init__(self) -> None:
        super().__init__()
        self._ray: Any = None
        self._group: Any = None
        self._name = ""
        self._nodes: list[Any] = []
        self._bundles: Sequence[Mapping[str, float]] = ()
        self._hosts: list[str] = []

    # -- what the driver asks for

    def submit(self, address: str, name: str, request: Mapping[str, Any]) -> None:
        with self.reporting():
            self._ray = ray = connected(address)
            self._name, self._bundles = name, request["bundles"]
            self._group = ray.util.placement_group(**request, name=name, lifetime="detached")
            kind = ray.remote(actor.Node)
            hold = Path(held.__file__).with_name("hold.py").read_text(encoding="utf-8")
            for index, bundle in enumerate(self._bundles):
                place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                )
                options = {"name": f"{name}.{index}", "lifetime": "detached", "scheduling_strategy": place}
                resources = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
                self._nodes.append(kind.options(**options, **resources).remote(hold, f"{name}.{index}"))
            self._watch()

    def attach(self, address: str, name: str, job: str) -> None:
        """``name``: empty if it is not known; then the last group of the job."""
        with self.reporting():
            self._ray = ray = connected(address)
            table = ray.util.placement_group_table().values()
            known = [one["name"] for one in table if one["state"] != "REMOVED"]
            of_job = sorted(one for one in known if one.rpartition(".")[0] == job)
            self._name = name or (of_job[-1] if of_job else "")
            if self._name not in known:
                self.say(state=ENDED, reason="Ray does not know the job any more")
                return
            self._group = ray.util.get_placement_group(self._name)
            self._bundles = self._group.bundle_specs
            self._nodes = [self._found(f"{self._name}.{index}") for index in range(len(self._bundles))]
            self._watch()

    def connect(self, ours: int, words: int, node: int, command: str) -> None:
        link = socket.socket(fileno=ours)
        threading.Thread(target=self._carry, args=(link, words, node, command), daemon=True).start()

    def cancel(self) -> None:
        """Ends what runs on the nodes, then the group, and with it the actors."""
        error = ""
        try:
            if self._group is not None:
                ends = [node.end.remote() for node in self._nodes if node is not None]
                if self._said.get("state") != QUEUED:
                    self._ray.wait(ends, num_returns=len(ends), timeout=ALIVE_SECONDS)
                self._ray.util.remove_placement_group(self._group)
                for node in filter(None, self._nodes):
                    self._ray.kill(node)
        except Exception as failure:  # noqa: BLE001  # told to the driver
            error = brief(failure)
        self.say(cancelled=True, error=error)

    # -- state

    def _watch(self) -> None:
        self._hosts = [""] * len(self._nodes)
        self.say(state=QUEUED, reason="")
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        """Tell each change of the state."""
        while self._said.get("state") != ENDED:
            with contextlib.suppress(Exception):  # Ray does not answer: the last state remains
                state = self._state()
                if state != self._said:
                    self._said = state
                    self.say(**state)
            time.sleep(LOOK_SECONDS if self._said.get("state") != RUNNING else ALIVE_SECONDS)

    def _state(self) -> dict[str, Any]:
        word = self._ray.util.placement_group_table(self._group).get("state", "REMOVED")
        if word == "REMOVED":
            return {"state": ENDED, "reason": "its placement group was removed in Ray"}
        if word == "PENDING":
            return {"state": QUEUED, "reason": self._lack()}
        answers = [self._alive(node) for node in self._nodes]
        failures = [answer for answer in answers if isinstance(answer, str)]
        starts = self._said.get("state") != RUNNING
        if failures and (starts or len(failures) == len(answers)):
            return {"state": ENDED, "reason": failures[0], "again": True}
        if starts and None in answers:
            return {"state": QUEUED, "reason": "Ray starts its actors"}
        self._hosts = [
            here["host"] if isinstance(here, dict) else host for here, host in zip(answers, self._hosts, strict=True)
        ]
        return {"state": RUNNING, "reason": "", "hosts": self._hosts}

    def _alive(self, node: Any) -> dict[str, str] | str | None:
        """Where the actor is; a text: why it has died; None: it has not answered."""
        if node is None:
            return "its actor has died"
        try:
            answer: dict[str, str] = self._ray.get(node.here.remote(), timeout=ALIVE_SECONDS)
            return answer
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.ActorUnavailableError:
            return None
        except self._ray.exceptions.RayError as error:
            return brief(error)

    def _lack(self) -> str:
        """Why the group waits."""
        free = self._ray.available_resources()
        wanted = ", ".join(dict.fromkeys(in_words(bundle) for bundle in self._bundles))
        return (
            f"waiting for {count(len(self._bundles), 'node')} with {wanted} each; free in the whole cluster: "
            f"{in_words({'CPU': free.get('CPU', 0), 'GPU': free.get('GPU', 0)})}"
        )

    # -- bytes

    def _carry(self, link: socket.socket, words: int, node: int, command: str) -> None:
        """Between a socket and a shell on a node, until one of them ends."""
        name = os.urandom(8).hex()
        target = self._nodes[node]
        with self.carrying(link, words):
            if target is None:
                raise RuntimeError("its actor has died")
            self._ray.get(target.open.remote(name, command))
            threading.Thread(target=self._send, args=(link, target, name), daemon=True).start()
            while (data := self._ray.get(target.read.remote(name))) is not None:
                try:
                    link.sendall(data)
                except OSError:  # the driver closed it
                    target.close.remote(name)
                    return
            os.write(words, self._ray.get(target.close.remote(name)))

    def _send(self, link: socket.socket, target: Any, name: str) -> None:
        with link, contextlib.suppress(Exception):  # the other direction tells why
            while data := link.recv(ROOM):
                self._ray.get(target.write.remote(name, data))
            self._ray.get(target.close.remote(name))

    def _found(self, name: str) -> Any:
        """The actor; None if it has died."""
        with contextlib.suppress(ValueError):
            return self._ray.get_actor(name, NAMESPACE)
        return None

    def brief(self, error: BaseException) -> str:
        return brief(error)


def in_words(resources: Mapping[str, float]) -> str:
    return " and ".join(
        f"{count:g} {name}" for name, count in resources.items() if not name.startswith("accelerator_type")
    )


def brief(error: BaseException) -> str:
    """The line that says why: the first one, or the last one of an actor's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "ray::" in lines[0] else lines[0]


def main(words: Sequence[str]) -> None:
    if words:
        try:
            answer = inventory(connected(words[0]))
        except Exception as error:  # noqa: BLE001  # told to the caller
            answer = {"error": brief(error)}
        print(json.dumps(answer))
    else:
        with socket.socket(fileno=0) as driver:
            _Client().serve(driver)
    sys.stdout.flush()
    os._exit(0)  # Ray's own end waits for its threads


if __name__ == "__main__":
    main(sys.argv[1:])
