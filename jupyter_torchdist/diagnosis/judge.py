"""From signs, exceptions and exits to findings, the cause first.

A *soft* sign (an INFO line of NCCL, a warning of c10d) stands in healthy logs, too. It counts where its layer failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..protocol.events import Evidence, Finding
from . import watchdog
from .catalogue import BY_CODE, LISTED, Kind, Order
from .elastic import End, Report
from .prefixes import Line
from .tracebacks import Traceback

SHOWN = 4
"""Lines of evidence of one finding."""

STEPS = 3
"""Lines of progress after which a job counts as one that has trained."""

_SOFT = re.compile(
    r"\[W\d|\[W |\[I\d|\[I |(?:\b|_)WARNING\b|UserWarning|FutureWarning| DEBUG |retrying \(\d|will retry"
)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?|(?<=\[[EWIF])\d{4} \d\d:\d\d:\d\d(?:\.\d+)?")
_VIRTUAL = re.compile(
    r"\d\](?P<interface>docker\d*|br-\w+|veth\w+|virbr\d*|lo|tun\d*|tap\d*|cni\d*|flannel[.\w]*|CloudflareWARP|utun\d*):"
    r"(?P<address>[\w.:]+)<"
)
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[0\])?(?P<interface>[\w.@-]+):(?P<address>[\w.:%]+)<")
_NO_ROUTE = ("docker", "br-", "veth", "virbr", "tun", "tap", "cni", "flannel", "CloudflareWARP", "utun")
_LINK_LOCAL = ("169.254.", "fe80", "127.", "172.17.")
_INIT = re.compile(r"\brank (?P<rank>\d+) nranks (?P<all>\d+)")
_DIRECT = re.compile(r"NCCL INFO Channel \S+ : .* via P2P/")
_TRAINED = re.compile(r"\b(?:loss|step|iter|iteration|epoch)s?\b\W{0,3}\d|\bit/s\b|\bs/it\b", re.IGNORECASE)

_NETWORK = (Order.NCCL, Order.UNCLEAR, Order.CONSEQUENCE, Order.COLLECTIVE)
_OF_LAUNCHER = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "SignalException", "SystemExit")
_CONSEQUENCES = (
    "ConnectionResetError", "BrokenPipeError", "EOFError", "KeyboardInterrupt", "RayActorError", "ActorDiedError",
    "CalledProcessError", "RayTaskError", "WorkerCrashedError", "ActorUnavailableError", "SIGTERMException",
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One kind seen once or more. ``soft`` when no line of it is an error by itself."""

    kind: Kind
    rank: int | None
    node: str | None
    words: dict[str, str]
    lines: tuple[Line, ...]
    soft: bool = False
    root: bool = False
    order: Order = field(default=Order.UNDETERMINED)

    @property
    def time(self) -> str:
        found = _TIME.search(self.lines[0].raw) if self.lines else None
        return found[0] if found else ""

    @property
    def key(self) -> tuple[object, ...]:
        first = self.lines[0] if self.lines else None
        listed = 0 if self.order is Order.OWN else LISTED[self.kind]
        return (self.order, listed, not self.root, self.time, first.number if first else 0)


@dataclass(frozen=True)
class Sign:
    """A line of the kind, and what of it matched."""

    kind: Kind
    line: Line
    match: re.Match[str]


