"""The options of launchers, ``-O key=value``: one row for each. They are written beside the options of strategies."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..columns import Layout, beside
from ..errors import OptionError
from ..spec import Options


@dataclass(frozen=True)
class LauncherOption:
    """One row of the table. ``convert`` raises ``ValueError`` that says what was expected."""

    name: str
    launcher: str
    metavar: str
    help: str
    convert: Callable[[str], Any]

    @property
    def begin(self) -> str:
        """What is written before the value. A name that ends in a dot is the beginning of many."""
        return self.name if self.name.endswith(".") else f"{self.name}="


def _word(text: str) -> str:
    if not re.fullmatch(r"[^\s\"'\\$`;]+", text):
        raise ValueError("a name without spaces and quotes")
    return text


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text) or int(text) < 1:
        raise ValueError("a whole number, at least 1")
    return int(text)


def _memory(text: str) -> str:
    if not re.fullmatch(r"\d+[KMGT]?", text):
        raise ValueError("a size such as 64G")
    return text


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("1 or 0")
    return text == "1"


def _time(text: str) -> int:
    """Slurm's forms, or a number with s, m, h or d. Returns seconds; a number alone is minutes."""
    if match := re.fullmatch(r"(\d+)([smhd])", text):
        seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    elif match := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text):
        days, *rest = (int(part) if part else None for part in match.groups())
        first, second, third = rest
        if days is not None or third is not None:  # days-hours, or hours:minutes:seconds
            seconds = (days or 0) * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
        else:
            seconds = (first or 0) * 60 + (second or 0)
    else:
        raise ValueError("a time such as 90 (minutes), 30m, 2h, 1:30:00 or 2-12:00:00")
    if seconds < 60:
        raise ValueError("at least a minute")
    return seconds


def _allocation(text: str) -> str:
    if text != "new" and not text.isdecimal():
        raise ValueError("new, or the number of a job of Slurm")
    return text


def _cluster(text: str) -> str:
    if not re.fullmatch(r"\S+:\d{1,5}|auto", text):
        raise ValueError("the host and port of Ray's head, such as 10.0.0.1:6379, or auto")
    return text


def _master(text: str) -> str:
    if not re.fullmatch(r"local(\[.+\])?|local-cluster\[\d+,\d+,\d+\]|spark://\S+:\d{1,5}|yarn|k8s://\S+", text):
        raise ValueError("a cluster that runs executors, such as spark://HOST:7077, yarn or k8s://https://HOST:6443")
    return text


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text):
        raise ValueError("lower-case letters, digits and hyphens")
    return text


