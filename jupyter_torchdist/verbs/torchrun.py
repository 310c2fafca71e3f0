"""torchrun's options in ``torchdist run``: what each means on one machine, or why it is refused.

``TORCHRUN`` has every option of ``torchrun --help``; a test compares it with torch's own parser. As in torchrun, an
option is written with dashes or underscores. Options that exist in both (``--numa-binding``) mean the same.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..protocol.errors import OptionError
from ..protocol.inventory import local_inventory
from ..protocol.spec import BY_FLAG, Options

HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
SHORT = {"-r": "--redirects", "-t": "--tee"}
OUTPUT = "each rank's output is kept whole: `torchdist logs JOB --rank N`"


@dataclass
class Meant:
    """The meaning of torchrun's options."""

    words: list[str] = field(default_factory=list)
    """Our options with the same meaning."""
    role: str = "default"
    run_id: str = ""
    port: int = 0
    only: frozenset[int] | None = None
    """Ranks whose output is printed; None for all."""
    standalone: bool = False

    def on(self, options: Options) -> Options:
        """``options`` with the settings for which we have no option. ``--standalone`` overrides rendezvous options."""
        if self.standalone:
            return replace(options, role=self.role)
        _check_free(self.port)
        return replace(options, role=self.role, run_id=self.run_id, port=self.port)


@dataclass(frozen=True)
class Foreign:
    """One option of torchrun. ``act`` raises ``ValueError(what is expected or why it is refused, what to do)``."""

    help: str
    act: Callable[[Meant, str], None]
    metavar: str = ""
    """Empty if the option takes no value."""


def _nothing(_meant: Meant, _text: str) -> None:
    """For an option that is always in effect here."""


def _refuse(why: str, what: str) -> Callable[[Meant, str], None]:
    def act(_meant: Meant, _text: str) -> None:
        raise ValueError(why, what)

    return act


def _only(accepted: Sequence[str], why: str, what: str) -> Callable[[Meant, str], None]:
    def act(_meant: Meant, text: str) -> None:
        if text not in accepted:
            raise ValueError(why, what)

    return act


def _nproc(meant: Meant, text: str) -> None:
    gpus = len(local_inventory(os.environ).gpus)
    if text == "gpu" and not gpus:
        raise ValueError("this machine has no GPU", "write --ranks N for CPU ranks")
    if text == "xpu":
        raise ValueError("ranks run on NVIDIA GPUs or CPUs", "write --gpus N or --ranks N")
    if text not in ("auto", "cpu", "gpu") and not re.fullmatch(r"0*[1-9]\d*", text):
        raise ValueError("expected a number, auto, cpu or gpu", "write --nproc-per-node 2")
    flag = "--gpus" if gpus and text != "cpu" else "--ranks"
    count = text if text.isdecimal() else str(gpus if flag == "--gpus" else os.cpu_count() or 1)
    meant.words += [flag, count]


def _this_machine(text: str) -> None:
    known = ("localhost", "127.0.0.1", "::1", "0:0:0:0:0:0:0:1", socket.gethostname().lower())
    if text.strip("[]").lower() not in known:
        raise ValueError(f"{text} is not an address of this machine", "write localhost: torchdist runs on one machine")


def _address(_meant: Meant, text: str) -> None:
    _this_machine(text)


def _endpoint(meant: Meant, text: str) -> None:
    host, colon, port = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "")
    if host:
        _this_machine(host)
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


def _standalone(meant: Meant, _text: str) -> None:
    meant.standalone = True


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
    meant.only = frozenset(map(int, text.split(",")))


def _signals(_meant: Meant, text: str) -> None:
    names = [name.strip() for name in text.split(",")]
    if set(names) != set(HANDLED):
        raise ValueError("torchdist handles exactly these four signals", f"write {','.join(HANDLED)}, or leave it out")


def _grace(meant: Meant, text: str) -> None:
    meant.words += ["--grace", text]


def _binding(meant: Meant, text: str) -> None:
    meant.words += ["--numa-binding", text]


_ONE = "torchdist runs on one machine", "write {} or leave it out"

