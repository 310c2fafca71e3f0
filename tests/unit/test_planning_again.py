"""The plan of the next attempt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.planning import again
from jupyter_torchdist.planning.again import next_plan, ready
from jupyter_torchdist.planning.topology import make_plan
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.protocol.plan import Died, Inventory, Plan
from jupyter_torchdist.protocol.spec import JobSpec, Options
from jupyter_torchdist.protocol.wire.again import continued, in_vain, last_step, left, sizes

GIB = 1024**3


def planned(line: str) -> tuple[Plan, Options]:
    options = parse_options(f"--hosts a,b,c --ranks 6 --restarts 1 {line}")
    hosts = [Inventory(name, 8, 64 * GIB, addresses=(f"10.0.0.{n}",)) for n, name in enumerate("abc", 1)]
    return make_plan(JobSpec("j", "cell", "pass", "Cell In[1]", 2, options, 0.0), hosts), options


@pytest.mark.parametrize(("gone", "left"), [("node0", ["node1", "node2"]), ("node1", ["node0", "node2"])])
def test_ranks_are_numbered_anew_on_the_hosts_that_are_left(gone: str, left: list[str]) -> None:
    plan, options = planned("--nodes 2:3 --strategy fsdp")
    assert plan.strategy.degrees == {"dp_shard": 6}
    less = next_plan(plan, options, {gone}, 5.0)
    assert [(node.name, node.ranks) for node in less.nodes] == [(left[0], (0, 1)), (left[1], (2, 3))]
    assert (less.world_size, less.strategy.name, less.strategy.degrees) == (4, "fsdp", {"dp_shard": 4})
    assert all((node.address, node.interface) == ("", "") for node in less.nodes)


def test_a_host_alone_needs_no_address() -> None:
    plan, options = planned("--nodes 1:3")
    (node,) = next_plan(plan, options, {"node0", "node1"}, 5.0).nodes
    assert (node.name, node.ranks, node.address, node.interface) == ("node2", (0, 1), "127.0.0.1", "lo")


def test_what_auto_chose_stays() -> None:
    plan, options = planned("--nodes 1:3 --strategy auto")
    assert next_plan(plan, options, {"node0", "node1"}, 5.0).strategy.name == plan.strategy.name


def test_a_strategy_that_needs_all_ranks() -> None:
    plan, options = planned("--nodes 2:3 --strategy tp -O tp=6")
    with pytest.raises(OptionError, match="tp"):
        next_plan(plan, options, {"node0"}, 5.0)


def test_only_checkpoints_of_this_job_are_resumed() -> None:
    plan, options = planned("--strategy ddp --checkpoint runs")
    again = next_plan(plan, options, (), 5.0)
    assert (again.strategy.resume, again.strategy.since) == (True, 5.0)
    assert replace(again, strategy=plan.strategy) == plan
    assert next_plan(again, options, (), 9.0) == again
    assert next_plan(again, options, {"node1"}, 9.0).strategy.since == 5.0
    asked, options = planned("--strategy ddp --checkpoint runs --resume")
    assert next_plan(asked, options, (), 5.0) == asked


def test_fewer_hosts_than_the_option_says() -> None:
    with pytest.raises(OptionError, match=r"--nodes 2:4, but the job has 3 hosts\n.*--nodes 2:3"):
        planned("--nodes 2:4")


@pytest.mark.parametrize("line", ["--nodes 1:3 --strategy fsdp", "--nodes 1:3 --strategy hsdp", "--nodes 2:3"])
def test_what_the_hosts_have_for_going_on_by_themselves_is_what_the_driver_would_plan(line: str) -> None:
    plan, options = planned(line)
    strategies = ready(plan, options)
    for gone in ({"node0"}, {"node2"}, {"node0", "node1"}):
        nodes = left(plan.nodes, gone)
        if (strategy := strategies.get(sizes(nodes))) is None:
            assert len(nodes) < (plan.least_nodes or 0) or "hsdp" in line
            continue
        assert continued(plan, nodes, strategy, 5.0, None) == next_plan(plan, options, gone, 5.0)


def test_hosts_that_cannot_go_on_by_themselves_have_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("--strategy fsdp", "--nodes 2:3 --strategy tp -O tp=6"):
        assert ready(*planned(line)) == {}
    plan, options = planned("--nodes 1:3 --strategy ddp")
    assert sorted(ready(plan, options)) == ["2", "2,2"]
    monkeypatch.setattr(again, "MOST", 1)
    assert sorted(ready(plan, options)) == ["2,2"]


def write(path: Path, *records: Any) -> Path:
    path.write_bytes(b"".join(codec.dumps({"t": t, **record}).encode() + b"\n" for t, record in records))
    return path


def test_the_last_step_is_what_the_strategy_counted_else_what_the_cell_logged(tmp_path: Path) -> None:
    logged = write(
        tmp_path / "0",
        (1.0, {"k": "log", "step": 90, "v": {"loss": 1.0}}),
        (5.0, {"k": "log", "step": 8, "v": {"loss": 1.0}}),
        (5.0, {"k": "log", "step": 7, "v": {"loss": 1.0}}),
        (6.0, {"k": "log", "step": 400, "v": {"loss": 1.0}, "auto": True}),
        (6.0, {"k": "steps", "n": "many"}),
    )
    none = tmp_path / "none"
    assert last_step({logged: 2.0, none: 2.0}) == 7, "the last one of this attempt; backward() counts anew each time"
    assert last_step({logged: 5.5}) is last_step({none: 0.0}) is None
    counted = write(tmp_path / "1", (5.0, {"k": "steps", "n": 41}), (6.0, {"k": "steps", "n": 42}))
    assert last_step({logged: 2.0, counted: 2.0}) == 42
    long = write(tmp_path / "2", *[(5.0, {"k": "steps", "n": number}) for number in range(5000)])
    long.write_bytes(long.read_bytes() + b'{"half')
    assert last_step({long: 2.0}) == 4999


@pytest.mark.parametrize(
    ("line", "before", "step", "said"),
    [
        ("", 41, 41, "attempt 2 ended at step 41, as attempt 1 did, by the same fault"),
        ("", 41, 42, ""),
        ("", 41, 40, ""),
        ("", None, 41, ""),
        ("", 41, None, ""),
        ("--strategy ddp --checkpoint runs", 41, 41, "run the cell again, with --resume"),
        ("--strategy ddp --checkpoint runs", 41, 35, "attempt 2 ended at step 35, and attempt 1 at step 41"),
        ("--strategy ddp --checkpoint runs", 41, 42, ""),
    ],
)
def test_an_attempt_that_got_no_further_is_not_followed_by_another(
    line: str, before: int | None, step: int | None, said: str
) -> None:
    plan, _ = planned(line)
    assert in_vain(plan, Died(1, "host", step)) == ""
    plan = replace(plan, died=Died(1, "host", before))
    found = in_vain(plan, Died(2, "host", step))
    assert said in found if said else not found
    assert in_vain(plan, Died(2, "exit code -9", step)) == "", "by another fault"
