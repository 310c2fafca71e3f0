"""What counts as progress of a rank, and what as work: the files that a rank writes, and what it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_torchdist.node.progress import KNOWN_SECONDS, Progress
from jupyter_torchdist.protocol.paths import JobPaths, NodePaths
from jupyter_torchdist.ranks.collectives import Tally

BEGAN = 1000.0


@pytest.fixture
def files(tmp_path: Path) -> NodePaths:
    files = JobPaths(tmp_path).node("node0")
    files.root.mkdir(parents=True)
    return files


@pytest.fixture
def progress(files: NodePaths) -> Progress:
    """Of ranks 4 and 5, which have begun and do nothing since."""
    progress = Progress(files, (4, 5))
    for rank in (4, 5):
        progress.lives(rank, BEGAN)
        progress.measured(rank, False, BEGAN)
    progress.look((4, 5), BEGAN)
    return progress


def passes(progress: Progress, seconds: int, rank: int, works: bool = False) -> None:
    """Both ranks are measured every two seconds, and looked at; ``rank`` may work, the other does not."""
    for now in range(0, seconds, 2):
        progress.measured(rank, works, BEGAN + now)
        progress.measured(9 - rank, False, BEGAN + now)
        progress.look((4, 5), BEGAN + now)


def test_a_rank_that_does_nothing(progress: Progress) -> None:
    passes(progress, 62, 4)
    assert progress.look((4, 5), BEGAN + 60) == [(4, 60.0, 60.0), (5, 60.0, 60.0)]


def test_work_is_no_progress(progress: Progress) -> None:
    passes(progress, 62, 4, works=True)
    assert progress.look((4, 5), BEGAN + 61) == [(4, 61.0, 0.0), (5, 61.0, 61.0)]


def test_what_wakes_up_now_and_then_is_no_work(progress: Progress) -> None:
    for now in range(0, 62, 2):
        progress.measured(4, now % 10 == 8, BEGAN + now)
        progress.look((4,), BEGAN + now)
    assert progress.look((4,), BEGAN + 60) == [(4, 60.0, 60.0)]


def test_a_rank_that_waits_spins(progress: Progress) -> None:
    """NCCL's ranks use a whole core while they wait."""
    progress.waits(4, True)
    passes(progress, 62, 4, works=True)
    assert progress.look((4,), BEGAN + 60) == [(4, 60.0, 60.0)]
    progress.waits(4, False)
    assert progress.look((4,), BEGAN + 62) == [(4, 62.0, 0.0)]


def test_a_rank_that_was_not_measured_may_work(progress: Progress) -> None:
    passes(progress, 20, 4)
    later = BEGAN + 20 + KNOWN_SECONDS
    assert progress.look((4,), later) == [(4, later - BEGAN, 0.0)]


@pytest.mark.parametrize("name", ["out", "err", "metrics", "display"])
def test_what_a_rank_writes_is_progress(progress: Progress, files: NodePaths, name: str) -> None:
    passes(progress, 32, 4)
    getattr(files, name)(4).write_bytes(b"a line\n")
    assert progress.look((4, 5), BEGAN + 30) == [(4, 0.0, 0.0), (5, 30.0, 30.0)]
    passes(progress, 42, 4)
    assert progress.look((4,), BEGAN + 40) == [(4, 10.0, 10.0)]


def test_collectives_are_progress(progress: Progress, files: NodePaths) -> None:
    tallies = [Tally(files.tally, local) for local in (0, 1)]
    passes(progress, 32, 4)
    tallies[1].note(3)
    assert progress.look((4, 5), BEGAN + 30) == [(4, 30.0, 30.0), (5, 0.0, 0.0)]
    tallies[0].note(256)
    assert progress.look((4, 5), BEGAN + 35) == [(4, 0.0, 0.0), (5, 5.0, 5.0)]