def _quantity(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?([KMGT]i|[kMGT])?", text):
        raise ValueError("a size such as 64Gi")
    return text


SLURM = "slurm"
RAY = "ray"
SPARK = "spark"
KUBERNETES = "kubernetes"

LAUNCHER_OPTIONS: tuple[LauncherOption, ...] = (
    LauncherOption("partition", SLURM, "NAME", "the partition", _word),
    LauncherOption("time", SLURM, "TIME", "the time limit: minutes, 2h, or as Slurm writes it", _time),
    LauncherOption("account", SLURM, "NAME", "the account that pays", _word),
    LauncherOption("qos", SLURM, "NAME", "the quality of service", _word),
    LauncherOption("cpus", SLURM, "N", "cores of a node (default: its GPUs' share; one for each CPU rank)", _count),
    LauncherOption("mem", SLURM, "SIZE", "memory of a node, such as 64G", _memory),
    LauncherOption("exclusive", SLURM, "1|0", "whole nodes", _flag),
    LauncherOption("constraint", SLURM, "FEATURES", "features that the nodes must have", _word),
    LauncherOption("nodelist", SLURM, "NODE,…", "nodes that must be among them", _word),
    LauncherOption("exclude", SLURM, "NODE,…", "nodes that must not", _word),
    LauncherOption("reservation", SLURM, "NAME", "the reservation", _word),
    LauncherOption(
        "allocation",
        SLURM,
        "ID|new",
        "run inside this job of Slurm, or in a new one (default: $SLURM_JOB_ID if it is set, else new)",
        _allocation,
    ),
    LauncherOption("login", SLURM, "HOST", "give Slurm's commands on this host, over SSH (default: here)", _word),
    LauncherOption(
        "address",
        RAY,
        "HOST:PORT",
        "the cluster (default: $RAY_ADDRESS, else that of this machine)",
        _cluster,
    ),
    LauncherOption("cpus", RAY, "N", "CPUs of a node (default: its GPUs' share; one for each CPU rank)", _count),
    LauncherOption(
        "master",
        SPARK,
        "URL",
        "the cluster, such as spark://HOST:7077, yarn or k8s://… (default: that of the notebook's session)",
        _master,
    ),
    LauncherOption("cpus", SPARK, "N", "cores of a node (default: spark.executor.cores, else one a rank)", _count),
    LauncherOption("spark.", SPARK, "KEY=VALUE", "a setting of Spark, such as spark.executor.memory=4g", str),
    LauncherOption("image", KUBERNETES, "NAME", "the image of the pods: Python 3.10 or newer, with torch", _word),
    LauncherOption("namespace", KUBERNETES, "NAME", "the namespace (default: the context's)", _namespace),
    LauncherOption("context", KUBERNETES, "NAME", "the context of your kubeconfig (default: the current one)", _word),
    LauncherOption("cpus", KUBERNETES, "N", "CPUs of a pod (default: its GPUs' share; one for each CPU rank)", _count),
    LauncherOption("mem", KUBERNETES, "SIZE", "memory of a pod, such as 64Gi", _quantity),
    LauncherOption("gpu", KUBERNETES, "NAME", "the resource that is a GPU (default: nvidia.com/gpu)", _word),
    LauncherOption(
        "template",
        KUBERNETES,
        "FILE",
        "a pod template in YAML, over which the rest is laid: volumes, tolerations, secrets, labels",
        str,
    ),
)


def options_of(launcher: str) -> dict[str, LauncherOption]:
    """The rows of one launcher, by name."""
    return {row.name: row for row in LAUNCHER_OPTIONS if row.launcher == launcher}


def _key(text: str) -> str:
    """The name of its row."""
    name = text.partition("=")[0]
    return "spark." if name.startswith("spark.") else name.replace("-", "_")


def launcher_values(options: Options) -> dict[str, Any]:
    """The options of the launcher, converted; the last text of a key counts. Raises ``OptionError``."""
    rows = options_of(options.launcher)
    values = {}
    for text in options.option:
        if row := rows.get(_key(text)):
            name, _, value = text.partition("=")
            try:
                values[name if row.name.endswith(".") else row.name] = row.convert(value)
            except ValueError as error:
                raise OptionError(
                    f"-O {row.name}={value}: expected {error}", f"write -O {row.name}={row.metavar}"
                ) from None
    return values


def without_launcher(options: Options, known: set[str]) -> tuple[str, ...]:
    """The texts of ``-O`` that are for the strategy, whose options are ``known``.

    Raises ``OptionError`` for an option of another launcher, and for one that is almost an option of this launcher.
    """
    rows = options_of(options.launcher)
    left = tuple(text for text in options.option if _key(text) not in rows)
    for name in map(_key, left):
        other = next((row for row in LAUNCHER_OPTIONS if row.name == name), None)
        if other is not None:
            raise OptionError(
                f"-O {name} is an option of --launcher {other.launcher}, not of {options.launcher}",
                f"add --launcher {other.launcher}, or leave -O {name} out",
            )
        near = difflib.get_close_matches(name, list(rows), 1, 0.75)
        if rows and name not in known and (near or not options.strategy):
            hint = f"did you mean -O {near[0]}=…?" if near else f"it has {', '.join(rows)}"
            raise OptionError(f"--launcher {options.launcher} has no option {name!r}", hint)
    return left


def launcher_help(launcher: str, layout: Layout = beside) -> str:
    """The options of one launcher."""
    rows = [(f"-O {row.begin}{row.metavar}", row.help) for row in options_of(launcher).values()]
    return "\n".join([f"--launcher {launcher} [-O KEY=VALUE …]", "", *(layout(rows) if rows else ["takes no options"])])


def launcher_of(words: Sequence[str]) -> str:
    """The launcher in the words of an option line; empty if there is none."""
    for before, word in zip(("", *words), (*words, ""), strict=True):
        if text := word.partition("=")[2] if word.startswith("--launcher=") else word if before == "--launcher" else "":
            return text
    return ""


def of_a_launcher(text: str) -> bool:
    """Whether ``key=value`` is an option of some launcher."""
    return any(row.name == _key(text) for row in LAUNCHER_OPTIONS)
