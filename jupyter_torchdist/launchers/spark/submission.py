"""One attempt of a job in Spark: an application of its own, and the process that holds it."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...protocol.errors import LaunchError
from ...protocol.paths import make_private, runtime_dir
from ...protocol.plan import NodePlan, Plan
from ...protocol.wire.channel import Channel
from ..helped import HelpedSubmission, start

APPLICATION = "jupyter_torchdist.launchers.spark.application"


class SparkSubmission(HelpedSubmission):
    """``path``: of the process's socket."""

    engine = "Spark"
    ends = "the process that holds the job's Spark application has ended, and the application with it"
    look = "look for the application in the pages of Spark's master"

    def __init__(self, plan: Plan, path: Path, **more: Any) -> None:
        """Raises ``LaunchError`` when the process has ended."""
        self._path = path
        driver = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            driver.connect(str(path))
        except OSError:
            driver.close()
            path.unlink(missing_ok=True)
            raise LaunchError(f"{self.ends} ({path})", "run the cell again") from None
        super().__init__(plan, driver, **more)

    @classmethod
    def submit(cls, plan: Plan, attempt: int) -> SparkSubmission:
        request = json.loads(plan.request)
        name = f"{application_name(plan)}.{attempt}"
        path = make_private(runtime_dir()) / name
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as drivers:
            drivers.bind(str(path))
            drivers.listen()
            process = start(APPLICATION, drivers, request["environ"])
        made = cls(plan, path, process=process)
        made.ask(do="submit", name=name, request=request)
        return made

    @classmethod
    def attach(cls, plan: Plan, token: Mapping[str, Any]) -> SparkSubmission:
        found = sorted(runtime_dir().glob(f"{application_name(plan)}.*"))
        if not token and not found:
            raise LaunchError(f"no Spark application of job {plan.job} runs on this machine", "run the cell again")
        return cls(plan, Path(token["socket"]) if token else found[-1])

    @property
    def token(self) -> dict[str, Any]:
        return {"socket": str(self._path)}

    def connect(self, node: NodePlan) -> Channel:
        """Two nodes may be one machine, so a chosen scratch directory has one below for each."""
        reach = node.reach
        if reach.scratch:
            reach = replace(reach, scratch=f"{reach.scratch}/{node.name}")
        return super().connect(replace(node, reach=reach))

    def cancel(self) -> None:
        try:
            super().cancel()
        finally:
            self._path.unlink(missing_ok=True)


def application_name(plan: Plan) -> str:
    """Of the applications of a job, without the attempt."""
    return f"torchdist-{plan.job}"
