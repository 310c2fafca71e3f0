"""States, plans and receipts as text: the one wording that the kernel, the shell and a plain terminal share. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

from .protocol.bundle import Captured, Manifest
from .protocol.errors import TorchDistError
from .protocol.events import ErrorRecord
from .protocol.gauges import Gauges
from .protocol.memory import MemoryPlan
from .protocol.plan import Inventory, Plan
from .protocol.spec import JobSpec
from .protocol.state import RANK_ENDS, JobState, RankState, Waiting
from .protocol.strategy import DIMENSIONS, StrategyPlan


class Row(Protocol):
    """One line of the jobs table: a ``JobState``, or the catalog's summary of one. Times in seconds since the epoch."""

    @property
    def job(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def label(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def submitted(self) -> float: ...
    @property
    def ended(self) -> float: ...


_WORDS = {"timed_out": "timed out"}

MARKS = {"succeeded": "✓", "failed": "✗", "cancelled": "■", "timed_out": "✗", "lost": "✗"}
"""One character for each final state; a job that is under way has none of them."""


def size(count: int) -> str:
    """Bytes for people: ``512 B``, ``1.5 kB``, ``256 MB`` (powers of ten, three digits)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Seconds for people: ``0.05 s``, ``12.3 s``, ``4 min 05 s``, ``3 h 07 min``, ``2 d 04 h``."""
    seconds = max(seconds, 0.0)
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    for upper, unit, lower, below in ((3600, 60, 1, "min s"), (86400, 3600, 60, "h min"), (0, 86400, 3600, "d h")):
        if whole < upper or not upper:
            first, second = below.split()
            return f"{whole // unit} {first} {whole % unit // lower:02d} {second}"
    raise AssertionError(seconds)


def ago(then: float, now: float) -> str:
    """How long ago ``then`` was, both in seconds since the epoch; a clock that was set back reads ``just now``."""
    passed = now - then
    if passed < 5:
        return "just now"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if passed >= length:
            return f"{int(passed // length)} {unit} ago"
    raise AssertionError(passed)


def count(number: int, noun: str) -> str:
    """``1 rank``, ``8 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns, two blanks apart; the last one is not padded."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def state_word(state: Row) -> str:
    """``running``, ``timed out``…"""
    return _WORDS.get(state.state, state.state)


def title(state: JobState) -> str:
    """How a job is called: its name, else its cell; and its id."""
    called = state.name or state.label
    return f"{called} ({state.job})" if called else state.job


def hosts(state: JobState) -> list[str]:
    """Names of the hosts the ranks run on, in order of rank."""
    return list(dict.fromkeys(rank.host for _, rank in sorted(state.ranks.items()) if rank.host))


def where(state: JobState) -> str:
    """``2 ranks on box``, ``64 ranks on 8 hosts``."""
    ranks = count(state.world_size or len(state.ranks), "rank")
    names = hosts(state)
    if not names:
        return ranks
    return f"{ranks} on {names[0]}" if len(names) == 1 else f"{ranks} on {len(names)} hosts"


def elapsed(state: Row, now: float) -> float:
    """Seconds from submission to the end, or to ``now``."""
    return max((state.ended or now) - state.submitted, 0.0) if state.submitted else 0.0


def headline(state: JobState, now: float) -> str:
    """One line: state, ranks, time, and what went wrong."""
    parts = [state_word(state), where(state), duration(elapsed(state, now))]
    if state.reason and state.state != "succeeded":
        parts.append(state.reason)
    mark = MARKS.get(state.state)
    return (f"{mark} " if mark else "") + " · ".join(parts)


def rank_line(state: JobState, rank: RankState) -> str:
    """How one rank stands, in a few words."""
    if rank.error:
        return f"failed: {first_line(rank.error.title)}"
    if waiting := waits(state, rank):
        return f"waiting in {_for_whom(state, waiting)}"
    return rank.why or _rank_word(state, rank)


def _rank_word(state: JobState, rank: RankState) -> str:
    """A rank that was interrupted says by what, where the job's end says it: ``cancelled``, ``timed out``."""
    end = state.reason if state.state == "stopping" else state.state
    word = end if rank.state == "interrupted" and end in ("cancelled", "timed_out") else rank.state
    return _WORDS.get(word, word)


def waits(state: JobState, rank: RankState) -> Waiting | None:
    """What a rank waits in now. One that has ended may have done so until then."""
    return rank.waiting if rank.state == "running" and not state.final else None


def collective(waiting: Waiting) -> str:
    """``all_reduce #17``."""
    return f"{waiting.operation} #{waiting.number}"


def waiting_lines(state: JobState, now: float) -> list[str]:
    """``ranks 0-2 wait in all_reduce #17 for rank 3, for 12.3 s``: one sentence for each collective."""
    groups: dict[tuple[str, int, str], dict[int, Waiting]] = {}
    for number, rank in sorted(state.ranks.items()):
        if waiting := waits(state, rank):
            groups.setdefault((waiting.group, waiting.number, waiting.operation), {})[number] = waiting
    return [_waiting_line(state, found, now) for found in groups.values()]


def _waiting_line(state: JobState, found: Mapping[int, Waiting], now: float) -> str:
    first = min(found.values(), key=attrgetter("since"))
    verb = "waits" if len(found) == 1 else "wait"
    return f"{_ranks(list(found))} {verb} in {_for_whom(state, first)}, for {duration(now - first.since)}"


def _for_whom(state: JobState, waiting: Waiting) -> str:
    whom = state.awaited(waiting)
    return collective(waiting) + (f" for {_ranks(whom)}" if whom else "")


def _ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-6``."""
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(runs(numbers))}"


def first_line(text: str, limit: int = 200) -> str:
    """The first line of ``text``, cut with an ellipsis."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= limit else line[: limit - 1] + "…"


def jobs_table(states: Sequence[Row], now: float) -> str:
    """What runs and what ran, in the order given."""
    if not states:
        return "no jobs yet: run a cell under %%distribute, or `torchdist run script.py`"
    rows = [
        (
            state.job,
            state.name or "",
            state_word(state),
            str(state.world_size),
            ago(state.submitted, now) if state.submitted else "",
            duration(elapsed(state, now)),
            state.label,
        )
        for state in states
    ]
    return table(("JOB", "NAME", "STATE", "RANKS", "STARTED", "TOOK", "CELL"), rows)


def ranks_table(state: JobState, gauges: Mapping[int, Gauges] | None = None) -> str:
    """One line a rank; its memory, and that of its GPU, where that is known of any."""
    told = [(rank, (gauges or {}).get(number, Gauges())) for number, rank in sorted(state.ranks.items())]
    columns = {
        "RANK": [str(rank.rank) for rank, _ in told],
        "HOST": [rank.host for rank, _ in told],
        "PID": [str(rank.pid or "") for rank, _ in told],
        "MEMORY": [memory(state, rank, taken.memory, taken.memory_peak) for rank, taken in told],
        "GPU MEMORY": [memory(state, rank, taken.gpu_memory, taken.gpu_memory_peak) for rank, taken in told],
        "STATE": [rank_line(state, rank) for rank, _ in told],
        "RESULTS": [", ".join(rank.results) for rank, _ in told],
    }
    shown = {name: cells for name, cells in columns.items() if "MEMORY" not in name or any(cells)}
    return table(tuple(shown), zip(*shown.values(), strict=True))


def memory(state: JobState, rank: RankState, now: int | None, peak: int | None) -> str:
    """``1.2 GB``; of a rank that has ended ``peak 1.5 GB``; empty where nothing is known."""
    if rank.state in RANK_ENDS or state.final:
        return f"peak {size(peak)}" if peak is not None else ""
    return size(now) if now is not None else ""


def job_page(
    state: JobState,
    spec: JobSpec | None,
    plan: Plan | None,
    manifest: Manifest | None,
    now: float,
    gauges: Mapping[int, Gauges] | None = None,
) -> str:
    """Everything about one job: state, ranks, notes, error, receipt and plan, each where it is known."""
    parts = ["\n".join([title(state), headline(state, now), *waiting_lines(state, now)])]
    if state.ranks:
        parts.append(ranks_table(state, gauges))
    if state.notes:
        parts.append("\n".join(f"note: {note}" for note in state.notes))
    parts += lost_lines(state)
    if failed := state.failures():
        parts.append(failure(state, failed))
    if manifest:
        parts.append("captured:\n" + indent(receipt_table(manifest.receipt)))
        parts += [f"note: {note}" for note in manifest.notes]
    if plan:
        parts.append("plan:\n" + indent(plan_table(plan)))
    if spec and spec.source.strip():
        numbered = enumerate(spec.source.rstrip("\n").split("\n"), spec.first_line)
        parts.append(f"{spec.label}:\n" + "\n".join(f"{number:>5}  {line}" for number, line in numbered))
    return "\n\n".join(parts)


def indent(text: str, by: str = "  ") -> str:
    """Each line moved to the right."""
    return "\n".join(by + line if line else line for line in text.split("\n"))


def receipt_table(receipt: Sequence[Captured]) -> str:
    """What was captured: the name, what it is, how large, and the line that needs it."""
    if not receipt:
        return "nothing: the cell needs no name of the notebook"
    rows = [(item.name, item.kind, item.what, size(item.size) if item.size else "", item.needed) for item in receipt]
    return table(("NAME", "KIND", "WHAT", "SIZE", "NEEDED BY"), rows)


def plan_table(plan: Plan) -> str:
    """What would run, or ran, where."""
    rows = [
        (node.called, ", ".join(runs(node.ranks)), f"{node.address} ({node.interface})", ", ".join(node.gpus) or "CPU")
        for node in plan.nodes
    ]
    facts = [
        f"{count(plan.world_size, 'rank')}, backend {plan.backend}, OMP_NUM_THREADS={plan.threads}",
        "start: new interpreters (--fresh)" if plan.fresh else "start: forked from a warm process",
        f"results: {'every rank' if plan.collect == 'all' else 'rank 0'}, names {', '.join(plan.out)}",
    ]
    if plan.numa_binding:
        facts.append(f"NUMA binding: {plan.numa_binding}")
    if plan.timeout:
        facts.append(f"timeout: {duration(plan.timeout)}")
    if plan.env_names:
        facts.append(f"environment: {', '.join(plan.env_names)}")
    facts[1:1] = strategy_lines(plan.strategy)
    return "\n".join([*facts, table(("HOST", "RANKS", "ADDRESS", "DEVICES"), rows)])


def strategy_lines(strategy: StrategyPlan) -> list[str]:
    """A strategy, its mesh, its options and what was decided about it; none where the cell is left alone."""
    notes = [f"  note: {note}" for note in strategy.notes]
    if strategy.name == "none":
        return notes
    lines = [f"strategy: {strategy.name}, {mesh(strategy)}, {strategy.precision}"]
    if strategy.options:
        lines.append("  options: " + ", ".join(f"{name}={_value(item)}" for name, item in strategy.options.items()))
    done = [
        "each repeated block compiled" if strategy.compile else "",
        "activations computed again in backward()" if strategy.activation_checkpointing else "",
        _accumulation(strategy),
        f"checkpoints in {strategy.checkpoint}" if strategy.checkpoint else "",
        "begins at the last of them" if strategy.resume else "",
    ]
    lines += [f"  {words}" for words in done if words]
    return lines + notes


def _accumulation(strategy: StrategyPlan) -> str:
    """DeepSpeed's own steps are of several batches; elsewhere one batch is taken in parts."""
    parts = strategy.grad_accumulation
    if parts == 1:
        return ""
    return f"an optimizer step every {parts} batches" if strategy.name == "deepspeed" else f"batches in {parts} parts"


def memory_table(memory: MemoryPlan) -> str:
    """What the fullest rank needs, and whether that is there."""
    need = memory.need
    rows = [
        ("parameters", size(need.parameters)),
        ("gradients", size(need.gradients)),
        ("optimizer state", size(need.optimizer)),
        ("buffers", size(need.buffers)),
        ("activations", "not known" if need.activations is None else size(need.activations)),
        ("peak", f"at least {size(need.least)}" if need.peak is None else size(need.peak)),
    ]
    notes = [f"  note: {note}" for note in memory.notes]
    return "\n".join([f"memory: {memory.verdict}", *notes, table(("A RANK'S", "SIZE"), rows)])


def mesh(strategy: StrategyPlan) -> str:
    """``dp_shard=4 × tp=2``, the outermost dimension first."""
    degrees = [f"{name}={strategy.degree(name)}" for name in DIMENSIONS if strategy.degree(name) > 1]
    return " × ".join(degrees) or "one rank"


def _value(value: Any) -> str:
    """As one would write it in the line; a configuration only as what it is."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):  # tp_plan, or a configuration of which the keys have to do
        flat = all(isinstance(item, str) for item in value.values())
        return ",".join(f"{key}:{item}" for key, item in value.items()) if flat else f"{{{', '.join(value)}}}"
    return str(value)


def runs(ranks: Sequence[int], dash: str = "-", least: int = 3) -> list[str]:
    """``["0-6", "8", "9"]``: ascending numbers, of which ``least`` or more that follow each other are one word."""
    found: list[str] = []
    for _, run in groupby(enumerate(ranks), lambda at: at[1] - at[0]):
        words = [str(rank) for _, rank in run]
        found += [f"{words[0]}{dash}{words[-1]}"] if len(words) >= least else words
    return found


def inventory_table(inventories: Sequence[Inventory]) -> str:
    """What each node has, with one line for every GPU."""
    lines = []
    for node in inventories:
        versions = {"python": node.python, "torch": node.torch}
        known = [f"{name} {version}" for name, version in versions.items() if version]
        lines.append(", ".join([f"{node.host}: {count(node.cores, 'core')}", size(node.memory), *known]))
        lines += [
            f"  GPU {gpu.index}  {gpu.name}  {size(gpu.memory_used)} of {size(gpu.memory)} in use  {gpu.uuid}"
            + (f"  by {', '.join(map(str, gpu.pids))}" if gpu.pids else "")
            for gpu in node.gpus
        ]
        if not node.gpus:
            lines.append("  no GPU that this process may use")
    return "\n".join(lines)


def failure(state: JobState, failed: Sequence[RankState] | None = None) -> str:
    """The first failure in full, the others folded into a line."""
    failed = state.failures() if failed is None else failed
    if not failed:
        return state.reason
    first = failed[0]
    text = error_text(first.error) if first.error else first.why or first.state
    return f"rank {first.rank}{f' on {first.host}' if first.host else ''}\n{text}\n{others(state, first.rank)}".rstrip()


def others(state: JobState, first: int) -> str:
    """What became of the ranks beside the one that failed first, in one line; empty when there is none."""
    rest = [rank for number, rank in sorted(state.ranks.items()) if number != first]
    own = [rank for rank in rest if rank.error]
    lines = []
    if own:
        kinds = ", ".join(f"rank {rank.rank} {rank.error.type}" for rank in own[:8] if rank.error)
        more = f" and {len(own) - 8} more" if len(own) > 8 else ""
        lines.append(f"{count(len(own), 'other rank')} failed too: {kinds}{more}")
    stopped = sum(not rank.error and rank.state != "done" for rank in rest)
    if stopped:
        lines.append(f"{count(stopped, 'other rank')} {'was' if stopped == 1 else 'were'} stopped because of this")
    return "; ".join([*lines, *left_early(state)])


def left_early(state: JobState) -> list[str]:
    """One sentence for each rank that ended its own process in peace, as ``os._exit(0)`` does."""
    return [
        f"rank {number} {rank.why}" for number, rank in sorted(state.ranks.items()) if rank.state == "done" and rank.why
    ]


def error_text(record: ErrorRecord) -> str:
    """The traceback as the rank recorded it, or the title where it has none."""
    return record.text.rstrip() or record.title


def refusal(error: TorchDistError) -> str:
    """One of our own errors: what happened, and what to do now."""
    return f"{type(error).__name__}: {error}"


def lost_lines(state: JobState) -> list[str]:
    """One sentence for each rank whose output a full disk did not take whole."""
    ranks = [rank for _, rank in sorted(state.ranks.items()) if rank.dropped]
    return [f"rank {rank.rank}: the disk was full, {count(rank.dropped, 'printed line')} lost" for rank in ranks]


def left_behind(state: JobState, rank: int = 0) -> str:
    """The names that did not come back, each with its reason, in one line; empty when all came."""
    left = state.ranks[rank].left if rank in state.ranks else ()
    return "; ".join(f"{name}: {reason}" for name, reason in left)
