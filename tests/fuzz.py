"""Readers of everything that user code, another version or a browser may write, and how to make such input."""

from __future__ import annotations

import contextlib
import hmac
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jupyter_torchdist.feed.feed import Feed
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import ChannelError, OptionError, TorchDistError
from jupyter_torchdist.protocol.events import KINDS, RANK, Event, Source, parse_lines
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.protocol.state import JobState, fold
from jupyter_torchdist.protocol.typed import Malformed
from jupyter_torchdist.protocol.wire import beats, frames
from jupyter_torchdist.protocol.wire.messages import AGENT_SAYS, DRIVER_SAYS, understood
from jupyter_torchdist.store import gauges, jobdir, journal, metrics
from jupyter_torchdist.store.displays import DisplayFile
from jupyter_torchdist.store.times import TimeIndex
from jupyter_torchdist.testing import FakeJob
from jupyter_torchdist.verbs import ansi

GOLDEN = Path(__file__).parent / "unit" / "golden"

PIECES = (
    *(b"1e999", b"-1", b"1" + b"0" * 400, b"null", b"true", b"[]", b"{}", b'""', b'"@nan"', b'"@int:x"', b"0.5"),
    *(b'"\\ud800"', b"[" * 600 + b"]" * 600, b"\xff", b"\n", b"\x00", b'"@f64:x"', b"{" * 50, b",", b":", b'"'),
)


