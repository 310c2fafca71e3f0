"""The user's request: the options of ``%%distribute`` and ``torchdist run``, and the job's specification."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .columns import Layout, beside
from .events import steps
from .hosts import LOCAL as LOCAL
from .hosts import SSH as SSH
from .hosts import parse_hosts, parse_setting
from .strategy import ALONE, NAMES, PRECISIONS
from .typed import Record
from .values import count, node_range, number, seconds, stall


@dataclass(frozen=True)
class Options(Record):
    """One field for each option, with its default."""

    gpus: int | None = None
    gpu_type: str | None = None
    remote: bool = False
    ranks: int | None = None
    nodes: int | None = None
    least_nodes: int | None = None
    """MIN of ``--nodes MIN:MAX``: with how many hosts the job goes on when others are lost. None: all are needed."""
    launcher: str = LOCAL
    hosts: tuple[str, ...] = ()
    host_option: tuple[str, ...] = ()
    """Settings of hosts (``protocol/hosts.py``), first from a file, then from the option line."""
    backend: str | None = None
    numa_binding: str | None = None
    strategy: str | None = None
    option: tuple[str, ...] = ()
    """``key=value`` texts, first from a file, then from the option line; the last text of a key counts."""
    config: str | None = None
    precision: str = "fp32"
    compile: bool = False
    activation_checkpointing: bool = False
    grad_accumulation: int = 1
    verify: int = 0
    checkpoint: str | None = None
    resume: bool = False
    remarks: tuple[str, ...] = ()
    """Remarks on settings of a configuration file."""
    ignored: tuple[str, ...] = ()
    """Files of options that are not used, each with the reason."""
    out: tuple[str, ...] = ("auto",)
    collect: str = "rank0"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    sync: tuple[str, ...] = ()
    env_sync: bool = False
    background: bool = False
    name: str | None = None
    restarts: int = 0
    timeout: float | None = None
    grace: float = 5.0
    stall: float = 30.0
    """Seconds without progress after which a job may be called stalled; 0: never."""
    stall_kill: bool = False
    lease: float = 12 * 3600.0
    env: tuple[str, ...] = ()
    fresh: bool = False
    replace: bool = False
    wait: bool = False
    plan: bool = False
    profile: int = 0
    track: tuple[str, ...] = ()
    watch: str = "full"
    role: str = "default"
    """ROLE_NAME of the ranks. This and the next three are torchrun's options in the shell (``verbs/torchrun.py``)."""
    run_id: str = ""
    """TORCHELASTIC_RUN_ID; empty: the job's id."""
    port: int = 0
    """MASTER_PORT; 0: a free port."""
    virtual_local_rank: bool = False
    """Whether each rank sees its own GPU only, with LOCAL_RANK 0."""

    def to_json(self) -> dict[str, Any]:
        """Without the values of ``--env NAME=VALUE``, because values of the environment are never stored."""
        return {**super().to_json(), "env": [item.split("=", 1)[0] for item in self.env]}


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"names separated by commas; {name!r} is not one")
    if not names:
        raise ValueError("at least one name")
    return names


