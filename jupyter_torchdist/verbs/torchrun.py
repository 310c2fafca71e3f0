"""torchrun's options in ``torchdist run``: what each means. What needs several machines is handed to torchrun itself.

``TORCHRUN`` has every option of ``torchrun --help``; a test compares it with torch's own parser. As in torchrun, an
option is written with dashes or underscores. Options that exist in both (``--numa-binding``) mean the same.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..protocol.errors import OptionError
from ..protocol.machine.inventory import local_inventory
from ..protocol.spec import BY_FLAG, Options
from .torchrun_logs import Output, parse_std
from .waiting import ENDING

HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
SHORT = {"-r": "--redirects", "-t": "--tee"}
ENVIRONMENT = "PET_"
"""torchrun takes an option that is not given from the variable with this prefix and the option's name."""


WRITTEN = ("--gpus", "--ranks", "--fresh", "--grace", "--restarts", "--numa-binding")
"""Options of ours that stand for options of torchrun."""


@dataclass
class Meant:
    """The meaning of torchrun's options."""

    words: list[str] = field(default_factory=list)
    """Our options with the same meaning."""
    role: str = "default"
    run_id: str = ""
    port: int = 0
    output: Output = field(default_factory=Output)
    standalone: bool = False
    command: bool = False
    """Whether the program is any command (``--no-python``)."""
    virtual_local_rank: bool = False
    signals: tuple[signal.Signals, ...] = ENDING
    """Signals that end the job."""
    events: bool = False
    """Whether the events of the job are printed at its end."""
    elsewhere: str = ""
    """The option that names another address; ``--standalone`` overrides it."""
    handed: str = ""
    """Why torchrun itself runs this command line; empty if it runs as a job."""

    def on(self, options: Options) -> Options:
        """``options`` with the settings for which we have no option. ``--standalone`` overrides rendezvous options."""
        options = replace(options, role=self.role, virtual_local_rank=self.virtual_local_rank)
        if self.standalone:
            return options
        _check_free(self.port)
        return replace(options, run_id=self.run_id, port=self.port)


@dataclass(frozen=True)
class Foreign:
    """One option of torchrun. ``act`` raises ``ValueError(what is expected or why it is refused, what to do)``."""

    help: str
    act: Callable[[Meant, str], None]
    metavar: str = ""
    """Empty if the option takes no value."""


def _nothing(_meant: Meant, _text: str) -> None:
    """For an option that is always in effect here."""


def _or_torchrun(flag: str, *here: str) -> Callable[[Meant, str], None]:
    """The values ``here`` mean this machine alone; with others torchrun itself runs the command line."""

    def act(meant: Meant, text: str) -> None:
        if text not in here:
            meant.handed = meant.handed or f"{flag} {text}"

    return act


def _std(name: str) -> Callable[[Meant, str], None]:
    def act(meant: Meant, text: str) -> None:
        setattr(meant.output, name, parse_std(text))

    return act


def _set(name: str) -> Callable[[Meant, str], None]:
    def act(meant: Meant, text: str) -> None:
        setattr(meant.output, name, text)

    return act


def _lines_with(stream: str) -> Callable[[Meant, str], None]:
    def act(meant: Meant, text: str) -> None:
        meant.output.filters[stream] = tuple(filter(None, text.split(",")))

    return act


def _yes(name: str) -> Callable[[Meant, str], None]:
    def act(meant: Meant, _text: str) -> None:
        setattr(meant, name, True)

    return act


def _restarts(meant: Meant, text: str) -> None:
    if not text.isdecimal():
        raise ValueError("expected a whole number, 0 or more", "write --max-restarts 3")
    meant.words += ["--restarts", text]


def _conf(_meant: Meant, text: str) -> None:
    """Ranks of one machine meet at once, so that no setting of a meeting acts."""
    if not all(re.fullmatch(r"\s*[^=,\s]+\s*=[^,]*", pair) for pair in text.split(",") if pair.strip()):
        raise ValueError("expected KEY=VALUE, separated by commas", "write --rdzv-conf timeout=900")


def _events(meant: Meant, text: str) -> None:
    meant.events = text == "console"
    if text not in ("null", "console"):
        meant.handed = meant.handed or f"--event-log-handler {text}"


