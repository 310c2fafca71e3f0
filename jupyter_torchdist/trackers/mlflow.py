"""Runs at an MLflow tracking server, or in MLflow's local files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ..protocol.errors import OptionError
from .base import FAILED, FINISHED, KILLED, Opened, Point, Refused, Run, needs

_NAME = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that MLflow does not allow in the name of a metric or parameter."""

_LONGEST_NAME, _LONGEST_VALUE, _PARAMETERS = 250, 5000, 100
"""MLflow's limits: characters of names and of values, parameters in one request."""

_CLIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""``delivery`` tries again itself, and says so. The user's own settings have priority."""

_STATES = {FINISHED: "FINISHED", FAILED: "FAILED", KILLED: "KILLED"}
_NEVER = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


class MlflowTracker:
    """MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_EXPERIMENT_ID and MLflow's other variables have effect."""

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def check(self, environ: Mapping[str, str]) -> None:
        needs("mlflow", "mlflow")
        if not environ.get("MLFLOW_TRACKING_URI") and not os.path.isdir("mlruns") and _lacks_its_database():
            raise OptionError(
                "--track mlflow: MLFLOW_TRACKING_URI names no server, and MLflow's own database needs the package "
                "sqlalchemy, which is not installed",
                "set MLFLOW_TRACKING_URI=http://HOST:PORT, or run in a terminal: pip install mlflow",
            )

    def open(self, run: Run, place: str) -> Opened:
        for name, value in _CLIENT.items():
            os.environ.setdefault(name, value)
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI") or place or mlflow.get_tracking_uri()
        self._client = client = mlflow.MlflowClient(uri)
        experiment = self._experiment()
        # The server may have begun the run although its answer never came: it is looked for by the job's tag.
        found = client.search_runs([experiment], f"tags.`torchdist.job` = '{run.job}'", max_results=1)
        fresh = not found or not place
        if not found:
            tags = {**run.tags, "mlflow.source.name": run.source, "mlflow.user": run.tags.get("user", "")}
            tags |= {"mlflow.source.git.commit": run.commit} if run.commit else {}
            found = [client.create_run(experiment, round(run.started * 1000), _values(tags), run.name)]
        else:
            client.update_run(found[0].info.run_id, status="RUNNING")
        self._id = found[0].info.run_id
        params = [mlflow.entities.Param(name, value) for name, value in _values(run.params).items()]
        for first in range(0, len(params), _PARAMETERS):
            client.log_batch(self._id, params=params[first : first + _PARAMETERS])
        shown = _without_password(uri)
        page = f"{shown.rstrip('/')}/#/experiments/{experiment}/runs/{self._id}"
        return Opened(page if shown.startswith("http") else shown, shown, fresh)

    def _experiment(self) -> str:
        """The id of the experiment that the environment names, else of ``Default``."""
        if chosen := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return chosen
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        metrics = [Metric(_name(one.name), one.value, round(one.t * 1000), one.step) for one in points]
        try:
            self._client.log_batch(self._id, metrics=metrics)
        except MlflowException as error:
            if error.error_code in _NEVER:
                raise Refused(str(error)) from error
            raise

    def tag(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self._id, tags=[RunTag(name, value) for name, value in _values(tags).items()])

    def file(self, path: Path, name: str) -> None:
        """Under the last part of ``name``: MLflow keeps the name of the file that it is given."""
        with tempfile.TemporaryDirectory(prefix="torchdist-") as directory:
            link = Path(directory) / Path(name).name
            link.symlink_to(path)
            self._client.log_artifact(self._id, str(link), str(Path(name).parent))

    def close(self, state: str, ended: float) -> None:
        self._client.set_terminated(self._id, _STATES[state], round(ended * 1000))


def _lacks_its_database() -> bool:
    """Since MLflow 3.7 runs are in SQLite where no address is given, and mlflow-skinny comes without SQLAlchemy."""
    release = tuple(map(int, importlib.metadata.version("mlflow-skinny").split(".")[:2]))
    return release >= (3, 7) and importlib.util.find_spec("sqlalchemy") is None


def _values(given: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts within MLflow's limits."""
    return {_name(name): str(value)[:_LONGEST_VALUE] for name, value in given.items()}


def _name(text: str) -> str:
    """``text`` as MLflow takes it: it is a path, without an empty part, ``.`` or ``..``."""
    parts = [part for part in _NAME.sub("_", text).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_LONGEST_NAME] or "_"


def _without_password(uri: str) -> str:
    """An address without ``user:password@``, which may not be stored. What is no address is left as it is."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if parts.netloc else uri