TORCHRUN: dict[str, Foreign] = {
    "--nnodes": Foreign("1", _only(("1", "1:1"), _ONE[0], _ONE[1].format("--nnodes 1")), "N"),
    "--nproc-per-node": Foreign("GPU ranks where there are GPUs, else CPU ranks", _nproc, "N|auto|cpu|gpu"),
    "--rdzv-backend": Foreign(
        "c10d or static; ranks of one machine always meet at a store of their job",
        _only(("", "c10d", "static"), "ranks of one machine need no server to meet", "write c10d or leave it out"),
        "NAME",
    ),
    "--rdzv-endpoint": Foreign("this machine and MASTER_PORT (0: one that is free)", _endpoint, "HOST:PORT"),
    "--rdzv-id": Foreign("TORCHELASTIC_RUN_ID of the ranks", _run_id, "ID"),
    "--rdzv-conf": Foreign("", _only(("",), "ranks of one machine meet at once", "leave it out"), "KEY=VALUE"),
    "--standalone": Foreign("always so; rendezvous options are then ignored, as torchrun does", _standalone),
    "--max-restarts": Foreign(
        "0", _only(("0",), "ranks are not started again", "leave it out, and see --checkpoint DIR --resume"), "N"
    ),
    "--monitor-interval": Foreign("any number; the end of a rank is seen at once", _interval, "SECONDS"),
    "--start-method": Foreign("spawn is --fresh; fork and forkserver fork a warm process", _start_method, "NAME"),
    "--event-log-handler": Foreign(
        "null", _only(("null",), "events are in the journal of the job", "leave it out: `torchdist show JOB`"), "NAME"
    ),
    "--role": Foreign("ROLE_NAME of the ranks", _role, "NAME"),
    "--no-python": Foreign(
        "", _refuse("ranks run Python scripts and modules", "call the program from a script, with subprocess")
    ),
    "--run-path": Foreign("always so: a script runs in the interpreter of its rank", _nothing),
    "--log-dir": Foreign("", _refuse("the files of output have a fixed place", OUTPUT), "DIR"),
    "--redirects": Foreign("0", _only(("0",), "output is not redirected", OUTPUT), "N"),
    "--tee": Foreign("0", _only(("0",), "output always goes to the shell and to files of the job", OUTPUT), "N"),
    "--local-ranks-filter": Foreign("ranks whose output is printed", _filter, "0,1"),
    "--duplicate-stdout-filters": Foreign(
        "", _refuse("lines are not written twice", "`torchdist logs JOB --stream out --grep RE` finds them"), "TEXT"
    ),
    "--duplicate-stderr-filters": Foreign(
        "", _refuse("lines are not written twice", "`torchdist logs JOB --stream err --grep RE` finds them"), "TEXT"
    ),
    "--log-line-prefix-template": Foreign(
        "", _refuse("each line of output begins with its rank", "leave it out"), "TEMPLATE"
    ),
    "--print-completion": Foreign(
        "", _refuse("torchdist run has no completion script", "see `torchdist run --help`"), "SHELL"
    ),
    "--node-rank": Foreign("0", _only(("0",), _ONE[0], _ONE[1].format("--node-rank 0")), "N"),
    "--master-addr": Foreign("this machine", _address, "HOST"),
    "--master-port": Foreign("MASTER_PORT of the ranks (0: one that is free)", _port, "PORT"),
    "--local-addr": Foreign("this machine", _address, "HOST"),
    "--logs-specs": Foreign("default", _only(("default",), "the files of output have a fixed place", OUTPUT), "NAME"),
    "--numa-binding": Foreign("the option above", _binding, "KIND"),
    "--signals-to-handle": Foreign(",".join(HANDLED), _signals, "NAMES"),
    "--shutdown-timeout": Foreign("is --grace", _grace, "SECONDS"),
    "--virtual-local-rank": Foreign(
        "", _refuse("every rank sees the GPUs of all ranks", "leave it out, and use the GPU with the number LOCAL_RANK")
    ),
}
"""Each option of torchrun except ``-m``, ``--help`` and the program; an empty help means that it is refused."""


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
    return meant


def torchrun_help() -> list[tuple[str, str]]:
    """Rows for ``torchdist run --help``: the accepted options, and the names of the refused ones."""
    taken = [(f"{flag} {one.metavar}".rstrip(), one.help) for flag, one in TORCHRUN.items() if one.help]
    refused = ", ".join(flag for flag, one in TORCHRUN.items() if not one.help)
    return [*taken, ("refused", f"{refused}: each prints what to do instead")]
