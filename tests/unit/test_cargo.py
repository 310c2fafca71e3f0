"""What the driver sends to nodes, and what nodes get from each other."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jupyter_torchdist.driver import cargo as module
from jupyter_torchdist.driver.cargo import Cargo, Chains
from jupyter_torchdist.protocol.errors import LaunchError
from jupyter_torchdist.protocol.plan import NodePlan, Plan
from jupyter_torchdist.protocol.wire.messages import Fetched, Missing

NODES = tuple(NodePlan(name, (rank,), host=name) for rank, name in enumerate("abc"))
PLAN = Plan("job", 3, "gloo", NODES, False, None, None, 5.0)
BIG, SMALL = b"x" * 1000, b"y" * 10
BIG_ONE, SMALL_ONE = (hashlib.sha256(data).hexdigest() for data in (BIG, SMALL))
BOTH = (BIG_ONE, SMALL_ONE)


@pytest.fixture
def blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "LARGE", 100)
    monkeypatch.setattr(module, "PIECE", 400)
    (tmp_path / BIG_ONE).write_bytes(BIG)
    (tmp_path / SMALL_ONE).write_bytes(SMALL)
    return tmp_path


def places(answers: list[tuple[tuple[str, int], dict[str, int]]]) -> list[str]:
    return [place[0] for place, _ in answers]


def test_each_node_gets_from_the_one_before_it() -> None:
    chains, lacks = Chains(), {"d": 100}
    assert places(chains.answered("b", ("b", 1), [], lacks)) == [], "from this machine"
    assert places(chains.answered("a", ("a", 1), [], lacks)) == ["b"]
    assert places(chains.answered("c", ("c", 1), [], lacks)) == ["a"]
    assert places(chains.answered("a", ("a", 2), [], lacks)) == ["b"], "asked again: nothing goes in a circle"
    assert places(chains.answered("b", ("b", 2), [], lacks)) == []


def test_a_node_that_has_it_is_the_first() -> None:
    chains, lacks = Chains(), {"d": 100}
    chains.answered("a", ("a", 1), [], lacks)
    chains.answered("b", ("b", 1), ["d"], {})
    assert places(chains.answered("c", ("c", 1), [], lacks)) == ["a"]
    assert places(chains.answered("a", ("a", 1), [], lacks)) == ["b"]


def test_a_node_at_which_nobody_can_ask_is_passed_over() -> None:
    chains, lacks = Chains(), {"d": 100}
    chains.answered("a", ("a", 1), [], lacks)
    chains.answered("b", None, [], lacks)
    assert places(chains.answered("c", ("c", 1), [], lacks)) == ["a"]


def test_only_large_blobs_go_along_the_nodes(blobs: Path) -> None:
    chains = Chains()
    first, second = (Cargo(PLAN, node, blobs, BOTH, chains) for node in NODES[:2])
    assert first.asked()["secret"] == second.asked()["secret"] == chains.secret
    assert first.lacks(Missing("job", BOTH, place=("10.0.0.1", 5))) == []
    assert sum(len(data) for _, data in iter(first.frame, None)) == len(BIG) + len(SMALL)
    [order] = second.lacks(Missing("job", BOTH))
    assert (order["address"], order["port"], order["blobs"]) == ("10.0.0.1", 5, {BIG_ONE: len(BIG)})
    assert [header["digest"] for header, _ in iter(second.frame, None)] == [SMALL_ONE]
    second.stored(SMALL_ONE, True)
    second.fetched(Fetched("job", 600))
    assert (second.sent, second.total) == (610, 1010)
    second.fetched(Fetched("job", 0, {BIG_ONE: 600}))
    assert [(header["offset"], header["last"]) for header, _ in iter(second.frame, None)] == [(600, True)]
    second.stored(BIG_ONE, True)
    assert second.complete
    second.fetched(Fetched("job", 0, {BIG_ONE: 600}))
    assert second.frame() is None, "it is there"


def test_one_node_or_small_data_needs_no_chain(blobs: Path) -> None:
    one = Plan("job", 1, "gloo", NODES[:1], False, None, None, 5.0)
    assert "secret" not in Cargo(one, NODES[0], blobs, BOTH, Chains()).asked()
    assert "secret" not in Cargo(PLAN, NODES[0], blobs, (SMALL_ONE,), Chains()).asked()


def test_it_goes_on_after_what_the_node_has(blobs: Path) -> None:
    cargo = Cargo(PLAN, NODES[0], blobs, BOTH, Chains())
    cargo.lacks(Missing("job", BOTH, have={BIG_ONE: 300}))
    assert cargo.total == 710
    frames = [(header["digest"], header["offset"], header["last"]) for header, _ in iter(cargo.frame, None)]
    assert frames == [(BIG_ONE, 300, False), (BIG_ONE, 700, True), (SMALL_ONE, 0, True)]


def test_data_that_is_damaged_here_is_told(blobs: Path) -> None:
    cargo = Cargo(PLAN, NODES[0], blobs, BOTH, Chains())
    cargo.lacks(Missing("job", BOTH))
    list(iter(cargo.frame, None))
    cargo.stored(BIG_ONE, False)
    assert sum(len(data) for _, data in iter(cargo.frame, None)) == len(BIG), "damaged on its way: once more"
    (blobs / BIG_ONE).write_bytes(b"z" * 1000)
    with pytest.raises(LaunchError, match="is damaged"):
        cargo.stored(BIG_ONE, False)