def _nproc(meant: Meant, text: str) -> None:
    gpus = len(local_inventory(os.environ).gpus)
    if text == "gpu" and not gpus:
        raise ValueError("this machine has no GPU", "write --ranks N for CPU ranks")
    if text == "xpu":
        meant.handed = meant.handed or "--nproc-per-node xpu"
        return
    if text not in ("auto", "cpu", "gpu") and not re.fullmatch(r"0*[1-9]\d*", text):
        raise ValueError("expected a number, auto, cpu or gpu", "write --nproc-per-node 2")
    flag = "--gpus" if gpus and text != "cpu" else "--ranks"
    count = text if text.isdecimal() else str(gpus if flag == "--gpus" else os.cpu_count() or 1)
    meant.words += [flag, count]


def _is_here(text: str) -> bool:
    known = ("localhost", "127.0.0.1", "::1", "0:0:0:0:0:0:0:1", socket.gethostname().lower())
    return text.strip("[]").lower() in known


def _address(flag: str) -> Callable[[Meant, str], None]:
    def act(meant: Meant, text: str) -> None:
        if not _is_here(text):
            meant.elsewhere = meant.elsewhere or f"{flag} {text}"

    return act


def _endpoint(meant: Meant, text: str) -> None:
    host, colon, port = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "")
    if host and not _is_here(host):
        meant.elsewhere = meant.elsewhere or f"--rdzv-endpoint {text}"
    if colon:
        _port(meant, port)


def _port(meant: Meant, text: str) -> None:
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError("expected a port, 0 to 65535", "leave the port out: then a free port is chosen")
    meant.port = int(text)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise OptionError(
                f"port {port} cannot be used: {error.strerror}", "leave the port out: then a free port is chosen"
            ) from error


def _run_id(meant: Meant, text: str) -> None:
    meant.run_id = text


def _role(meant: Meant, text: str) -> None:
    meant.role = text


def _interval(_meant: Meant, text: str) -> None:
    try:
        float(text)
    except ValueError:
        raise ValueError("expected seconds", "leave it out: the end of a rank is seen at once") from None


def _start_method(meant: Meant, text: str) -> None:
    if text not in ("spawn", "fork", "forkserver"):
        raise ValueError("expected spawn, fork or forkserver", "leave it out: ranks are forked from a warm process")
    meant.words += ["--fresh"] if text == "spawn" else []


def _filter(meant: Meant, text: str) -> None:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError("expected ranks separated by commas", "write --local-ranks-filter 0,1")
    meant.output.only = frozenset(map(int, text.split(",")))


def _signals(meant: Meant, text: str) -> None:
    try:
        found = tuple(signal.Signals[name.strip()] for name in text.split(","))
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is no signal", f"write {','.join(HANDLED)}, or leave it out") from None
    if unusable := [one.name for one in found if one in (signal.SIGKILL, signal.SIGSTOP)]:
        raise ValueError(f"no program can handle {unusable[0]}", f"write {','.join(HANDLED)}, or leave it out")
    meant.signals = tuple(one for one in found if one != signal.SIGINT)


def _grace(meant: Meant, text: str) -> None:
    meant.words += ["--grace", text]


def _binding(meant: Meant, text: str) -> None:
    meant.words += ["--numa-binding", text]


