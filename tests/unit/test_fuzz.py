"""No input makes a reader raise what it does not say (``tests/fuzz.py``)."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import ChannelError
from jupyter_torchdist.protocol.events import parse_lines
from jupyter_torchdist.protocol.wire import frames
from jupyter_torchdist.verbs import ansi
from tests import fuzz


def test_no_reader_is_broken_by_its_input() -> None:
    wrong = fuzz.run(20_000, seed=int(os.environ.get("TORCHDIST_SEED", "1")))
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_million_inputs() -> None:
    seed = int(os.environ.get("TORCHDIST_SEED", time.time_ns()))
    wrong = fuzz.run(int(os.environ.get("TORCHDIST_CASES", "10_000_000")), seed)
    assert not wrong, f"seed {seed}\n" + "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.parametrize("piece", [b"[", b'{"a":', b'"', b"\\u0040", b"\x1b[", b"\r", b"\xa7T", b"@", b"\n", b'"@f64:'])
def test_no_reader_is_slower_than_linear(piece: bytes) -> None:
    def seconds(count: int) -> float:
        data = piece * count
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            parse_lines(data + b"\n")
            for read in (codec.loads, lambda data: list(frames.Decoder().feed(data))):
                with contextlib.suppress(ValueError, ChannelError):
                    read(data)
            ansi.safe(data.decode("latin-1"))
            best = min(best, time.perf_counter() - began)
        return best

    small, large = seconds(20_000), seconds(200_000)
    assert large < 40 * small + 0.05