def mutated(data: bytes, choose: random.Random) -> bytes:
    """``data`` with one to four changes: bytes changed, cut or doubled, or a value in the place of another."""
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(len(data) + 1)
        kind = choose.randrange(5)
        if kind == 0:
            data = data[:at] + bytes([choose.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + choose.randint(1, 20) :]
        elif kind == 2:
            data = data[:at] + data[at : at + choose.randint(1, 40)] * 2 + data[at:]
        elif kind == 3:
            data = data[:at] + choose.choice(PIECES) + data[at:]
        else:
            data = _with_another_value(data, choose)
    return data


def _with_another_value(data: bytes, choose: random.Random) -> bytes:
    """The value behind one of the colons replaced."""
    places = [place for place, byte in enumerate(data) if byte == 0x3A]
    if not places:
        return data + choose.choice(PIECES)
    at = choose.choice(places) + 1
    ends = [end for end in (data.find(b",", at), data.find(b"}", at)) if end >= 0]
    return data[:at] + choose.choice(PIECES) + data[min(ends, default=len(data)) :]


class Target:
    """One reader: ``seeds`` are valid input, ``read`` must raise nothing but ``refusals``."""

    def __init__(
        self, read: Callable[[bytes], object], seeds: list[bytes], refusals: tuple[type[Exception], ...] = ()
    ) -> None:
        self.read, self.seeds, self.refusals = read, seeds, refusals

    def try_one(self, choose: random.Random) -> bytes:
        """Read one changed input. Raises what the reader must not raise."""
        data = mutated(choose.choice(self.seeds), choose)
        with contextlib.suppress(*self.refusals):
            self.read(data)
        return data


def _lines(data: bytes) -> None:
    fold(parse_lines(data + b"\n").events, JobState(world_size=4))
    fold(parse_lines(data + b"\n", Source(RANK, frozenset([0, 1]))).events)


def _frames(data: bytes) -> None:
    for header, _ in frames.Decoder().feed(data):
        for says in (DRIVER_SAYS, AGENT_SAYS):
            with contextlib.suppress(ChannelError):
                understood(says, header)


def targets(directory: Path) -> dict[str, Target]:
    """By name. Files are written below ``directory``."""
    home = Home(directory / "home")

    def a_job() -> JobPaths:
        job = FakeJob(home).running()
        job.rank(0).prints("a line\n").records({"t": 1.0, "k": "log", "step": 1, "v": {"loss": 0.5}})
        job.rank(0).displays({"number": 1, "id": "a", "data": {"text/plain": "x"}, "metadata": {}})
        job.ended()
        job.paths.node("node0").gauges.write_text("{}")
        return job.paths

    paths = a_job()
    golden = (GOLDEN / "journal.jsonl").read_bytes().splitlines()
    known = [Event(kind, 1.0, rank=0, data={"text": "t", "code": 1, "lines": 1}).to_line()[:-1] for kind in KINDS]

    def file(
        place: Callable[[JobPaths], Path], read: Callable[[JobPaths], object], seeds: Sequence[bytes] = ()
    ) -> Target:
        """A reader of a file, in a job of its own."""
        own = a_job()
        path = place(own)

        def write_and_read(data: bytes) -> None:
            path.write_bytes(data)
            read(own)

        return Target(write_and_read, list(seeds) or [path.read_bytes()], (TorchDistError,))

    def feed(data: bytes) -> None:
        view = Feed(paths, home)
        view.receive({"type": "open"})
        with contextlib.suppress(ValueError):
            message = codec.loads(data)
            if isinstance(message, dict):
                view.receive(message)
                view.poll(1.0)

    questions: list[dict[str, Any]] = [
        {"type": "open", "logs": {"0.out": 3}},
        {"type": "ack", "n": 3},
        {"type": "ask", "id": 1, "what": "older", "at": {"0.out": 5}, "files": [], "limit": 100},
        {"type": "ask", "id": 2, "what": "around", "file": "0.out", "offset": 2, "limit": 100},
        {"type": "ask", "id": 3, "what": "search", "pattern": "a|l+", "regex": True, "case": False, "files": []},
        {"type": "ask", "id": 4, "what": "curves", "names": ["loss"], "mode": "band", "ranks": [0], "width": 100.0},
        {"type": "ask", "id": 5, "what": "display", "rank": 0, "number": 1},
    ]
    messages = [
        {"type": kind, "job": "j", "attempt": 1, "file": "f", "offset": 0, "grace": 1.0} for kind in DRIVER_SAYS
    ]
    summary = paths.summary.read_bytes()
    return {
        "events": Target(_lines, [*golden, *known]),
        "frames": Target(_frames, [frames.encode(message, b"body") for message in messages], (ChannelError,)),
        "beats": Target(
            lambda data: beats.opened(hmac.digest(b"secret", data, "sha256") + data, "secret"),
            [codec.dumps(beats.Beat("j", 1, "node1", 1, "runs", False, ("node2",)).to_json()).encode()],
            (ChannelError,),
        ),
        "json": Target(codec.loads, [*golden, summary], (ValueError,)),
        "summary": Target(lambda data: JobState.from_json(codec.loads(data)), [summary], (ValueError,)),
        "spec": file(lambda job: job.spec, jobdir.read_spec),
        "plan": file(lambda job: job.plan, jobdir.read_plan),
        "manifest": file(lambda job: job.manifest, jobdir.read_manifest),
        "journal": file(lambda job: job.journal, journal.read),
        "gauges": file(lambda job: job.node("node0").gauges, gauges.read, [b'{"0":{"cpu":50,"memory":100}}']),
        "metrics": file(lambda job: job.node("node0").metrics(0), metrics.columns),
        "displays": file(
            lambda job: job.node("node0").display(0), lambda job: list(DisplayFile(job.node("node0").display(0)).read())
        ),
        "times": file(
            lambda job: job.node("node0").times(0),
            lambda job: TimeIndex(job.node("node0").times(0)).marks("out", 0, 100),
            [bytes(range(64))],
        ),
        "questions": Target(feed, [json.dumps(question).encode() for question in questions]),
        "options": Target(
            lambda data: parse_options(data.decode("utf-8", "backslashreplace")),
            [
                b"--ranks 2 --strategy fsdp -O a=1",
                b"--gpus 2 --timeout 2h --env A=1 --out a,b",
                b"--name 'a b' --fresh",
            ],
            (OptionError,),
        ),
        "escapes": Target(lambda data: ansi.safe(data.decode("utf-8", "backslashreplace")), [b"\x1b[31ma\x1b[0m\r\n"]),
        "types": Target(
            lambda data: [says[kind].from_json(codec.loads(data)) for says in (DRIVER_SAYS,) for kind in says],
            [json.dumps(message).encode() for message in messages],
            (Malformed, ValueError),
        ),
    }


def run(cases: int, seed: int) -> list[str]:
    """What went wrong in ``cases`` inputs, shared out among all readers."""
    wrong: list[str] = []
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        found = targets(Path(directory))
        weights = {name: 1 if name in _SLOW else 60 for name in found}
        whole = sum(weights.values())
        for name, target in found.items():
            for _ in range(max(1, cases * weights[name] // whole)):
                state = choose.getstate()
                try:
                    target.try_one(choose)
                except Exception as error:  # that is what is looked for
                    choose.setstate(state)
                    data = mutated(choose.choice(target.seeds), choose)
                    wrong.append(f"{name}: {type(error).__name__}: {error} for {data[:300]!r}")
                    if len(wrong) > 20:
                        return wrong
    return wrong


_SLOW = ("spec", "plan", "manifest", "journal", "gauges", "metrics", "displays", "times", "questions")
"""Readers of files, and of a whole feed."""