TORCHRUN: dict[str, Foreign] = {
    "--nnodes": Foreign("1; several are handed to torchrun, see --hosts", _or_torchrun("--nnodes", "1", "1:1"), "N"),
    "--nproc-per-node": Foreign("GPU ranks where there are GPUs, else CPU ranks", _nproc, "N|auto|cpu|gpu"),
    "--rdzv-backend": Foreign("any; ranks of one machine always meet at a store of their job", _nothing, "NAME"),
    "--rdzv-endpoint": Foreign("this machine and MASTER_PORT (0: one that is free)", _endpoint, "HOST:PORT"),
    "--rdzv-id": Foreign("TORCHELASTIC_RUN_ID of the ranks", _run_id, "ID"),
    "--rdzv-conf": Foreign("any; ranks of one machine meet at once", _conf, "KEY=VALUE"),
    "--standalone": Foreign("always so; rendezvous options are then ignored, as torchrun does", _yes("standalone")),
    "--max-restarts": Foreign("is --restarts", _restarts, "N"),
    "--monitor-interval": Foreign("any number; the end of a rank is seen at once", _interval, "SECONDS"),
    "--start-method": Foreign("spawn is --fresh; fork and forkserver fork a warm process", _start_method, "NAME"),
    "--event-log-handler": Foreign("null; console prints the job's events at its end", _events, "NAME"),
    "--role": Foreign("ROLE_NAME of the ranks", _role, "NAME"),
    "--no-python": Foreign("the program is any command", _yes("command")),
    "--run-path": Foreign("always so: a script runs in the interpreter of its rank", _nothing),
    "--log-dir": Foreign("copies of output, in torchrun's layout, with --redirects or --tee", _set("log_dir"), "DIR"),
    "--redirects": Foreign("streams that go to --log-dir instead of the shell", _std("redirects"), "0|1|2|3|0:1,1:3"),
    "--tee": Foreign("streams that go to --log-dir and the shell", _std("tee"), "0|1|2|3|0:1,1:3"),
    "--local-ranks-filter": Foreign("ranks whose output is printed", _filter, "0,1"),
    "--duplicate-stdout-filters": Foreign("lines that go to filtered_stdout.log, too", _lines_with("out"), "TEXT,TEXT"),
    "--duplicate-stderr-filters": Foreign("lines that go to filtered_stderr.log, too", _lines_with("err"), "TEXT,TEXT"),
    "--log-line-prefix-template": Foreign(
        "instead of [rank N]; has ${rank}, ${role_name}", _set("template"), "TEMPLATE"
    ),
    "--print-completion": Foreign("is handed to torchrun", _or_torchrun("--print-completion"), "SHELL"),
    "--node-rank": Foreign("0; others are handed to torchrun", _or_torchrun("--node-rank", "0"), "N"),
    "--master-addr": Foreign("this machine", _address("--master-addr"), "HOST"),
    "--master-port": Foreign("MASTER_PORT of the ranks (0: one that is free)", _port, "PORT"),
    "--local-addr": Foreign("this machine", _address("--local-addr"), "HOST"),
    "--logs-specs": Foreign("default; others are handed to torchrun", _or_torchrun("--logs-specs", "default"), "NAME"),
    "--numa-binding": Foreign("the option above", _binding, "KIND"),
    "--signals-to-handle": Foreign("signals that end the job", _signals, "NAMES"),
    "--shutdown-timeout": Foreign("is --grace", _grace, "SECONDS"),
    "--virtual-local-rank": Foreign("LOCAL_RANK is 0, and a rank sees its own GPU", _yes("virtual_local_rank")),
}
"""Each option of torchrun except ``-m``, ``--help`` and the program."""


def canonical(flag: str) -> str:
    """``--nproc_per_node`` as ``--nproc-per-node``, ``-t`` as ``--tee``; other words unchanged."""
    dashed = SHORT.get(flag, flag.replace("_", "-"))
    return dashed if dashed in TORCHRUN else flag


def takes_value(flag: str) -> bool:
    """Whether the word after ``flag`` (torchrun's or ours) is its value."""
    if foreign := TORCHRUN.get(canonical(flag)):
        return bool(foreign.metavar)
    return flag in BY_FLAG and BY_FLAG[flag].convert is not None


def parted(word: str) -> tuple[str, str, str]:
    """``--tee=3`` and ``-t3`` as flag, separator, value."""
    if word[:2] in SHORT and not word.startswith("--") and len(word) > 2:
        return word[:2], "=", word[2:].removeprefix("=")
    return word.partition("=")


def from_environment(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """``words`` after those that torchrun would take from variables such as ``PET_NPROC_PER_NODE``."""
    given = {canonical(parted(word)[0]) for word in words}
    found = []
    for flag, foreign in TORCHRUN.items():
        value = environ.get(ENVIRONMENT + flag[2:].replace("-", "_").upper(), "")
        if value and flag not in given and (foreign.metavar or value != "0"):
            found.append(f"{flag}={value}" if foreign.metavar else flag)
    return [*found, *words]


def translate(words: Sequence[str]) -> Meant:
    """Translate torchrun's options in ``words`` into ours. Raises ``OptionError`` that names a refused option."""
    meant, left = Meant(), list(words)
    while left:
        word = left.pop(0)
        flag, given, value = parted(word)
        foreign = TORCHRUN.get(canonical(flag))
        if foreign is None:
            meant.words.append(word)
            if takes_value(flag) and not given and left:
                meant.words.append(left.pop(0))
            continue
        if foreign.metavar and not given:
            if not left:
                raise OptionError(f"{flag} needs a value", f"write {flag} {foreign.metavar}")
            value = left.pop(0)
        if given and not foreign.metavar:
            raise OptionError(f"{flag} takes no value", f"write {flag} alone")
        try:
            foreign.act(meant, value)
        except ValueError as error:
            why, what = error.args
            raise OptionError(f"{flag} {value}".rstrip() + f": {why}", what) from None
    if not meant.standalone:
        meant.handed = meant.handed or meant.elsewhere
    return meant


def torchrun_help() -> list[tuple[str, str]]:
    """Rows for ``torchdist run --help``: the options that are accepted."""
    return [(f"{flag} {one.metavar}".rstrip(), one.help) for flag, one in TORCHRUN.items()]
