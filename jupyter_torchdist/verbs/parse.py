"""The words after ``%dist`` and ``torchdist``."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..protocol.errors import OptionError
from ..protocol.events import steps
from ..protocol.hosts import bytes_of
from ..protocol.spec import BY_FLAG

VERBS = {
    "run": "run a script, a module, a command: run [options] FILE -- args",
    "jobs": "what runs and what ran",
    "show": "everything about one job",
    "logs": "what its ranks printed",
    "attach": "follow a job to its end",
    "stacks": "where the ranks of a running job are now: their Python stacks",
    "profile": "on what the ranks of a running job spend a step, and a timeline for Perfetto",
    "diagnose": "why a job failed: from logs and recorder dumps of any job, or of one of ours",
    "cancel": "stop a job: KeyboardInterrupt in every rank, after --grace a kill",
    "rerun": "run a job again as it was captured",
    "export": "write a job as plain files: train.py, its data, the lines for torchrun and sbatch",
    "track": "deliver a job to its trackers: what is left, or to others",
    "rm": "remove jobs, or what is old",
    "nodes": "this machine, or hosts: cores, memory, GPUs, Python",
    "doctor": "check this machine, or hosts, and say what to do",
    "plan": "what the options would run, and run nothing",
    "stop": "end the warm processes; on hosts, remove all that is ours",
}
OF_HOSTS = ("nodes", "doctor", "stop", "attach")
JSON = "--json"
OF_A_JOB = ("show", "logs", "diagnose", "attach", "stacks", "profile", "cancel", "rerun", "export", "track", "rm")


class HelpShown(Exception):
    """The user gave ``--help``; the help text is the argument."""


class Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message[:1].lower() + message[1:], self.format_usage().strip())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown(self.format_help())

    def print_help(self, file: object = None) -> None:
        """Print nothing: ``exit`` follows and raises the text."""


def parse(words: str | Sequence[str], program: str) -> argparse.Namespace:
    """The verb and its arguments; without words the verb is ``jobs``. Raises ``OptionError`` with a similar verb."""
    words = _split(words) if isinstance(words, str) else list(words)
    if not words:
        words = ["jobs"]
    verb = words[0]
    if verb not in VERBS and verb not in ("-h", "--help"):
        near = difflib.get_close_matches(verb, list(VERBS), 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(VERBS)}"
        raise OptionError(f"{program} has no verb {verb!r}", hint)
    if verb == "plan" and not {"-h", "--help"} & set(words):
        options = [word for word in words[1:] if word != JSON]  # argparse would parse them as its own options
        return argparse.Namespace(verb=verb, options=options, json=JSON in words)
    if verb == "run":
        return argparse.Namespace(verb=verb, words=words[1:], json=False)  # for ``command_line``
    return parser(program).parse_args(words)


def parser(program: str) -> Parser:
    """The grammar of all verbs."""
    top = Parser(prog=program, allow_abbrev=False)
    verbs = top.add_subparsers(dest="verb", metavar="VERB")
    made = {}
    for verb, text in VERBS.items():
        made[verb] = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
    for verb in ("show", "logs", "attach", "stacks", "profile", "cancel", "rerun", "export", "track"):
        made[verb].add_argument("job", metavar="JOB", help="id of the job, the beginning of the id, or the name")
    made["track"].add_argument(
        "trackers", metavar="TRACKER", nargs="*", default=[], help="such as mlflow (default: the job's own)"
    )
    made["export"].add_argument("directory", metavar="DIR", help="a new directory")
    made["diagnose"].add_argument(
        "logs",
        metavar="FILE",
        nargs="+",
        help="logs and recorder dumps of all ranks (gzip, too; - reads logs), their directory; or one JOB",
    )
    for one in made.values():
        one.add_argument(JSON, action="store_true", help="for programs: an object of JSON a line")
    made["stacks"].add_argument("--full", action="store_true", help="the whole stack of each thread of each rank")
    made["profile"].add_argument("--steps", type=_steps, metavar="N", help="how many steps (default: 5)")
    made["profile"].add_argument("--within", type=_time, metavar="TIME", help="how long they may take (default: 60s)")
    made["profile"].add_argument("--out", type=Path, metavar="FILE", help="write the timeline there, too")
    made["logs"].add_argument("--rank", type=_rank, metavar="N", help="show one rank only")
    made["logs"].add_argument("--stream", choices=("out", "err"), help="show stdout or stderr only")
    made["logs"].add_argument("--grep", type=_pattern, metavar="RE", help="show only lines that match it")
    made["logs"].add_argument("--tail", type=_rank, metavar="N", help="the last lines of each rank")
    made["rerun"].add_argument(
        "--env", type=_variable, metavar="NAME[=VALUE]", action="append", default=[], help="as of %%%%distribute"
    )
    made["cancel"].add_argument("--kill", action="store_true", help="kill the ranks at once")
    made["rm"].add_argument("jobs", metavar="JOB", nargs="*", help="jobs that have ended")
    made["rm"].add_argument("--older", type=_time, metavar="TIME", help="jobs that ended longer ago than 12h, 7d")
    made["rm"].add_argument(
        "--keep-bytes", type=_bytes, metavar="SIZE", help="remove the oldest until 500M, 10G are left"
    )
    for verb in OF_HOSTS:
        instead = "of a job that another machine started" if verb == "attach" else "instead of this machine"
        made[verb].add_argument("--hosts", metavar="A,B", help=f"hosts that ssh reaches, {instead}")
        made[verb].add_argument(
            "--host-option", metavar="HOST.KEY=VALUE", action="append", default=[], help="as of %%%%distribute"
        )
    made["plan"].add_argument("options", nargs="*", help="options of a run")
    return top


def flags(verb: str) -> list[str]:
    """The options of one verb."""
    own = {
        "stacks": ["--full"],
        "profile": ["--steps", "--within", "--out"],
        "logs": ["--rank", "--stream", "--grep", "--tail"],
        "cancel": ["--kill"],
        "rerun": ["--env"],
        "rm": ["--older", "--keep-bytes"],
        **{verb: ["--hosts", "--host-option"] for verb in OF_HOSTS},
    }
    return [*own.get(verb, []), JSON]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise OptionError(f"the line cannot be read: {error}", "close the quotation mark") from error


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


def _steps(text: str) -> int:
    try:
        return steps(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {error}") from None


def _variable(text: str) -> str:
    convert = BY_FLAG["--env"].convert
    assert convert is not None
    try:
        return str(convert(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {error}") from None


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _time(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h|d|w)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time such as 30s, 10m, 12h or 7d")
    return float(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]]


def _bytes(text: str) -> int:
    try:
        return bytes_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 500M or 10G") from None