class Case:
    """All that the logs of one job say. ``facts`` are lines that tell who is who, and that steps were done.

    ``recorded`` is what the dumps of the flight recorder tell.
    """

    def __init__(
        self,
        signs: Sequence[Sign],
        facts: Sequence[Line],
        tracebacks: Sequence[Traceback],
        report: Report,
        recorded: watchdog.Verdict | None = None,
    ) -> None:
        self.signs = signs
        self.recorded = recorded
        self.facts = facts
        self.report = report
        self.tracebacks = tracebacks
        self._ranks = _ranks_of_pids(facts)
        self._only = _only_one(tracebacks, report)
        steps = sorted((line.file, line.number) for line in facts if _TRAINED.search(line.text))
        self._trained = steps[STEPS - 1] if len(steps) >= STEPS else None

    def findings(self) -> list[Finding]:
        candidates = [*self._signs(), *self._exceptions(), *self._exits(), *self._time_outs()]
        candidates = self._wrong_interface(candidates)
        candidates = [self._after_a_while(one) for one in candidates]
        hard = {one.order for one in candidates if not one.soft}
        failed = bool(hard - {Order.PERFORMANCE})
        counted = [one for one in candidates if not one.soft or _backed(one.order, hard)]
        causes = [one for one in counted if one.order is not Order.PERFORMANCE]
        if failed:
            chosen = self._chosen(causes)
        elif self._has_failed():
            chosen = [Candidate(BY_CODE["undetermined"], *self._culprit(), {}, self._last_words())]
        else:
            chosen = []
        warned = [one for one in candidates if one.order is Order.PERFORMANCE or (not failed and one.soft)]
        found = [self._finding(one) for one in chosen]
        return found + [replace(self._finding(one), severity="warning") for one in _distinct(warned)]

    def _chosen(self, causes: Iterable[Candidate]) -> list[Candidate]:
        """The cause; then other errors that are no consequence of it."""
        ordered = _distinct(sorted(causes, key=lambda one: one.key))
        first, rest = ordered[0], ordered[1:]
        if first.order not in (Order.OWN, Order.NCCL):
            return [first]
        return [first, *(one for one in rest if one.order is first.order and not one.soft)]

    def _signs(self) -> Iterator[Candidate]:
        for sign in self.signs:
            line, words = sign.line, {name: value for name, value in sign.match.groupdict().items() if value}
            if watchdog.is_time_out(line):
                continue  # compared over ranks
            culprit = words.pop("culprit", None)
            rank = int(culprit.split(",")[0]) if culprit else self._rank(line)
            soft = line.level == "INFO" or (not line.level and bool(_SOFT.search(line.raw)))
            root = self.report.root is not None and rank is not None and self.report.root.rank == rank
            kind = sign.kind
            if kind.code == "world-incomplete" and int(words.get("here", 0)) > int(words.get("all", 0)):
                kind = BY_CODE["bootstrap-mismatch"]
                words["reason"] = f"{words['here']} of {words['all']} ranks have checked in"
            if "sent" in words:  # Gloo's
                receiver = "a rank" if rank is None else f"rank {rank}"
                words["reason"] = f"{receiver} was sent {words['sent']} bytes and expected {words['expected']}"
            aborted = kind.code == "rank-exited" and "Aborted" in line.text  # a library said why before
            order = Order.UNCLEAR if aborted else kind.order
            yield Candidate(kind, rank, line.node, words, (line,), soft, root, order)

    def _exceptions(self) -> Iterator[Candidate]:
        """The program's own exceptions: those that no sign explains."""
        lines = {(sign.line.file, sign.line.number) for sign in self.signs}
        kind = BY_CODE["user-exception"]
        for one in self.tracebacks:
            ours = one.name in (*_OF_LAUNCHER, *_CONSEQUENCES) or one.name.startswith(("Dist", "Rendezvous"))
            if ours or one.ignored or str(one) == "Exception" or (one.end.file, one.end.number) in lines:
                continue
            error = f"{one}" + (f" ({one.user})" if one.user else "")
            rank, node = one.rank if one.rank is not None else self._rank(one.end), one.end.node
            root = self.report.root
            if rank is None and root is not None and root.code == 1:
                rank, node = root.rank, root.node
            is_root = root is not None and root.rank == rank
            yield Candidate(kind, rank, node, {"error": error}, (one.end,), False, is_root, kind.order)

    def _exits(self) -> Iterator[Candidate]:
        root = self.report.root
        if root is None or root.code in (0, 1, -15, 143):
            return
        code, order = _of_exit(root)
        yield Candidate(
            BY_CODE[code], root.rank, root.node, {"error": root.words}, (root.line,), root=True, order=order
        )

    def _time_outs(self) -> Iterator[Candidate]:
        lines = [sign.line for sign in self.signs if watchdog.is_time_out(sign.line)]
        verdict = self.recorded or watchdog.judge(lines, self.tracebacks, self.report)
        if verdict is None:
            return
        code, shown = verdict.code, verdict.lines
        direct = [line for line in self.facts if _DIRECT.search(line.text)]
        if direct and "first" in verdict.words and code in ("watchdog-same-op", "collective-hangs"):
            code, shown = "p2p-acs-hang", (direct[0], *shown)
        yield Candidate(BY_CODE[code], verdict.rank, None, verdict.words, shown, order=Order.COLLECTIVE)

    def _wrong_interface(self, candidates: list[Candidate]) -> list[Candidate]:
        """A failed connection to an address of a virtual interface names the interface as the cause."""
        virtual = {}
        for line in self.facts:
            for found in (*_BOOTSTRAP.finditer(line.text), *_VIRTUAL.finditer(line.text)):
                if found["interface"].startswith(_NO_ROUTE) or found["address"].startswith(_LINK_LOCAL):
                    virtual[found["address"]] = (found["interface"], line)
        changed = []
        for one in candidates:
            address = one.words.get("address", "").partition("<")[0].strip("[]")
            known = virtual.get(address) or (next(iter(virtual.values())) if virtual and not address else None)
            if one.kind.code in ("peer-unreachable", "connect-refused", "gloo-unreachable") and (
                known or address.startswith(_LINK_LOCAL)
            ):
                interface, line = known or ("a virtual interface", one.lines[0])
                words = {**one.words, "interface": interface, "address": address or "an address"}
                kind = BY_CODE["wrong-interface"]
                changed.append(replace(one, kind=kind, words=words, lines=(line, *one.lines), order=kind.order))
            else:
                changed.append(one)
        return changed

    def _after_a_while(self, one: Candidate) -> Candidate:
        """An adapter without an answer after many steps is a link that fails, not one that never worked."""
        if one.kind.code != "ib-roce-unreachable":
            return one
        first = one.lines[0]
        trained = self._trained is not None and self._trained < (first.file, first.number)
        return replace(one, kind=BY_CODE["ib-link-error"]) if trained else one

    def _has_failed(self) -> bool:
        return any(end.code not in (0, -15, 143) for end in self.report.ends) or self.report.present

    def _culprit(self) -> tuple[int | None, str | None]:
        root = self.report.root
        return (root.rank, root.node) if root else (None, None)

    def _last_words(self) -> tuple[Line, ...]:
        return (self.report.root.line,) if self.report.root else tuple(end.line for end in self.report.ends[:1])

    def _rank(self, line: Line) -> int | None:
        """Who printed it; where the line does not tell, the only rank that failed."""
        known = line.rank if line.rank is not None else self._ranks.get((line.node, line.pid))
        return self._only if known is None else known

    def _finding(self, one: Candidate) -> Finding:
        who = "a rank" if one.rank is None else f"rank {one.rank}"
        who += f" on {one.node}" if one.node and one.node != "localhost" else ""
        evidence = tuple(Evidence(line.file, line.number, line.raw.strip()) for line in one.lines[:SHOWN])
        return Finding(
            one.kind.code,
            one.kind.severity,
            one.rank,
            one.node,
            one.kind.said({"who": who, **one.words}),
            one.kind.cause,
            one.kind.remedy,
            evidence,
        )


