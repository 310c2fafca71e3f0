"""The master and the settings of a job's application: of the options, of the notebook's session, of Spark's files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...protocol.errors import LaunchError

TAKEN = re.compile(
    r"spark\.(executor|executorEnv|kubernetes|yarn|network|rpc|ssl|authenticate|local|pyspark|worker\.resource|resources)"
    r"\.\S+|spark\.authenticate|spark\.driver\.(host|bindAddress)"
)
"""Settings of a session that say how its cluster is reached, and what its executors are."""

NOT_TAKEN = re.compile(r"spark\.executor\.(id|instances|extraJavaOptions)|.*(secret|password|token|access\.?key)", re.I)
"""Settings of one application, and secrets as Spark knows them (``spark.redaction.regex``): a plan is shown."""

VARIABLES = (
    "HADOOP_CONF_DIR",
    "JAVA_HOME",
    "PYSPARK_PYTHON",
    "SPARK_CONF_DIR",
    "SPARK_DIST_CLASSPATH",
    "SPARK_HOME",
    "SPARK_LOCAL_DIRS",
    "SPARK_LOCAL_IP",
    "YARN_CONF_DIR",
)
"""Variables of the notebook that Spark reads."""


@dataclass(frozen=True)
class Settings:
    """``source``: where ``master`` comes from. ``values``: by name, without ``spark.master``."""

    master: str
    source: str
    values: dict[str, str]


def settings(options: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Of ``-O``, else of the session of this process, else of Spark's own files.

    Raises ``LaunchError`` when no master is named, with what was tried.
    """
    own = {name: str(value) for name, value in options.items() if name.startswith("spark.")}
    own_master = own.pop("spark.master", options.get("master", ""))
    session = _of_session()
    taken = {name: value for name, value in session.items() if TAKEN.fullmatch(name) and not NOT_TAKEN.match(name)}
    files = _of_files(environ)
    for master, source, values in (
        (own_master, f"-O master={own_master}", own),
        (session.get("spark.master"), "the notebook's Spark session", taken | own),
        (files.get("spark.master"), "spark-defaults.conf", own),
    ):
        if master:
            return Settings(master, source, values)
    raise LaunchError(
        "no Spark: -O master is not set, this process has no Spark session with a SparkContext, and no "
        "spark-defaults.conf names a spark.master",
        "-O master=spark://HOST:7077 names a cluster",
    )


def _of_session() -> dict[str, str]:
    """The settings of this process's SparkContext; empty without one. Nothing is imported for it."""
    module = sys.modules.get("pyspark")
    context = getattr(getattr(module, "SparkContext", None), "_active_spark_context", None)
    if context is None:
        return {}
    try:
        return dict(context.getConf().getAll())
    except Exception as error:
        raise LaunchError(
            f"the notebook's Spark session does not answer: {type(error).__name__}", "start it again, or -O master=URL"
        ) from error


def _of_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Spark reads them itself for everything but the master."""
    folder = environ.get("SPARK_CONF_DIR") or os.path.join(environ.get("SPARK_HOME", ""), "conf")
    try:
        lines = Path(folder, "spark-defaults.conf").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (re.split(r"\s*=\s*|\s+", line.strip(), maxsplit=1) for line in lines if not line.lstrip().startswith("#"))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