def _variable(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(=.*)?", text, re.DOTALL):
        raise ValueError("NAME or NAME=VALUE")
    return text


def _one_of(*choices: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in choices:
            near = sorted(difflib.get_close_matches(text, choices), key=lambda one: one[0] != text[0])
            raise ValueError(f"one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else ""))
        return text

    return convert


def _strategy(text: str) -> str:
    name = _one_of(*NAMES)
    parts = [name(part.strip()) for part in text.split("+")]
    for part in parts:
        if parts.count(part) > 1:
            raise ValueError(f"each strategy once; {part} stands there {parts.count(part)} times")
        if part in ALONE and len(parts) > 1:
            raise ValueError(f"{part} alone, or a product of others such as fsdp+tp")
    return "+".join(parts)


def _setting(text: str) -> str:
    name, given, value = text.partition("=")
    if not given or not re.fullmatch(r"[A-Za-z_][\w.-]*", name.strip()) or not value.strip():
        raise ValueError("key=value")
    return f"{name.strip()}={value.strip()}"


def _path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("a path")
    return text


def _launcher(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", text):
        raise ValueError("the name of a launcher")
    return text


def _gpu_type(text: str) -> str:
    if not re.search(r"[A-Za-z0-9]", text):
        raise ValueError("the name of a GPU, such as A10")
    return text


def _title(text: str) -> str:
    if not text.strip() or len(text) > 100 or not text.isprintable():
        raise ValueError("1 to 100 printable characters")
    return text


@dataclass(frozen=True)
class Option:
    """One row of the table that ``%%distribute --help`` prints and Tab completes."""

    flag: str
    group: str
    metavar: str
    help: str
    convert: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    repeatable: bool = False
    short: str = ""
    """Another way to write the flag, such as ``-O``."""
    adds: bool = False
    """Whether given values are added to the defaults instead of replacing them."""

    @property
    def written(self) -> str:
        """The flag as the help shows it."""
        return f"{self.short}, {self.flag}" if self.short else self.flag

    @property
    def field(self) -> str:
        return self.flag[2:].replace("-", "_")


def _choice(flag: str, group: str, choices: tuple[str, ...], text: str) -> Option:
    return Option(flag, group, "|".join(choices), text, _one_of(*choices), choices)


OPTIONS: tuple[Option, ...] = (
    Option("--gpus", "where", "N", "GPU ranks in all, one a GPU (default: every free GPU)", count),
    Option("--gpu-type", "where", "NAME", "only GPUs of this name, such as A10 or h100_80gb", _gpu_type),
    Option("--ranks", "where", "N", "CPU ranks, on Gloo", count),
    Option("--hosts", "where", "A,B:4", "hosts that ssh reaches, each with all its GPUs or N of them", parse_hosts),
    Option(
        "--nodes",
        "where",
        "N|MIN:MAX",
        "nodes of an engine such as --launcher slurm (default: 1); MIN:MAX goes on with MIN of MAX --hosts",
        node_range,
    ),
    Option("--remote", "where", "", "on as few as will do of --hosts, else of the hosts in torchdist.toml"),
    Option(
        "--host-option",
        "where",
        "HOST.KEY=VALUE",
        "python, scratch or setup of a host, or of all without HOST.",
        parse_setting,
        repeatable=True,
        adds=True,
    ),
    Option("--launcher", "where", "NAME", "what starts the ranks: an installed launcher (default: local)", _launcher),
    _choice("--backend", "where", ("nccl", "gloo"), "process group backend (default: nccl on GPUs, else gloo)"),
    Option("--replace", "where", "", "cancel an earlier job of yours that holds the GPUs"),
    Option("--wait", "where", "", "if the GPUs are taken, wait for them: first come, first served"),
    _choice("--numa-binding", "how", ("node", "socket", "exclusive", "core-complex"), "pin ranks near their GPUs"),
    Option(
        "--strategy",
        "how",
        "NAME[+NAME]",
        f"spread the training of this cell over the ranks: {', '.join(NAMES)}, or a product as fsdp+tp",
        _strategy,
        NAMES,
    ),
    Option(
        "--option",
        "how",
        "KEY=VALUE",
        "an option of the strategy; `--strategy NAME --help` lists them",
        _setting,
        repeatable=True,
        short="-O",
        adds=True,
    ),
    Option("--config", "how", "FILE", "options from a TOML, an accelerate YAML, or a DeepSpeed JSON", _path),
    _choice("--precision", "how", PRECISIONS, "what the strategy computes in (default: fp32)"),
    Option("--compile", "how", "", "torch.compile each repeated block of the model, or its forward if there is none"),
    Option("--activation-checkpointing", "how", "", "compute activations again in backward() instead of keeping them"),
    Option("--grad-accumulation", "how", "N", "take each batch in N parts, for memory; one step (default: 1)", count),
    Option("--verify", "how", "K", "compare the first K optimizer steps with one device (rank 0 runs both)", count),
    Option("--out", "data", "a,b|auto|none", "names that come back (default: auto, what was bound or changed)", _names),
    _choice("--collect", "data", ("rank0", "all"), "bring the values of rank 0, or a list by rank"),
    Option("--include", "data", "NAME", "names to take along that no code of the cell names", _names, repeatable=True),
    Option("--exclude", "data", "NAME", "names to leave behind in the notebook", _names, repeatable=True),
    Option("--sync", "data", "DIR", "copy a directory to every host before the ranks start", _path, repeatable=True),
    Option("--env-sync", "data", "", "install the notebook's packages on hosts, where they differ"),
    Option("--background", "life", "", "return at once with the job", short="--detach"),
    Option("--name", "life", "TEXT", "a name for the job", _title),
    Option("--restarts", "life", "N", "start all ranks again after a failure, at most N times (default: 0)", number),
    Option("--timeout", "life", "TIME", "end the job after 90, 30s, 10m, 2h, 1d", seconds),
    Option("--grace", "life", "TIME", "how long ranks may take to end after an interrupt (default: 5s)", seconds),
    Option(
        "--stall",
        "life",
        "TIME|off",
        "no progress for so long, and twice as long as ever before, is a stall, which is said (default: 30s)",
        stall,
    ),
    Option("--stall-kill", "life", "", "end a job that stalls"),
    Option("--lease", "life", "TIME", "how long ranks on hosts go on without this machine (default: 12h)", seconds),
    Option("--env", "life", "NAME[=VALUE]", "a variable of the environment for the ranks", _variable, repeatable=True),
    Option("--fresh", "life", "", "start new interpreters, for code that cannot bear a fork"),
    Option("--checkpoint", "life", "DIR", "save model, optimizer, position and RNG there while it trains", _path),
    Option("--resume", "life", "", "begin at the last checkpoint in --checkpoint DIR, if there is one"),
    Option("--plan", "look", "", "print what would run, and run nothing"),
    Option("--profile", "look", "STEPS", "profile so many steps after the first two: a table and a timeline", steps),
    Option("--track", "look", "NAME", "trackers that record the job", _names, ("mlflow", "tensorboard", "wandb"), True),
    _choice("--watch", "look", ("full", "compact", "text", "off"), "how the job is shown (default: full)"),
)

BY_FLAG = {flag: option for option in OPTIONS for flag in (option.flag, option.short) if flag}
"""Each option under all its flags."""


def options_help(layout: Layout = beside) -> str:
    """The table of options, grouped."""
    lines = ["%%distribute [options]   run this cell on every rank", ""]
    for group in dict.fromkeys(option.group for option in OPTIONS):
        rows = [(f"{row.written} {row.metavar}".strip(), row.help) for row in OPTIONS if row.group == group]
        lines += [f"{group}:", *layout(rows)]
    return "\n".join(lines)


PROGRAMS = ("script", "module", "command")
"""Kinds of jobs that are complete programs: they end as under Python, and no values come back."""

STDIN = "TORCHDIST_STDIN"
"""The variable with the path of the standard input of the shell's ``torchdist run``, for ranks of its machine."""


@dataclass(frozen=True)
class JobSpec(Record):
    """The specification of one job. ``source`` is the cell without the magic's line."""

    job: str
    kind: str
    """``cell`` (the source runs in ``__main__``), ``function``, ``script`` (text), ``module`` (name) or ``command``."""
    source: str
    label: str
    """The file name in tracebacks, such as ``Cell In[12]`` or a script's path."""
    first_line: int
    """Line of ``source``'s first line as the user sees it: 2 under a magic."""
    options: Options
    created: float
    """Seconds since the epoch."""
    argv: tuple[str, ...] = ()
    """``sys.argv`` of a program: the script as it was typed, ``-m``, or a command; then its arguments."""
    notebook: str = ""
    """The path of the notebook or of the kernel's session, for the panel and ``%dist``."""
    rerun_of: str = ""
    """The job that this job runs again; empty if this is no rerun."""
    git: dict[str, str] = field(default_factory=dict)
    """With ``--track``: commit, branch and changes of the directory's repository; empty without one."""

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "options": self.options.to_json()}