def _ranks_of_pids(lines: Iterable[Line]) -> dict[tuple[str | None, str | None], int]:
    """NCCL says once which rank a process is; only the first group's ranks are the job's."""
    ranks: dict[tuple[str | None, str | None], int] = {}
    for line in lines:
        if line.pid and (found := _INIT.search(line.text)):
            ranks.setdefault((line.node, line.pid), int(found["rank"]))
    return ranks


def _only_one(tracebacks: Iterable[Traceback], report: Report) -> int | None:
    """The rank that failed, where launchers and exceptions name no other."""
    ends = {end.rank for end in report.ends if end.code not in (0, -15, 143)}
    ranks = ends or {one.rank for one in tracebacks if one.rank is not None}
    return ranks.pop() if len(ranks) == 1 else None


def _backed(order: Order, hard: set[Order]) -> bool:
    return bool(hard.intersection(_NETWORK) if order in _NETWORK else order in hard)


def _of_exit(end: End) -> tuple[str, Order]:
    if end.code in (-9, 137):
        return "host-oom-kill", Order.EXIT
    if end.code in (-7, 135):
        return "shm-too-small", Order.EXIT
    if end.code in (-11, 139):
        return "segfault", Order.EXIT
    return "rank-exited", Order.UNCLEAR if end.code in (-6, 134) else Order.EXIT


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """One of each kind, the first, with the lines of the others as evidence, and a rank where one of them tells it."""
    kept: dict[str, Candidate] = {}
    for one in candidates:
        known = kept.get(one.kind.code)
        if known is None:
            kept[one.kind.code] = one
        elif len(known.lines) < SHOWN or known.rank is None:
            words = {**one.words, **known.words}
            rank = one.rank if known.rank is None else known.rank
            lines = (*known.lines[: SHOWN - 1], *one.lines)
            kept[one.kind.code] = replace(known, rank=rank, lines=lines, words=words)
    return list(kept.values())
